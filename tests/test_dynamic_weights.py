"""DynamicVRAM: small weights, patched, quantised and cast ones, and models that are no UNet.

As in ``test_dynamic``, with the page table of ``tools.pages``.
"""

import types

import pytest
import torch
from torch import nn

from tools import pages
from tools.driving import SMALL_RUN, SMALL_UNET, calls_of, compiled, one_call, options_of
from tools.oracles import assert_fast, error, fallbacks, shapes

pytest_plugins = ("tools.page_fixtures",)
pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32; the contract allows 1e-3


def test_small_weights_stay_where_they_were(models, load, recordings, bound):
    """ComfyUI copies them at each load. A program is not bound again, and a graph would find them."""
    fast = compiled(load.patcher)
    first = models.sample(fast, **SMALL_RUN)
    small = {
        part: part._parameters["weight"].data_ptr() for part in load.own if part._parameters.get("weight") is not None
    }
    before = len(bound)
    for _ in range(3):
        load()
        assert torch.equal(first, models.sample(fast, **SMALL_RUN))
    assert {part: part._parameters["weight"].data_ptr() for part in small} == small
    assert len(bound) == before and len(recordings) == 1


def test_small_weights_that_were_patched_are_read(models, load, recordings):
    fast, source = compiled(load.patcher), load.patcher
    first = models.sample(fast, **SMALL_RUN)
    norm = next(part for part in load.own if isinstance(part, nn.GroupNorm))
    with torch.no_grad():
        load.own[norm]["weight"].mul_(1.5)
    load()
    eager = models.sample(source, **SMALL_RUN)
    load()
    out = models.sample(fast, **SMALL_RUN)
    assert error(out, eager) < CLOSE < error(out, first) and len(recordings) == 1


def test_a_lora_on_and_off(models, load, recordings):
    """ComfyUI writes the patched weight where the weight lies, once: to a program it is another value, no more."""
    from comfy.model_patcher import LowVramPatch

    fast, source = compiled(load.patcher), load.patcher
    plain = models.sample(fast, **SMALL_RUN)
    layer = max(load.layers, key=lambda part: part.weight.numel())
    (name,) = (f"{name}.weight" for name, part in load.model.named_modules() if part is layer)
    delta = 0.05 * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))

    def patch(key):
        return LowVramPatch(key, {key: [(1.0, ("diff", (delta,)), 1.0, None, None)]})

    for _ in range(2):
        load({name: patch}, dirty=True)
        patched = models.sample(fast, **SMALL_RUN)
        load({name: patch}, dirty=True)
        assert error(patched, models.sample(source, **SMALL_RUN)) < CLOSE < error(patched, plain)
        load(dirty=True)
        assert torch.equal(models.sample(fast, **SMALL_RUN), plain)
    assert len(recordings) == 1
    assert_fast()


@pytest.mark.parametrize("place", ["class", "forward"])
def test_a_lora_on_a_layer_of_another_pack(models, load, card, recordings, place):
    """What it makes of the weight depends on the dtype that the pack's code asks for, where all fits and where not."""
    import comfy.ops
    from comfy.model_patcher import LowVramPatch

    layer = next(part for part in load.layers if isinstance(part, nn.Linear))
    (name,) = (f"{name}.weight" for name, part in load.model.named_modules() if part is layer)

    class Other(type(layer)):
        def forward(self, x):
            weight, bias, _ = comfy.ops.cast_bias_weight(
                self, None, torch.float64, x.device, bias_dtype=x.dtype, offloadable=True
            )
            return nn.functional.linear(x, weight.to(x.dtype), bias)

    class Patch(LowVramPatch):
        def __call__(self, weight):
            return weight * (1.5 if weight.dtype == torch.float64 else 1.0)

    if place == "class":
        layer.__class__ = Other
    else:
        layer.forward = types.MethodType(Other.forward, layer)
    fast, source = compiled(load.patcher), load.patcher
    plain = models.sample(fast, **SMALL_RUN)
    patches = {
        name: lambda key: Patch(key, {key: [(1.0, ("diff", (torch.zeros_like(layer.weight),)), 1.0, None, None)]})
    }
    for room in (card.pages, card.pages, load.pages.count // 2):
        card.pages = room
        load(patches, dirty=True)
        wanted = models.sample(source, **SMALL_RUN)
        load(patches, dirty=True)
        assert error(models.sample(fast, **SMALL_RUN), wanted) < CLOSE < error(wanted, plain), room
    load(dirty=True)
    assert error(models.sample(fast, **SMALL_RUN), plain) < CLOSE and recordings
    said = {found["reason"] for found in fallbacks()}
    assert any("put a LoRA on their weights themselves" in reason for reason in said)


def test_a_layer_that_is_no_longer_mapped_is_recorded_again(models, load, recordings):
    """A LoRA that changes a weight's size is loaded as a whole: what lies in its pages is of nobody."""
    fast, source = compiled(load.patcher), load.patcher
    first = models.sample(fast, **SMALL_RUN)
    layer = load.layers[3]
    del layer._v
    load.pages.give_away()
    load.layers.remove(layer)
    load()
    out = models.sample(fast, **SMALL_RUN)
    assert error(out, first) < CLOSE and len(recordings) == 2
    assert error(out, models.sample(source, **SMALL_RUN)) < CLOSE
    assert_fast()


def test_a_vae(models, card):
    from anyshape.accel.comfy.vae import compile_vae

    source = models.vae(torch.float32, ch=32, num_res_blocks=1)
    load = pages.Loads(source.first_stage_model, card)
    load()
    fast, message = compile_vae(source)
    assert message == "" and fast.patcher.model is source.patcher.model
    latent = torch.randn(1, 4, 9, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        eager = source.decode(latent)
        for _ in range(2):
            assert error(fast.decode(latent), eager) < CLOSE
            load.pages.give_away()
        assert_fast()
        assert not fallbacks() and not load.pages.pinned
        card.pages = 3
        assert torch.equal(fast.decode(latent), eager)
    assert shapes()[0]["state"] == "eager" and shapes()[0]["reason"].startswith("weights streamed: of ")


def test_convolutions_are_laid_out_for_the_run_and_back(models, load):
    """In their own memory, and back only where it is still theirs."""
    from anyshape.accel.comfy import known_code, sampling_state
    from anyshape.accel.key import shape_key
    from anyshape.accel.tape.values import Weight
    from anyshape.accel.weights import ChannelsLastWeights

    model = load.model
    eager = models.sample(load.patcher, **SMALL_RUN)
    names = {part: name for name, part in model.named_modules()}
    large = [part for part in load.layers if part.weight.ndim == 4 and part.weight.shape[2:].numel() > 1]
    wanted = frozenset(Weight(names[part], "_v_weight") for part in large)
    run = sampling_state.SamplingState(model, known_code.fingerprints(model), ChannelsLastWeights())
    key = shape_key({"x": torch.zeros(1, 4, 8, 8)})
    with torch.inference_mode():
        assert run.obstacle(key, torch.float32) == ""
        plain = run.weights()
        laid = run.lay_out(wanted, plain)
        assert laid != plain and run.lay_out(wanted, laid) == laid and len(large) > 8
        assert all(part._v_weight.is_contiguous(memory_format=torch.channels_last) for part in large)
        assert all(torch.equal(part._v_weight, part.weight) for part in large)
        run.let_go()
        load.pages.give_away(*range(load.pages.count // 3))
        assert run.obstacle(key, torch.float32) == ""
        filled = run.weights()
        assert filled not in (plain, laid) and run.lay_out(wanted, filled) == laid  # what came back is laid out again
        run.let_go()
        gone = load.pages.count // 2
        load.pages.give_away(*range(gone))
    run.close()
    assert (load.pages.memory[: gone * 4096] == 0xFF).all() and not load.pages.pinned
    there = [part for part in large if part._v[1] >= load.pages.base_addr + gone * 4096]
    assert there and all(torch.equal(part._v_weight, part.weight) and part._v_weight.is_contiguous() for part in there)
    load()
    assert torch.equal(models.sample(load.patcher, **SMALL_RUN), eager)


@pytest.mark.usefixtures("plain_kernels")
def test_a_program_knows_when_convolutions_are_filled_again(models, load, recordings, bound, monkeypatch):
    """At a load with other LoRAs. It was bound to tensors that lay channels last until its run's end alone."""
    from anyshape.accel import tape_tier

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    fast, source, run = compiled(load.patcher), load.patcher, SMALL_RUN | {"steps": 2}
    eager = models.sample(source, **run)
    for _ in range(2):
        assert error(models.sample(fast, **run), eager) < CLOSE
    assert len(bound) == 1
    load(dirty=True)
    assert torch.equal(models.sample(source, **run), eager)
    assert error(models.sample(fast, **run), eager) < CLOSE
    assert len(bound) == 2 and len(recordings) == 1
    assert_fast()


def test_blocks_of_a_model_that_cannot_be_recorded_as_a_whole(pack, card, fusing, block_programs):
    """MiniMax H3 reads its time step back. Pages are asked for before each block's program, and free behind it."""
    from tools import architectures
    from tools.architectures import patchers

    if "MiniMaxH3" not in {entry.name for entry in architectures.present()}:
        pytest.skip("this ComfyUI has no MiniMax H3")
    patcher = patchers.make("MiniMaxH3", blocks=4)
    load = pages.Loads(patcher.model.diffusion_model, card)
    load()
    fast = compiled(patcher)
    with torch.inference_mode():
        eager = patchers.apply(patcher, 1, "MiniMaxH3")
        for turn in range(4):
            out = patchers.apply(patcher, 1, "MiniMaxH3", options_of(fast))
            assert all(error(*pair) < 1e-5 for pair in zip(out, eager, strict=True)) and not load.pages.pinned
            if turn == 2:
                load.pages.give_away()
    assert len(block_programs) >= 8
    assert shapes()[0]["state"] == "tape" and "one by one" in shapes()[0]["note"]


def astray(program, load):
    """What a program reads that a graph might not find later: not in pages, no small weight, and not its own."""
    from anyshape.accel.comfy import small_weights

    begin, size = load.pages.memory.data_ptr(), load.pages.memory.nbytes
    kept = [place for places in small_weights._PLACES.values() for place in places.values()]
    known = {tensor.data_ptr() for tensor in (*kept, *program.constants())}
    read = [tensor.data_ptr() for tensor in program._bound if tensor is not None]
    return [address for address in read if address not in known and not begin <= address < begin + size]


@pytest.mark.parametrize("form", ["int8_tensorwise", "float8_e4m3fn", "nvfp4"])
def test_quantised_weights(pack, card, form, recordings, monkeypatch):
    """A mapped weight is taken apart like another: to the bit, and it may go and come back. So may its scales."""
    quant_ops = pytest.importorskip("comfy.quant_ops")
    if form not in getattr(quant_ops, "QUANT_ALGOS", {}):
        pytest.skip("this ComfyUI has no such weights")
    from anyshape.accel.tape.program import Program

    from tools.architectures import patchers, quantised

    programs = calls_of(monkeypatch, Program, "bind", lambda program, *args: program)
    patcher = patchers.make("Flux", torch.bfloat16)
    patcher.model.diffusion_model = quantised.make("Flux", form)
    load = pages.Loads(patcher.model.diffusion_model, card)
    load()
    fast, eager = compiled(patcher), one_call(patcher, "Flux")
    assert any(isinstance(part._v_weight, quant_ops.QuantizedTensor) for part in load.layers)
    for _ in range(3):
        assert torch.equal(one_call(patcher, "Flux", fast), eager)
        assert astray(programs[-1], load) == []
        load.pages.give_away()
        load()
    assert len(recordings) == 1 and len(programs) == 1 and not load.pages.pinned
    assert_fast()
    assert not fallbacks()


def test_weights_that_are_cast_on_their_way(pack, card, recordings):
    """From a file in float32 to pages in bfloat16."""
    from tools.architectures import patchers

    patcher = patchers.make("QwenImage", torch.bfloat16)
    model = patcher.model.diffusion_model
    wide = {part: part.weight.detach().float() + 1e-4 for part in model.modules() if isinstance(part, nn.Linear)}
    for part, weight in wide.items():
        part.weight = nn.Parameter(weight, requires_grad=False)
    load = pages.Loads(model, card, torch.bfloat16)
    load()
    fast, eager = compiled(patcher), one_call(patcher, "QwenImage")
    for _ in range(2):
        assert torch.equal(one_call(patcher, "QwenImage", fast), eager)
        load.pages.give_away()
    assert {part._v_weight.dtype for part in load.layers} == {torch.bfloat16} and len(recordings) == 1
    assert_fast()


def test_a_controlnet(models, card, recordings):
    """Its pages are its own, and so are its reasons."""
    from tools.driving import compiled_control, steering

    patcher = models.unet("sd15", torch.float32, **SMALL_UNET)
    control = models.controlnet_for(patcher)
    load = pages.Loads(control.control_model, card)
    load()
    fast = compiled_control(control)
    eager = models.sample(patcher, **SMALL_RUN, steer=steering(control))
    for _ in range(2):
        assert error(models.sample(patcher, **SMALL_RUN, steer=steering(fast)), eager) < CLOSE
        load.pages.give_away()
    assert_fast()
    card.pages = load.pages.count // 2
    load()
    assert error(models.sample(patcher, **SMALL_RUN, steer=steering(fast)), eager) < CLOSE
    assert shapes()[0]["reason"].startswith("weights streamed: of ") and len(recordings) == 2
    assert shapes()[0]["state"] == "tape" and not load.pages.pinned
