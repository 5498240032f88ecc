"""Another image for patches of other packs: other tensors on the same tape."""

import gc

import pytest
import torch

from tools import embed
from tools.adapters import Adapter, attending, widths
from tools.driving import compiled, skipping
from tools.oracles import counted, error, fallbacks
from tools.patching import CHANGED, assert_equal, run, takes_of, with_patch
from tools.skip_driving import PLANNED, RUN

embed.bare_pack()

from anyshape.accel.tape.likeness import Pairs  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.state import look  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_stats")
SIZES = (dict(), dict(width=64, height=96), dict(batch=2))


@pytest.fixture
def adapter(models, fresh):
    torch.manual_seed(0)
    return Adapter(widths(models, fresh))


class Scale:
    """A patch with several tensors."""

    def __init__(self, *tensors, by=1.0):
        self.tensors, self.by = tensors, by

    def __call__(self, h, options):
        for tensor in self.tensors:
            h = h * tensor * self.by
        return h


def scaling(*tensors, **settings):
    return lambda patcher: patcher.set_model_input_block_patch(Scale(*tensors, **settings))


def numbers(*values):
    return [torch.tensor([value]) for value in values]


def test_nothing_is_recorded_again(models, fresh, adapter, recordings):
    """Sizes and images in turns, the first one again too, and each with the adapter loaded again."""
    fast, pictures = compiled(fresh), []
    loaded = [adapter, Adapter(adapter.widths), adapter, adapter]
    for image, each in enumerate(loaded):
        patch = attending(each, image % 3)
        for at in SIZES:
            pictures.append(assert_equal(models, with_patch(fresh, patch), with_patch(fast, patch), **at))
    assert len(recordings) == len(SIZES) and not fallbacks()
    for before, after in zip(pictures, pictures[len(SIZES) :], strict=False):
        assert error(before, after) > CHANGED


def test_in_a_range_of_steps(models, fresh, adapter, recordings):
    fast = compiled(fresh)
    for image in range(3):
        patch = attending(adapter, image, start=8.0, end=1.0)
        assert_equal(models, with_patch(fresh, patch), with_patch(fast, patch), steps=8)
    assert len(recordings) == 3  # before, within, after


def test_images_in_turns(models, fresh, adapter, recordings):
    """Both are there all the time, so each goes on with what it has."""
    fast, patches = compiled(fresh), [attending(adapter, image) for image in range(2)]
    pairs = [(with_patch(fresh, patch), with_patch(fast, patch)) for patch in patches]
    for _ in range(3):
        for eager, ours in pairs:
            assert_equal(models, eager, ours)
    takes = takes_of(fast)
    assert len(recordings) == 1 and len(takes) == 2 and takes[0].program is takes[1].program


def test_images_that_are_gone_leave_nothing(models, fresh, adapter):
    fast = compiled(fresh)
    for image in range(6):
        patch = attending(adapter, image)
        run(models, with_patch(fast, patch))
        del patch
        gc.collect()
    assert len(takes_of(fast)) == 1


def test_skipped_steps(models, fresh, adapter, recordings):
    """The program without the middle goes with the whole one."""
    models.sample(skipping(compiled(fresh)), **RUN)
    patcher = skipping(compiled(fresh))
    for image in range(3):
        patch = attending(adapter, image)
        eager, ours = with_patch(skipping(fresh), patch), with_patch(patcher, patch)
        wanted = models.sample(eager, **RUN)
        del recordings[:]
        assert error(models.sample(ours, **RUN), wanted) < CHANGED
        assert counted()["skipped"] and (not image or not recordings)
    assert counted()["full"] == PLANNED["full"]


def test_a_patch_for_a_block_that_the_model_lacks(models, fresh, adapter, recordings):
    """It is never called, so nothing follows from it. Where it is set, or that it is set, may be read."""

    def patch(patcher, image, number=9):
        attending(adapter, image)(patcher)
        patcher.set_model_attn2_replace(lambda q, k, v, options: v * image, "input", number)

    fast = compiled(fresh)
    for image, number in ((0, 9), (1, 9), (1, 8)):
        set_patches = lambda p, image=image, number=number: patch(p, image, number)  # noqa: E731
        assert_equal(models, with_patch(fresh, set_patches), with_patch(fast, set_patches))
    assert len(recordings) == 2


def test_a_program_that_fits_the_weights_no_more(models, fresh, adapter, recordings, monkeypatch):
    """No image inherits it: it is recorded once more."""
    from anyshape.accel import tape_tier
    from anyshape.accel.tape.binding import NotBound

    fast = compiled(fresh)
    run(models, with_patch(fast, attending(adapter, 0)))
    failing, own = [True], tape_tier.bound

    def bound(*args):
        if failing:
            failing.clear()
            raise NotBound
        return own(*args)

    monkeypatch.setattr(tape_tier, "bound", bound)
    assert_equal(models, with_patch(fresh, attending(adapter, 1)), with_patch(fast, attending(adapter, 1)))
    assert len(recordings) == 2 and not failing and not fallbacks()


def test_patches_that_are_called(models, fresh, recordings):
    """They count their calls. Others of the same code are called in their place, beside those that are recorded."""
    counts = {}

    def patch(patcher, image, name):
        def counted(h, options):
            counts[name] = counts.get(name, 0) + 1
            return h * image * (1 + counts[name] / 100)

        scaling(image + 1)(patcher)
        patcher.set_model_output_block_patch(lambda h, skip, options: (counted(h, options), skip))

    fast, pictures, made = compiled(fresh), [], []
    for number, image in enumerate(numbers(0.5, 0.8, 1.2)):
        eager = with_patch(fresh, lambda p: patch(p, image, f"eager {number}"))  # noqa: B023
        ours = with_patch(fast, lambda p: patch(p, image, f"ours {number}"))  # noqa: B023
        for at in SIZES:
            pictures.append(assert_equal(models, eager, ours, **at))
        assert counts[f"ours {number}"] == counts[f"eager {number}"]
        made.append(len(recordings))
    assert made[0] == made[2] and any(take.live for take in takes_of(fast)) and not fallbacks()
    assert error(pictures[0], pictures[3]) > CHANGED


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda a, b: scaling(a), lambda a, b: scaling(b, by=1.5)),
        (lambda a, b: scaling(a), lambda a, b: scaling(b[None])),
        (lambda a, b: scaling(a), lambda a, b: scaling(b.half())),
        (lambda a, b: scaling(a, b), lambda a, b: scaling(b, b)),
        (lambda a, b: scaling(a, a), lambda a, b: scaling(a, b)),
        (lambda a, b: scaling(a), lambda a, b: scaling(a, b)),
    ],
    ids=["another setting", "another form", "another dtype", "one for two", "two for one", "one more"],
)  # fmt: skip
def test_what_is_another_recording(models, fresh, recordings, first, second):
    fast, made = compiled(fresh), []
    for of in (first, second):
        patch = of(*numbers(0.5, 1.5))
        assert_equal(models, with_patch(fresh, patch), with_patch(fast, patch))
        made.append(len(recordings))
    assert made == [1, 2] and not fallbacks()


def test_a_number_of_the_image_decides(models, fresh, recordings):
    """Then its tensor may not be another one: the patch is called, with each image. With other settings it may be one
    that keeps what it sees, so that is found out once more."""

    def deciding(image, otherwise):
        def patch(h, options):
            return h * image if image.sum() > 1 else h * otherwise

        return lambda patcher: patcher.set_model_input_block_patch(patch)

    fast, made = compiled(fresh), []
    for image, otherwise in zip(numbers(2.0, 0.3, 1.5, 0.3), (0.5, 0.5, 0.5, 0.7), strict=True):
        patch = deciding(image, otherwise)
        assert_equal(models, with_patch(fresh, patch), with_patch(fast, patch))
        made.append(len(recordings))
    assert made == [2, 2, 2, 3]


@pytest.mark.parametrize("which", ["weight", "its memory", "option"])
def test_a_tensor_that_is_the_models_too(models, fresh, which):
    """Which of the two a forward reads would be one guess for all images, so the patch is called."""
    weight = fresh.model.diffusion_model.out[2].bias

    def patch(patcher):
        kept = {"weight": weight, "its memory": weight.data, "option": torch.tensor([1.5])}[which]
        patcher.model_options["transformer_options"]["scale"] = kept

        def scale(h, options):
            return h * options["scale"].sum() if which == "option" else h * (1 + kept.mean())

        def other(h, hsp, options):
            return h * (1 + kept.sum()), hsp

        patcher.set_model_input_block_patch(scale)
        patcher.set_model_output_block_patch(other)

    eager, fast = with_patch(fresh, patch), with_patch(compiled(fresh), patch)
    for seed in range(2):
        assert_equal(models, eager, fast, seed=seed)
    assert any(take.live for take in takes_of(fast))


def test_each_object_takes_one_place():
    """Two objects of one kind do not take the place of one in several patches, nor one of theirs."""
    x, y, z = (torch.ones(2) for _ in range(3))
    patches = [[Scale(each) for each in of] for of in ((x, y), (y, z), (z, z), (y, x))]
    two, same, fewer, crossed = (tuple(map(look, of)) for of in patches)
    leaves = {id(x), id(y), id(z)}
    pairs = Pairs(leaves)
    assert pairs.alike(two, same) and pairs.tensors == {id(x): y, id(y): z}
    assert not Pairs(leaves).alike(two, fewer) and not Pairs(leaves).alike(fewer, two)
    assert Pairs(leaves).alike(two, crossed) and Pairs(leaves).alike(two, two)
    assert not Pairs({id(x)}).alike(two, same)  # of y the recording knows nothing


def test_a_size_that_is_read(models, fresh, recordings):
    """Of a tensor that is not on the tape otherwise."""

    def patch(patcher, mask):
        patcher.set_model_input_block_patch(lambda h, options: h * (1 + mask.numel() / 10))

    fast = compiled(fresh)
    for mask, count in ((torch.ones(2), 1), (torch.zeros(2), 1), (torch.ones(3), 2)):
        set_patch = lambda patcher, mask=mask: patch(patcher, mask)  # noqa: E731
        assert_equal(models, with_patch(fresh, set_patch), with_patch(fast, set_patch))
        assert len(recordings) == count
