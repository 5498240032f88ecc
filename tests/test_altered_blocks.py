"""Patches of other packs that change a block, or what its code calls, for as long as they call it (LTX's STG does)."""

import contextlib

import pytest
from torch import nn

from tools.driving import calls_of, compiled
from tools.oracles import error, shapes
from tools.patching import read_back

pytestmark = pytest.mark.usefixtures("models", "fusing", "clean_stats")
RUN = {"width": 128, "height": 128, "frames": 9, "steps": 3, "tokens": 24, "cfg": 1.0}
CLOSE = 1e-5


@contextlib.contextmanager
def changed(owner, name, value):
    """``owner`` with another attribute, or layer."""
    there = name in vars(owner) or name in vars(owner).get("_modules", ())
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if there:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def hooked(module, hook):
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def half(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 0.5


def way(name, block):
    """A change of the block's attention."""
    from comfy.ldm.modules import attention

    part = block.attn1
    return {
        "its forward": lambda: changed(part, "forward", half(part.forward)),
        "a setting": lambda: changed(part, "heads", 1),
        "a layer": lambda: changed(part, "to_out", nn.Identity()),
        "a hook": lambda: hooked(part, lambda module, args, out: out * 0.5),
        "a method of its class": lambda: changed(type(part), "forward", half(type(part).forward)),
        "a function": lambda: changed(attention, "optimized_attention", half(attention.optimized_attention)),
    }[name]()


WAYS = ("its forward", "a setting", "a layer", "a hook", "a method of its class", "a function")


@pytest.fixture
def model():
    from tools.architectures import patchers

    return patchers.make("LTXV", blocks=4)


def patched(patcher, name, number):
    """A clone with a patch around one block. number: None for a patch that changes nothing."""
    patcher = patcher.clone()
    block = patcher.model.diffusion_model.transformer_blocks[number or 1]

    def patch(args, extra):
        with contextlib.nullcontext() if number is None else way(name, block):
            return extra["original_block"](args)

    patcher.set_model_patch_replace(patch, "dit", "double_block", number or 1)
    return patcher


@pytest.mark.parametrize("in_blocks", [False, True], ids=["the whole", "blocks"])
@pytest.mark.parametrize("name", WAYS)
def test_a_block_is_what_it_is_while_it_is_called(models, model, name, in_blocks):
    fast = compiled(model)
    if in_blocks:
        read_back(model.model.diffusion_model)
    plain = models.sample(model, **RUN)
    for number in (None, 2, 1, 2, None):
        wanted = models.sample(patched(model, name, number), **RUN)
        assert error(models.sample(patched(fast, name, number), **RUN), wanted) < CLOSE
        assert number is None or error(wanted, plain) > 1e-3
    assert {shape["state"] for shape in shapes()} == {"tape"}
    assert all(("blocks recorded" in shape["note"]) == in_blocks for shape in shapes())


def test_only_calls_by_other_packs_are_looked_at(models, model, monkeypatch):
    """A look takes as long as some of a block's layers."""
    from anyshape.accel.comfy.sampling_state import SamplingState

    looks = calls_of(monkeypatch, SamplingState, "altered")
    fast = compiled(model)
    models.sample(fast, **RUN)
    assert not looks
    models.sample(patched(fast, "a hook", 1), **RUN)
    assert 0 < len(looks) <= 4  # one block, in a forward that is recorded


@pytest.mark.parametrize("found_once", [True, False], ids=["as they are found", "under both paths"])
def test_a_second_list_of_the_same_blocks(models, model, monkeypatch, found_once):
    """As a cache's pack gives ``blocks`` to a model that names its list otherwise. Nothing of ours stays in them."""
    from anyshape.accel.tape import blocks

    network, fast = model.model.diffusion_model, compiled(model)
    network.more = nn.ModuleList(network.transformer_blocks)
    read_back(network)
    paths = blocks.find(network)
    assert paths == [f"transformer_blocks.{number}" for number in range(len(network.more))]
    if not found_once:
        more = [path.replace("transformer_blocks", "more") for path in paths]
        find = blocks.find
        monkeypatch.setattr(blocks, "find", lambda *args, **named: find(*args, **named) + more)
    wanted = models.sample(model, **RUN)
    for _ in range(2):
        assert error(models.sample(fast, **RUN), wanted) < CLOSE
        assert not any("forward" in vars(block) for block in network.more)
    (shape,) = shapes()
    assert shape["state"] == "tape" and "blocks recorded" in shape["note"]
