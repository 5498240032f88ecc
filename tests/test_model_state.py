"""What other packs keep in a model, or beside it: a change shows, between two runs and in the middle of one. CPU."""

import functools
import os
import types

import pytest
import torch
from torch import nn

from tools.driving import compiled, sample_tiny
from tools.oracles import error, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-5  # relative L2 in fp32
CHANGED = 1e-3  # by how much a change must show, so that a test can tell
NAME = "QwenImage"
FIRST = "diffusion_model.transformer_blocks.0"
MODULE = types.SimpleNamespace(gain=1.0)
FEATURES = {}


def number():
    """A pack's function, which another one may stand in for."""
    return 1.0


class Gain:
    __slots__ = ("gain",)

    def __init__(self, gain):
        self.gain = gain


@pytest.fixture(scope="module")
def tiny(pack):
    from tools.architectures import patchers

    return patchers.make


def first(patcher):
    return patcher.model.diffusion_model.transformer_blocks[0]


def as_class(patcher, gain):
    """Another class for one block."""
    block = first(patcher)

    class Louder(type(block)):
        def forward(self, *args, **kwargs):
            return louder(super().forward(*args, **kwargs), gain(self, kwargs))

    block.__class__ = Louder
    return block


def as_patch(patcher, gain):
    """Another forward for one block."""
    block = first(patcher)
    own = block.forward
    patcher.add_object_patch(
        f"{FIRST}.forward", lambda *args, **kwargs: louder(own(*args, **kwargs), gain(block, kwargs))
    )
    return block


def as_layer(patcher, gain):
    """A layer of the pack's own around one block."""

    class Around(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, *args, **kwargs):
            return louder(self.block(*args, **kwargs), gain(self, kwargs))

    around = patcher.model.diffusion_model.transformer_blocks[0] = Around(first(patcher))
    return around


def as_hook(patcher, gain):
    block = first(patcher)
    block.register_forward_hook(lambda block, args, kwargs, out: louder(out, gain(block, kwargs)), with_kwargs=True)
    return block


def louder(out, gain):
    return tuple(part * gain for part in out)


def kept_mean(block, kwargs):
    before, block.mean = getattr(block, "mean", None), kwargs["hidden_states"].mean()
    return 1.0 if before is None else 1.0 + before


def kept_beside(block, kwargs):
    before, FEATURES["mean"] = FEATURES.get("mean"), kwargs["hidden_states"].mean()
    return 1.0 if before is None else 1.0 + before


def counted(block, kwargs):
    block.calls += 1
    return 1.0 + 0.1 * block.calls


def replaced(block):
    global number  # noqa: PLW0603
    number = lambda: 1.5  # noqa: E731


# what the block's gain is, how it begins, and what another node does to it later
CASES = {
    "a list": (lambda b, k: b.gains[0], lambda b: setattr(b, "gains", [1.0]), lambda b: b.gains.__setitem__(0, 1.5)),
    "a dict": (
        lambda b, k: b.gains["x"], lambda b: setattr(b, "gains", {"x": 1.0}), lambda b: b.gains.update(x=1.5)
    ),
    "an object": (
        lambda b, k: b.own.gain, lambda b: setattr(b, "own", Gain(1.0)), lambda b: setattr(b.own, "gain", 1.5)
    ),
    "a number": (lambda b, k: b.gain, lambda b: setattr(b, "gain", 1.0), lambda b: setattr(b, "gain", 1.5)),
    "a number of the class": (
        lambda b, k: getattr(b, "gain", 1.0), lambda b: None, lambda b: setattr(type(b), "gain", 1.5)
    ),
    "a number elsewhere": (
        lambda b, k: MODULE.gain, lambda b: setattr(MODULE, "gain", 1.0), lambda b: setattr(MODULE, "gain", 1.5)
    ),
    "a function": (lambda b, k: number(), lambda b: None, replaced),
    "the environment": (
        lambda b, k: float(os.environ["GAIN"]), lambda b: os.environ.update(GAIN="1"),
        lambda b: os.environ.update(GAIN="1.5"),
    ),
    "a tensor": (
        lambda b, k: b.gain, lambda b: setattr(b, "gain", torch.ones(1)),
        lambda b: setattr(b, "gain", torch.full((1,), 1.5)),
    ),
    "a buffer": (
        lambda b, k: b.gain, lambda b: b.register_buffer("gain", torch.ones(1)),
        lambda b: setattr(b, "gain", torch.full((1,), 1.5)),
    ),
    "a tensor of the last call": (kept_mean, lambda b: None, None),
    "a tensor of the last call elsewhere": (kept_beside, lambda b: FEATURES.clear(), None),
    "a count": (counted, lambda b: setattr(b, "calls", 0), None),
}  # fmt: skip
BETWEEN = [
    *((name, as_class) for name in CASES),
    *((name, as_patch) for name in ("a list", "a tensor of the last call", "a number of the class")),
    *((name, as_layer) for name in ("a dict", "a function", "a tensor of the last call")),
    *((name, as_hook) for name in ("an object", "a buffer", "a tensor of the last call")),
]
MID_RUN = [
    ("a list", as_class), ("an object", as_patch), ("a number", as_layer), ("a number", as_hook),
    ("a number of the class", as_hook), ("a number elsewhere", as_class), ("a tensor", as_class),
]  # fmt: skip


@pytest.fixture
def undo(monkeypatch):
    """What cases change for the whole process is as before."""
    monkeypatch.setenv("GAIN", "1")
    monkeypatch.setitem(globals(), "number", number)


def pictures(tiny, install, gain, begin, change, fast, at_step=None, runs=4, steps=2):
    """Of ``runs`` runs; between the second and the third, or after a step of the second, another node changes it."""
    patcher = tiny(NAME)
    block = install(patcher, gain)
    begin(block)
    patcher, found = compiled(patcher) if fast else patcher, []
    kind = type(block)
    had = dict(vars(kind))

    def step(number, *_):
        if number == at_step and len(found) == 1:
            change(block)

    for seed in range(runs):
        if seed == 2 and at_step is None and change is not None:
            change(block)
        found.append(sample_tiny(patcher, NAME, seed=seed, steps=steps, height=10, callback=step))
    for name in vars(kind).keys() - had.keys():
        delattr(kind, name)
    return found


@pytest.fixture(scope="module")
def eager(tiny):
    """ComfyUI's own pictures of a case, however it is installed; the same of all gains that begin at 1 and rise to 1.5.

    These are a number's: a case whose change did not show would not reach them.
    """

    @functools.cache
    def wanted(case, **run):
        return pictures(tiny, as_class, *CASES[case], fast=False, **run)

    return lambda case, **run: wanted("a number" if CASES[case][2] else case, **run)


@pytest.mark.parametrize(("case", "install"), BETWEEN)
def test_between_two_runs(tiny, undo, eager, case, install):
    found = pictures(tiny, install, *CASES[case], fast=True)
    assert max(map(error, found, eager(case))) < CLOSE


@pytest.mark.parametrize(("case", "install"), MID_RUN)
def test_in_mid_run(tiny, undo, eager, case, install):
    run = {"at_step": 1, "runs": 3, "steps": 3}
    assert max(map(error, pictures(tiny, install, *CASES[case], fast=True, **run), eager(case, **run))) < CLOSE


def test_a_model_that_changes_at_each_step(tiny, undo, recordings):
    """It is recorded a few times, and then left to ComfyUI; the reason says what changes."""
    install, (gain, begin, _) = as_class, CASES["a number"]

    def image(fast):
        patcher = tiny(NAME)
        block = install(patcher, gain)
        begin(block)
        step = lambda number, *_: setattr(block, "gain", 1.0 + number / 10)  # noqa: E731
        return sample_tiny(compiled(patcher) if fast else patcher, NAME, steps=9, callback=step)

    assert error(image(True), image(False)) < CLOSE
    assert len(recordings) <= 4
    assert "transformer_blocks.0.gain" in shapes()[-1]["reason"]


def test_a_model_that_is_patched_again_in_each_run(tiny, recordings):
    """And that changes at each step: after the first run one recording in each tells it."""
    patcher, recorded = tiny(NAME), []
    fast, block = compiled(patcher), first(patcher)
    own = block.forward

    def image(model, seed):
        setting = {"gain": 1.0}
        block.forward = lambda *args, **kwargs: louder(own(*args, **kwargs), setting["gain"])
        step = lambda number, *_: setting.update(gain=1.1 + number / 10)  # noqa: E731
        return sample_tiny(model, NAME, seed=seed, steps=9, callback=step)

    for seed in range(3):
        before = len(recordings)
        assert error(image(fast, seed), image(patcher, seed)) < CLOSE
        recorded.append(len(recordings) - before)
    assert recorded == [4, 1, 1] and "blocks.0.forward" in shapes()[-1]["reason"]


# Functions that ComfyUI's code names ------------------------------------------------------------------------------


def places():
    import comfy.ldm.common_dit
    import comfy.ldm.qwen_image.model as model
    import torch.nn.functional as F

    return {
        "attention of the model's module": (model, "optimized_attention_masked"),
        "rotary embedding": (model, "apply_rope1"),
        "a helper of another module": (comfy.ldm.common_dit, "pad_to_patch_size"),
        "torch's attention": (F, "scaled_dot_product_attention"),
        "a function of torch's layers": (F, "silu"),
    }


@pytest.mark.parametrize(
    ("name", "at_step"),
    [
        ("attention of the model's module", None), ("rotary embedding", None), ("a helper of another module", None),
        ("torch's attention", None), ("a function of torch's layers", None),
        ("attention of the model's module", 1), ("torch's attention", 1),
    ],
)  # fmt: skip
def test_a_function_in_the_place_of_comfyuis(tiny, monkeypatch, name, at_step):
    """As packs do that bring their own attention for every model; and theirs is taken away again."""
    where = places()[name]
    own = getattr(*where)

    def louder(*args, **kwargs):
        out = own(*args, **kwargs)
        return tuple(part * 1.1 for part in out) if isinstance(out, tuple) else out * 1.1

    def images(fast):
        with monkeypatch.context() as patch:
            found = pictures(
                tiny, lambda patcher, gain: first(patcher), None, lambda block: None,
                lambda block: patch.setattr(*where, louder), fast, at_step, runs=3, steps=3,
            )  # fmt: skip
        return found

    wanted, found = images(False), images(True)
    assert max(map(error, found, wanted)) < CLOSE


def test_a_function_that_is_another_one_at_each_step(tiny, monkeypatch, recordings):
    """It is recorded a few times, and then left to ComfyUI; the reason names the function."""
    module, name = places()["attention of the model's module"]
    own = getattr(module, name)

    def image(fast):
        def step(number, *_):
            patch.setattr(module, name, lambda *args, **kwargs: own(*args, **kwargs) * (1 + number / 10))

        with monkeypatch.context() as patch:
            patcher = tiny(NAME)
            return sample_tiny(compiled(patcher) if fast else patcher, NAME, steps=9, callback=step)

    assert error(image(True), image(False)) < CLOSE
    assert len(recordings) <= 4 and name in shapes()[-1]["reason"]


# Options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "install"), [(Gain, as_class), (types.SimpleNamespace, as_patch)])
def test_an_object_among_the_options(tiny, kind, install):
    """Whose value another node changes in place, between two steps."""

    def image(fast):
        patcher, setting = tiny(NAME), kind(gain=1.0)
        install(patcher, lambda block, kwargs: kwargs["transformer_options"]["setting"].gain)
        patcher = compiled(patcher) if fast else patcher.clone()
        patcher.model_options["transformer_options"]["setting"] = setting
        step = lambda number, *_: setattr(setting, "gain", 1.5 if number > 1 else 1.0)  # noqa: E731
        return sample_tiny(patcher, NAME, steps=5, callback=step), sample_tiny(patcher, NAME, steps=2, seed=1)

    wanted, found = image(False), image(True)
    assert max(map(error, found, wanted)) < CLOSE


def test_a_list_of_comfyuis_own(tiny):
    """Chroma leaves out the blocks that it names, and other nodes write into it."""
    wanted, found = [], []
    for fast, images in ((False, wanted), (True, found)):
        patcher = tiny("Chroma")
        model = patcher.model.diffusion_model
        patcher = compiled(patcher) if fast else patcher
        for left_out in (None, 0):
            if left_out is not None:
                model.skip_dit.append(left_out)
            images.append(sample_tiny(patcher, "Chroma"))
    assert error(wanted[1], wanted[0]) > CHANGED
    assert max(map(error, found, wanted)) < CLOSE
