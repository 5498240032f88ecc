"""Patches that are called, and write into what they are given: parts of tensors, and the options. On the CPU."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from tools import architectures
from tools.driving import SMALL_RUN, compiled
from tools.oracles import error, fallbacks, shapes
from tools.patching import CHANGED

pytestmark = [
    pytest.mark.usefixtures("clean_stats"),
    pytest.mark.skipif(architectures.is_older(), reason="its models hand patches less"),
]
RUN = {"width": 128, "height": 128, "steps": 5, "tokens": 24}


def make(kind):
    from tools.architectures import patchers

    return patchers.make(kind)


def assert_as_eager(models, patcher, patched):
    """Three runs of either give the same pictures, which are others than without the patch. patched: of a model."""
    plain, fast = patched(patcher.clone()), patched(compiled(patcher))
    for seed in range(3):
        wanted = models.sample(plain, **RUN, seed=seed)
        assert torch.equal(models.sample(fast, **RUN, seed=seed), wanted), (seed, fallbacks())
        assert error(wanted, models.sample(patcher, **RUN, seed=seed)) > CHANGED


def change(tensor):
    tensor[:, :5] *= 1.5


def change_past_torch(tensor):
    tensor.numpy()[:, :5] *= 1.5


WRITING = {  # by the number of the call; what becomes of it
    "always": (lambda n: True, change, "tape"),
    "after some steps": (lambda n: n > 6, change, "eager"),
    "at other calls of each step": (lambda n: n % 3 == n // 7 % 2, change, "eager"),
    "past torch": (lambda n: True, change_past_torch, "eager"),
}


@pytest.mark.parametrize("name", WRITING)
def test_a_part_of_a_tensor(models, name):
    """Z-Image hands over its picture's tokens, a part of all. Written at some calls alone, they must not be lost."""
    when, write, state = WRITING[name]

    def patched(model):
        calls = [0]

        def patch(given):
            calls[0] += 1
            if when(calls[0]):
                write(given["img"])
            return {}

        model.set_model_double_block_patch(patch)
        return model

    assert_as_eager(models, make("ZImage"), patched)
    (shape,) = shapes()
    assert shape["state"] == state and bool(fallbacks()) == (state == "eager"), fallbacks()


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize("where", ["beside the others", "in a dict of theirs"])
def test_options_for_another_patch(models, where, since):
    """What one patch leaves among the options, another one finds there, in the first forward too, and in mid-run."""

    def patched(model):
        calls = [0]

        def leaves(given):
            calls[0] += 1
            options = given["transformer_options"]
            if calls[0] > since:
                into = options if where == "beside the others" else options["model_patch_data"]
                into["factor"] = 1.0 + calls[0] / 8
            return given

        def scales(q, k, v, extra_options=None, **others):
            found = extra_options.get("factor", extra_options["model_patch_data"].get("factor", 1.0))
            return {"q": q, "k": k, "v": v * found} | others

        model.set_model_post_input_patch(leaves)
        model.set_model_attn1_patch(scales)
        return model

    assert_as_eager(models, make("Anima"), patched)


class Leaves:
    """Leaves something among the options at each call. It reads a number back, so it is called in each forward."""

    def __init__(self, leave):
        self.calls, self._leave = 0, leave

    def __call__(self, given):
        self._leave(self, given["transformer_options"]["model_patch_data"], given["x"])
        return given if given["x"].abs().max().item() > 0 else None

    def counted(self):
        """How many calls there were; one more now."""
        self.calls += 1
        return self.calls


def mean(x):
    return x.mean(dim=(2, 3, 4)).abs()[:, None, None, :1]  # [B, 1, 1, 1]


LEFT = {  # what a patch leaves in a dict of the forward's, what a later one makes of that, and what becomes of it
    "a tensor": (lambda me, data, x: data.update(t=mean(x)), lambda me, data: data["t"], "tape"),
    "under itself": (lambda me, data, x: data.update({me: mean(x)}), lambda me, data: data[me], "tape"),
    "in a list": (
        lambda me, data, x: data.setdefault("all", [mean(x)]).append(mean(x) * 2),
        lambda me, data: sum(data["all"]), "tape",
    ),
    "what it was given": (lambda me, data, x: data.update(x=x), lambda me, data: mean(data["x"]), "tape"),
    "a part of that": (
        lambda me, data, x: data.update(x=x[:, 1:]), lambda me, data: mean(data["x"].mul_(1.25)), "tape",
    ),
    "a tensor and a number": (
        lambda me, data, x: data.update(t=mean(x), n=3), lambda me, data: data["t"] * data["n"], "tape",
    ),
    "another number each time": (
        lambda me, data, x: data.update(t=mean(x), n=me.counted()), lambda me, data: data["t"] * data["n"], "eager",
    ),
    "some steps later": (
        lambda me, data, x: data.update(t=mean(x)) if me.counted() > 3 else None,
        lambda me, data: data.get("t", 0.5), "eager",
    ),
    "an object": (
        lambda me, data, x: data.update(t=SimpleNamespace(of=mean(x))), lambda me, data: data["t"].of, "eager",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_tensors_for_another_patch(models, name):
    """They are on the tape, from the call that leaves them to whoever reads them; of two such patches, each its own."""
    leave, read, state = LEFT[name]

    def patched(model):
        first, second = Leaves(leave), Leaves(lambda me, data, x: data.update(more=mean(x) / 2))

        def scales(q, k, v, extra_options=None, **others):
            data = extra_options["model_patch_data"]
            return {"q": q, "k": k, "v": v * (1 + read(first, data) + data["more"])} | others

        model.set_model_post_input_patch(first)
        model.set_model_post_input_patch(second)
        model.set_model_attn1_patch(scales)
        return model

    assert_as_eager(models, make("Anima"), patched)
    (shape,) = shapes()
    assert shape["state"] == state and bool(fallbacks()) == (state == "eager"), fallbacks()


def test_what_a_patch_was_given_is_let_go(pack):
    """At once, not when the collector comes: it may be as large as all that a forward needs."""
    from anyshape.accel.tape.patch_call import perform

    seen = []

    def patch(x, named, options):
        seen.extend(map(weakref.ref, (x, named["x"])))
        return x + 1

    gc.disable()
    try:
        perform(patch, (torch.ones(3), {"x": torch.ones(2)}, {"sigmas": torch.ones(1)}), {}, {"sigmas": torch.ones(1)})
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_parts_of_one_tensor():
    from anyshape.accel.tape.overlaps import lie_apart

    x = torch.zeros(2, 8, 6, 4)
    for a, b, wanted in (
        (x[:, :3], x[:, 3:], True), (x[:, 3:], x[:, :3], True), (x[:1], x[1:], True), (x[..., :2], x[..., 2:], True),
        (x[:, :4], x[:, 3:], False), (x, x[:, :1], False), (x[:1, :3], x[1:, 3:], True), (x[:, :1], x[:, 4:5], True),
        (x[:, :3].transpose(1, 2), x[:, 3:].transpose(1, 2), True), (x[:, :3], x[:, 3:].transpose(1, 2), False),
        (x[:, ::2], x[:, 1::2], True), (x[:1, :2].expand(3, 2, 6, 4), x[:1, 2:].expand(3, 6, 6, 4), True),
    ):  # fmt: skip
        assert lie_apart(a, b) == wanted  # in doubt they do not


def test_what_a_patch_gave_is_not_what_was_made_of_it(models, fresh):
    """A forward that is broken off goes on in eager with what patches gave, before others wrote into that."""

    def patched(model):
        calls, later = [0], [0]

        def counts(h, options):
            calls[0] += 1
            return h * (1 + calls[0] / 100)

        def writes(h, options):
            h[:, :2] *= 1.5
            return h

        def another_type(n, options):
            later[0] += 1
            return n.half() * 1.25 if later[0] > 40 else n * 1.25

        model.set_model_input_block_patch(counts)
        model.set_model_input_block_patch(writes)
        model.set_model_attn2_output_patch(another_type)
        return model

    run = SMALL_RUN | {"steps": 12}
    plain, fast = patched(fresh.clone()), patched(compiled(fresh))
    for seed in range(2):
        wanted = models.sample(plain, **run, seed=seed)
        assert error(models.sample(fast, **run, seed=seed), wanted) < 1e-5
    assert any("several shapes or types" in each["reason"] for each in fallbacks())


@pytest.mark.parametrize("since", [0, 60])
@pytest.mark.parametrize("part", [lambda n: n.view(n.shape), lambda n: n.unflatten(1, (2, -1)).flatten(1, 2)])
def test_a_patch_gives_back_a_view_and_the_next_one_writes_into_it(models, fresh, part, since):
    """Queries, keys and values begin as one tensor: who writes into the queries writes into all of them."""

    def patched(model):
        calls, later = [0], [0]

        def views(n, context, value, options):
            calls[0] += 1
            return part(n) if calls[0] % 5 else part(n) * 1.5, context, value

        def writes(n, context, value, options):
            later[0] += 1
            if later[0] > since:
                n[:, ::2] *= 1.2
            return n, context, value

        model.set_model_attn1_patch(views)
        model.set_model_attn1_patch(writes)
        return model

    assert_as_eager(models, fresh, patched)


def test_copies_lie_in_one_another_as_their_originals_do(pack) -> None:
    """What one patch has given back as a view, the next one gets beside the tensor that it is of."""
    from anyshape.accel.tape.overlaps import copies

    def of_whole(whole):
        rows, across = whole[2:4], whole.transpose(0, 1)
        return [whole[1:3], whole, across, rows, rows.view(-1), torch.ones(3)]

    def of_slices(whole):  # as q, k and v are of one product: none has an element of another
        q, k, v = whole.chunk(3, dim=1)
        return [q, k, v, v.view(v.shape), whole[:, :0]]

    for made in (of_whole, of_slices):
        tensors = made(torch.arange(48.0).view(8, 6))
        found = list(copies(tensors).values())
        assert all(map(torch.equal, found, tensors))
        for place in range(len(tensors)):
            for each in (found, tensors):
                each[place].mul_(2).add_(place)
            assert all(map(torch.equal, found, tensors)), place
