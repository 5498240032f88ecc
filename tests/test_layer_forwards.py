"""Forwards that other packs put in the place of those of ComfyUI's layers, and that compute past torch: on the CPU."""

import functools
import threading
import types

import pytest
import torch
from torch import nn

from tools.driving import compiled, sample_tiny, skipping
from tools.oracles import error, fallbacks, shapes
from tools.packs_layers import CLOSE, NAME, SIZES, Layer, check, layer_calls, make, past_torch
from tools.patching import read_back

pytestmark = pytest.mark.usefixtures("clean_stats", "one_thread")


def with_forward(layer):
    """ComfyUI's layer, whose forward a pack has replaced."""
    bias = layer.bias

    def forward(self, x, scale=1.0):
        return past_torch(x * scale, self.weight, bias)

    layer.forward = types.MethodType(forward, layer)
    return layer


def with_class(layer):
    """A layer of a class of ComfyUI's, into which a pack has put its forward."""
    kind = type("Linear", (type(layer),), {"__module__": "comfy.ops", "forward": Layer.forward})
    layer.__class__ = kind
    return layer


@pytest.mark.parametrize("kind", [with_forward, with_class])
@pytest.mark.parametrize("where", ["feed_forward", "attention"])
def test_a_forward_in_the_place_of_comfyuis(kind, where):
    """As ComfyUI-ZImage-Triton puts it there."""
    plain, fast = make(kind, (where,)), compiled(make(kind, (where,)))
    check(plain, fast)
    assert {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()
    assert layer_calls(fast)[0] == (18 if where == "feed_forward" else 12)
    before = sample_tiny(plain, NAME)
    for patcher in (plain, fast):
        layer = patcher.model.diffusion_model.layers[1].feed_forward.w1
        layer.forward = functools.partial(quarter_turned, layer.forward)
    check(plain, fast, SIZES[:2])
    assert error(sample_tiny(plain, NAME), before) > 1e-4


def quarter_turned(own, x):
    """What another pack puts around a forward."""
    return own(x.roll(x.shape[-1] // 4, -1))


@pytest.mark.parametrize("computes", [False, True])
def test_a_forward_in_the_place_of_a_blocks(computes, fusing):
    """A block is a larger part, and the step if something was computed past torch after it. Else it is recorded."""

    def around(own, x, *args, **kwargs):
        out = own(x, *args, **kwargs)
        return past_torch(out, torch.eye(out.shape[-1])) if computes else out * 1.01

    def blocks():
        patcher = make(with_forward)
        for block in patcher.model.diffusion_model.layers:
            block.forward = functools.partial(around, block.forward)
        return patcher

    plain, fast = blocks(), compiled(blocks())
    check(plain, fast, near=CLOSE)
    assert (layer_calls(fast)[0] < 12) is computes
    check(skipping(plain), skipping(fast), [(8, 8), (10, 6)], near=CLOSE, steps=20)
    assert {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()


def test_where_the_whole_cannot_be_recorded(fusing):
    """Blocks with such layers below them are left alone."""
    plain, ours = make(with_forward), make(with_forward)
    read_back(ours.model.diffusion_model)
    check(plain, compiled(ours), near=CLOSE)
    assert {shape["state"] for shape in shapes()} == {"eager"}


def test_two_threads_leave_a_packs_forward_where_it_was(pack):
    """Each puts forwards of ours before it. The one that was there first ends first."""
    from anyshape.accel.block_forwards import Blocks

    model = nn.Sequential(with_forward(nn.Linear(3, 3)))
    theirs, layers, entered, done = model[0].forward, Blocks(), threading.Event(), threading.Event()
    layers.paths = ["0"]

    def ours():
        return layers.ours(model, lambda path, layer, own, args, kwargs: own(*args, **kwargs), over_others=True)

    def first():
        with ours():
            entered.set()
            done.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    with ours():
        done.set()
        thread.join()
    assert model[0].forward is theirs
