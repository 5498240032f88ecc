"""Layers of other packs that compute past torch's dispatcher, as with kernels of their own: on the CPU."""

import importlib
import importlib.util

import pytest
import torch
import triton
from torch import nn

from tools.driving import compiled, sample_tiny, skipping
from tools.oracles import error, fallbacks, shapes
from tools.packs_layers import CLOSE, NAME, SIZES, Layer, check, layer_calls, make, past_torch
from tools.patching import read_back

pytestmark = pytest.mark.usefixtures("clean_stats", "one_thread")


class Pair(Layer):
    """It has a layer below, whose weight alone it reads, as a fused projection does."""

    def __init__(self, layer):
        super().__init__(layer)
        self.inner = Layer(layer)

    def forward(self, x):
        return past_torch(x * 2, self.inner.weight, self.bias) * 0.5


@triton.autotune(configs=[triton.Config({})], key=["n"])
@triton.jit
def kernel(x, n):
    """Keeps what it compiled, and which of its forms is the fastest."""


class Named(Layer):
    """Its code names a kernel, which it starts on a GPU."""

    def forward(self, x):
        if x.is_cuda:
            kernel[(1,)](x, x.numel())
        return past_torch(x, self.weight, self.bias)


class Writing(Layer):
    """It writes into what it is given."""

    def forward(self, x):
        x.mul_(1.01)
        return past_torch(x, self.weight, self.bias)


@pytest.mark.parametrize("kind", [Layer, Pair, Named])
def test_each_call_is_a_step(kind):
    """In blocks that are copies of an earlier one, too: there it is their layer's."""
    plain, fast = make(kind), compiled(make(kind))
    check(plain, fast)
    assert {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()
    calls, copies = layer_calls(fast)
    layers = sum(type(part) is kind for part in fast.model.diffusion_model.modules())
    assert calls == layers > 10 and copies >= 2


class Shared(nn.Module):
    """It calls a layer that is not below it."""

    def __init__(self, layer):
        super().__init__()
        self.all = [layer]

    def forward(self, x):
        return self.all[0](x)


def test_a_layer_that_all_blocks_call():
    def shared():
        patcher = make(Layer)
        network = patcher.model.diffusion_model
        network.every = network.layers[0].feed_forward.w1
        for block in network.layers:
            block.feed_forward.w1 = Shared(network.every)
        return patcher

    plain, fast = shared(), compiled(shared())
    check(plain, fast)
    assert {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()
    assert layer_calls(fast)[1] >= 2


READ = {
    "by nobody": "",
    "by a function": "def look(model): return model.shown",
    "by its name": "def look(model): return getattr(model, 'shown')",
    "with all others": "def look(model): return vars(model)",
    "as one of all": "def look(model): return [getattr(model, name) for name in dir(model)]",
}


@pytest.mark.parametrize("name", READ)
def test_what_a_model_only_shows_may_be_read_beside_a_packs_layer(name, pack, monkeypatch, tmp_path):
    """Anima keeps a dict of activations that nothing reads, and is recorded with such layers, too."""
    from anyshape.accel.tape.kept import kept_tensor

    place = f"a_pack_that_reads_{name.replace(' ', '_')}"
    (tmp_path / f"{place}.py").write_text(f"from torch import nn\nclass Layer(nn.Module): pass\n{READ[name]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    beside = importlib.import_module(place)
    model = nn.Sequential(beside.Layer())
    model.shown = {"x": torch.ones(1)}
    assert kept_tensor(model, lambda tensor: True) == ("" if name == "by nobody" else "shown")
    model[0].own = [torch.ones(1)]
    assert kept_tensor(model, lambda tensor: True) == ("0.own" if name == "by nobody" else "shown")


@pytest.mark.usefixtures("fusing")
def test_short_recordings(recordings):
    """Layers of blocks that are left out are not called, and the program calls them all."""
    plain, fast = make(Layer, ("feed_forward", "attention")), compiled(make(Layer, ("feed_forward", "attention")))
    check(plain, fast, near=CLOSE)
    assert {shape["state"] for shape in shapes()} == {"tape"} and len(recordings) == len(set(SIZES))


CHANGES = {
    "a weight in place": lambda part: part.weight.data.mul_(1.5),
    "another weight": lambda part: setattr(part, "weight", nn.Parameter(part.weight.data * 1.5)),
    "another forward": lambda part: setattr(part, "forward", lambda x: past_torch(x * 1.5, part.weight)),
    "a hook": lambda part: part.register_forward_hook(lambda layer, args, out: out * 1.5),
    "a setting": lambda part: setattr(part, "bias", None if part.bias is not None else torch.ones(len(part.weight))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_changes_between_two_runs(name):
    plain, ours = make(Layer), make(Layer)
    fast = compiled(ours)
    check(plain, fast, SIZES[:2])
    before = sample_tiny(plain, NAME)
    with torch.inference_mode():
        for patcher in (plain, ours):
            CHANGES[name](patcher.model.diffusion_model.layers[1].feed_forward.w1)
    assert error(sample_tiny(plain, NAME), before) > 1e-4
    check(plain, fast, SIZES[:2])


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("where", ["feed_forward", "attention"])
def test_blocks_of_a_forward_that_reads_a_value_back(where, block_programs):
    """One program serves all blocks, and calls the layers of the one that it runs for."""
    plain, ours = make(Layer, (where,)), make(Layer, (where,))
    read_back(ours.model.diffusion_model)
    fast = compiled(ours)
    check(plain, fast, near=CLOSE)
    assert {shape["state"] for shape in shapes()} == {"tape"}
    assert set(block_programs) >= {f"layers.{number}" for number in range(4)}
    before = sample_tiny(fast, NAME)
    for patcher in (plain, ours):
        block = patcher.model.diffusion_model.layers[2]
        layer = block.feed_forward.w2 if where == "feed_forward" else block.attention.out
        layer.weight = nn.Parameter(layer.weight.data.roll(1, 0))
    check(plain, fast, SIZES[:2], near=CLOSE)
    assert error(sample_tiny(fast, NAME), before) > 1e-4


class Attending(nn.Module):
    """In the place of an attention. It takes the model's options, and reads some of them by itself."""

    def __init__(self, attention):
        super().__init__()
        self.qkv, self.out = attention.qkv, attention.out

    def forward(self, x, mask, freqs, transformer_options):
        part = past_torch(x, self.qkv.weight)[..., : x.shape[-1]]
        found = past_torch(part, self.out.weight) + x * self.share(transformer_options)
        return past_torch(found, torch.eye(x.shape[-1]))

    @staticmethod
    def share(options):
        return options.get("share", 0.25)


class Calling(Attending):
    """What it reads there is a function."""

    @staticmethod
    def share(options):
        return options["shared"](0.5)


class Noting(Attending):
    """It writes into the options."""

    @staticmethod
    def share(options):
        options["calls"] = options.get("calls", 0) + 1
        return 0.25


class Asking(Attending):
    """What it reads there is a tensor."""

    @staticmethod
    def share(options):
        return options["sigmas"].mean() / 10


@pytest.mark.parametrize("kind", [Attending, Calling, Noting, Asking])
def test_a_layer_that_takes_options(kind):
    """What it reads of them is a part of its step, if that is plain; other numbers there are another recording."""

    def attending():
        patcher = make(Layer)
        for block in patcher.model.diffusion_model.layers:
            block.attention = kind(block.attention)
        return patcher

    def halved(share):
        return share / 2

    plain, fast = attending(), compiled(attending())
    given = {"shared": halved} if kind is Calling else {}
    for options in ({}, {"share": 0.5}, {}):
        check(plain, fast, SIZES[:2], options=options | given)
    if kind is Attending:
        assert error(*[sample_tiny(plain, NAME, options={"share": share}) for share in (0.25, 0.5)]) > 1e-3
    assert {shape["state"] for shape in shapes()} == {"tape" if kind is Attending else "eager"}


FILE = """
from torch import nn

class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias, self.scale = layer.weight, layer.bias, 1

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) * self.scale
"""


def test_a_class_whose_file_is_no_module_that_can_be_found(tmp_path):
    """Some packs load their files so. Blocks that differ in a number which its code reads are not alike."""
    (tmp_path / "layer.py").write_text(FILE)
    spec = importlib.util.spec_from_file_location("a_packs.layer", tmp_path / "layer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def scaled():
        patcher = make(module.Layer)
        for number, block in enumerate(patcher.model.diffusion_model.layers):
            block.feed_forward.w1.scale = 1 + number
        return patcher

    check(scaled(), compiled(scaled()))
    assert {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()


def test_what_a_step_could_not_repeat_is_not_one():
    check(make(Writing), compiled(make(Writing)))
    assert {shape["state"] for shape in shapes()} == {"eager"}
    assert all("bypassed torch's dispatcher" in found["reason"] for found in fallbacks())


def test_skip_blocks():
    plain, fast = skipping(make(Layer)), skipping(compiled(make(Layer)))
    check(plain, fast, [(8, 8), (10, 6), (8, 8)], near=CLOSE, steps=20)
    assert {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()
