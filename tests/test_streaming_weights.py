"""Weights that steps of programs fetch (DynamicVRAM): patched, quantised and cast ones, and parts of them."""

import pytest
import torch
from torch import nn

from tools import embed, pages
from tools.driving import calls_of, compiled, one_call
from tools.oracles import error, fallbacks, only_streamed, shapes
from tools.patching import past_torch, read_back

pytest_plugins = ("tools.page_fixtures",)
pytestmark = pages.IN_STREAM
RUN = {"width": 64, "height": 64, "steps": 3, "tokens": 8}
BLOCKS = 3
NEAR = 1e-4  # relative L2 in fp32, of fused kernels


@pytest.mark.usefixtures("plain_kernels")
def test_parts_of_weights(models, load, card, monkeypatch, fetched):
    """A kernel adds a convolution's bias by rows, which are a view of it: taken again by each step that reads it."""
    from anyshape.accel import tape_tier
    from anyshape.accel.comfy import streaming
    from anyshape.accel.tape.fetched import ReadyStep

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    viewed = calls_of(monkeypatch, ReadyStep, "__call__", lambda step, values: len(step._views))
    fast, wanted = compiled(load.patcher), models.sample(load.patcher, **RUN)
    card.pages = load.pages.count // 2
    load.pages.give_away()
    load()
    layers = calls_of(monkeypatch, streaming.StreamedWeights, "fetched", lambda stream, parts: parts)
    assert error(models.sample(fast, **RUN), wanted) < NEAR and pages.is_clean(load)
    assert shapes()[0]["state"] == "tape" and only_streamed() and any(viewed)
    layers.clear()
    models.sample(fast, **RUN)
    one_run = [part for parts in layers[: len(layers) // RUN["steps"]] for part in parts]
    assert len(set(one_run)) == len(one_run)  # a layer that two steps read is fetched once


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_layers_of_another_pack_fetch_their_own(models, streamed, monkeypatch, fetched, fusing, in_blocks, share):
    """They compute past torch, and ask for their weights in a dtype of their own: never while others lie there."""
    import comfy.ops
    from anyshape.accel.tape.fetched import FetchedSteps
    from anyshape.accel.tape.layer_calls import LayerCall

    patcher, load = streamed("ZImage", share)
    network, under, own = patcher.model.diffusion_model, [], FetchedSteps.__call__
    linear = type(network.layers[0].feed_forward.w1)

    class Other(linear):
        def forward(self, x):
            weight, bias, stream = comfy.ops.cast_bias_weight(self, None, torch.float64, x.device, x.dtype, True)
            out = past_torch(lambda: nn.functional.linear(x.to(torch.float64), weight, bias).to(x.dtype))
            comfy.ops.uncast_bias_weight(self, weight, bias, stream)
            return out

    def call(steps, values):
        under.append(steps)
        own(steps, values)
        under.pop()

    monkeypatch.setattr(FetchedSteps, "__call__", call)
    called = calls_of(monkeypatch, LayerCall, "__call__", lambda *_: len(under))
    for block in network.layers:
        block.feed_forward.w1.__class__ = block.feed_forward.w2.__class__ = Other
    wanted = [models.sample(patcher, **RUN, seed=seed) for seed in range(2)]
    if in_blocks:
        read_back(network)
    fast = compiled(patcher)
    load()
    for seed in range(2):
        assert error(models.sample(fast, **RUN, seed=seed), wanted[seed]) < NEAR and pages.is_clean(load)
    assert shapes()[0]["state"] == "tape" and only_streamed() and called and not any(called), fallbacks()


@pytest.fixture
def cast_together(pack, monkeypatch):
    """Z-Image's feed-forwards ask for the weights of three layers before they compute with any of them."""
    from comfy.ldm.lumina.model import FeedForward

    monkeypatch.setattr(FeedForward, "forward", embed.as_comfyuis("cast_together").forward)


@pytest.mark.usefixtures("cast_together")
@pytest.mark.parametrize("share", [0.2, 0.6, 2.0])
def test_weights_of_several_layers_at_once(models, streamed, recordings, share):
    """What was fetched for one is not written over by what is fetched for the next."""
    patcher, load = streamed("ZImage", share)
    fast = compiled(patcher)
    for seed in range(2):
        wanted = models.sample(patcher, **RUN, seed=seed)
        assert torch.equal(models.sample(fast, **RUN, seed=seed), wanted), fallbacks()
        assert pages.is_clean(load)
    assert len(recordings) == 1 and {shape["state"] for shape in shapes()} == {"tape"}


def test_a_lora(models, streamed, recordings):
    """As ComfyUI has it: it patches each layer's weight as it is fetched."""
    from comfy.model_patcher import LowVramPatch

    patcher, load = streamed("ZImage", 0.3)
    fast, plain = compiled(patcher), models.sample(patcher, **RUN)
    patches = {}
    for name, part in load.model.named_modules():
        if part in load.layers[::3]:
            delta = 0.1 * torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(1))
            key = f"{name}.weight"
            patches[key] = lambda key, delta=delta: LowVramPatch(
                key, {key: [(1.0, ("diff", (delta,)), 1.0, None, None)]}
            )
    for turn in range(3):
        load(None if turn == 1 else patches, dirty=True)
        wanted = models.sample(patcher, **RUN)
        load(None if turn == 1 else patches, dirty=True)
        assert torch.equal(models.sample(fast, **RUN), wanted) and pages.is_clean(load)
        assert (error(wanted, plain) < NEAR) == (turn == 1)
    assert len(recordings) == 1 and {shape["state"] for shape in shapes()} == {"tape"}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("form", ["int8_tensorwise", "float8_e4m3fn", "nvfp4"])
def test_quantised_weights(card, form, patched, recordings, fetched):
    """To the bit, with their scales. Patched ones are rounded as they are in pages, from the second call on."""
    quant_ops = pytest.importorskip("comfy.quant_ops")
    if form not in getattr(quant_ops, "QUANT_ALGOS", {}):
        pytest.skip("this ComfyUI has no such weights")
    from comfy.model_patcher import LowVramPatch

    from tools.architectures import patchers, quantised

    patcher = patchers.make("Flux", torch.bfloat16)
    patcher.model.diffusion_model = quantised.make("Flux", form)
    load = pages.Loads(patcher.model.diffusion_model, card)
    names = {part: name for name, part in load.model.named_modules()}
    large = [part for part in load.layers if isinstance(part.weight, quant_ops.QuantizedTensor)] if patched else []
    delta = {f"{names[part]}.weight": 0.05 * torch.randn(part.weight.shape, dtype=torch.bfloat16) for part in large[:3]}
    patches = {
        key: lambda key: LowVramPatch(key, {key: [(1.0, ("diff", (delta[key],)), 1.0, None, None)]}) for key in delta
    }
    load(patches)
    there = [one_call(patcher, "Flux") for _ in range(2)][-1]  # in pages
    load.pages.give_away()
    card.pages = load.pages.count // 3
    for _ in range(3):
        load(patches, dirty=True)
        assert torch.equal(one_call(patcher, "Flux", compiled(patcher)), there), fallbacks()
        assert pages.is_clean(load)
    assert len(recordings) == 1 and fetched and shapes()[0]["state"] == "tape"


def test_weights_that_are_cast_on_their_way(card, recordings, fetched):
    """From a file in float32 to bfloat16."""
    from tools.architectures import patchers

    patcher = patchers.make("QwenImage", torch.bfloat16)
    model = patcher.model.diffusion_model
    for part in [part for part in model.modules() if isinstance(part, torch.nn.Linear)]:
        part.weight = torch.nn.Parameter(part.weight.detach().float() + 1e-4, requires_grad=False)
    load = pages.Loads(model, card, torch.bfloat16)
    card.pages = load.pages.count // 3
    load()
    eager, fast = one_call(patcher, "QwenImage"), compiled(patcher)
    for _ in range(2):
        load()
        assert torch.equal(one_call(patcher, "QwenImage", fast), eager) and pages.is_clean(load)
    assert len(recordings) == 1 and fetched and shapes()[0]["state"] == "tape"


@pytest.mark.parametrize("before", [True, False])
def test_functions_of_weights_are_applied_once(models, streamed, before):
    """A layer that has some fetches its weights by itself. before: it has them when it is recorded."""
    patcher, load = streamed("ZImage", 0.3)
    fast, plain = compiled(patcher), models.sample(patcher, **RUN)
    if not before:
        assert torch.equal(models.sample(fast, **RUN), plain)
    load.layers[len(load.layers) // 2].weight_function = [lambda weight: weight * 1.5]
    wanted = models.sample(patcher, **RUN)
    assert error(wanted, plain) > NEAR
    assert torch.equal(models.sample(fast, **RUN), wanted) and pages.is_clean(load)
