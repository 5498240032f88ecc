"""UNets whose weights are fetched, cast or patched at each call: recorded where that is right, else in parts. CPU.

A model that does not fit is loaded in part: other layers get their weights at each call, with the LoRA applied then.
"""

import logging
from contextlib import contextmanager

import pytest
import torch

from tools import driving, loras
from tools.driving import SMALL_RUN, SMALL_UNET, compiled, unet_forward
from tools.loras import ALL_KINDS, lora
from tools.oracles import error, shapes

pytestmark = pytest.mark.usefixtures("clean_stats", "fusing")

CLOSE = 1e-5  # relative L2 in fp32
SAMPLED = 1e-4  # after a run with CFG
CHANGED = 1e-3  # by how much a change must show, so that a test can tell
SIZES = [(64, 64), (72, 56), (64, 64), (72, 56)]
BLOCK = "input_blocks.1.1.transformer_blocks.0"


def with_lora(patcher, *layers):
    return loras.with_lora(patcher, loras.of_layers(patcher, *layers), 0.1)


def cast(patcher, *layers):
    """As ComfyUI leaves layers that did not fit."""
    for name in layers:
        patcher.model.diffusion_model.get_submodule(name).comfy_cast_weights = True


def test_a_lora_that_is_applied_at_each_call(fresh, block_programs):
    """Of one block: the others run on programs. It comes, and goes again."""
    fast, plain = compiled(fresh), [unet_forward(fresh, *size) for size in SIZES]
    assert all(error(unet_forward(fast, *size), out) < CLOSE for size, out in zip(SIZES, plain, strict=True))
    lora = with_lora(fast, f"{BLOCK}.attn1.to_q", f"{BLOCK}.ff.net.2")
    lora.patch_model(torch.device("cpu"), lowvram_model_memory=1, force_patch_weights=False)
    assert sum(bool(getattr(m, "weight_function", None)) for m in lora.model.modules()) == 2
    for size, before in zip(SIZES, plain, strict=True):
        wanted = unet_forward(fresh, *size)  # the same model
        assert error(wanted, before) > CHANGED
        assert error(unet_forward(lora, *size), wanted) < CLOSE
    assert {shape["state"] for shape in shapes()} == {"tape"}
    assert all("one by one" in shape["note"] and "not an input, not a weight" in shape["note"] for shape in shapes())
    assert block_programs and not any(path.startswith(BLOCK) for path in block_programs)
    assert any(path.endswith(".0") for path in block_programs)  # ResBlocks, too
    lora.unpatch_model(torch.device("cpu"))
    assert all(error(unet_forward(fast, *size), out) < CLOSE for size, out in zip(SIZES, plain, strict=True))


def test_layers_that_are_cast_go_on_the_tape(fresh, recordings):
    """Where nothing has to be fetched from elsewhere, a cast is an operation like others."""
    layers = "input_blocks.1.0.in_layers.2", f"{BLOCK}.attn2.to_k", "out.0", "time_embed.0"
    plain = unet_forward(fresh, 64, 64)
    cast(fresh, *layers)
    fast = compiled(fresh)
    for size in SIZES:
        assert error(unet_forward(fast, *size), unet_forward(fresh, *size)) < CLOSE
    assert {shape["state"] for shape in shapes()} == {"tape"} and len(recordings) == 2
    assert error(unet_forward(fast, 64, 64), plain) < CLOSE


def test_weights_that_are_kept_in_another_dtype(models, recordings):
    """What ComfyUI makes of a bf16 file on hardware without bf16."""
    from comfy.model_patcher import ModelPatcher

    family, config = models.UNETS["sd15"]
    settings = family(models.SPATIAL | config | SMALL_UNET)
    settings.unet_config.update(SMALL_UNET)
    settings.set_inference_dtype(torch.bfloat16, torch.float32)
    model = settings.get_model({}, "", device="cpu")
    models.randomise(model)
    patcher = ModelPatcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))
    assert model.diffusion_model.dtype == torch.bfloat16 and model.manual_cast_dtype == torch.float32
    fast = compiled(patcher)
    for seed in range(2):
        for size in SIZES[:2]:
            assert error(unet_forward(fast, *size, seed=seed), unet_forward(patcher, *size, seed=seed)) < CLOSE
    assert len(recordings) == 2
    for batch in (1, 2):
        run = SMALL_RUN | {"steps": 2, "batch": batch}
        assert error(models.sample(fast, **run), models.sample(patcher, **run)) < SAMPLED
    assert {shape["state"] for shape in shapes()} == {"tape"}


def test_a_layer_that_comes_from_another_device(fresh, block_programs, monkeypatch, caplog):
    """As low VRAM has it. No second device is here: the layer's weight is one that the recorder does not know."""
    import comfy.ops

    layer = fresh.model.diffusion_model.get_submodule(f"{BLOCK}.attn2.to_out.0")
    own, log = comfy.ops.cast_bias_weight, logging.getLogger("another pack")  # which is no state of the function

    def fetched(s, *args, **kwargs):
        out = own(s, *args, **kwargs)
        if s is not layer:
            return out
        log.warning("fetched")
        with torch.utils._python_dispatch._disable_current_modes():
            return (out[0].clone(), *out[1:])

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", fetched)
    cast(fresh, f"{BLOCK}.attn2.to_out.0")
    fast = compiled(fresh)
    for size in SIZES:
        assert error(unet_forward(fast, *size), unet_forward(fresh, *size)) < CLOSE
    assert caplog.messages.count("fetched") >= 2 * len(SIZES) and {shape["state"] for shape in shapes()} == {"tape"}
    assert block_programs and BLOCK not in block_programs
    with torch.no_grad():
        layer.weight.mul_(2.0)
    assert error(unet_forward(fast, *SIZES[0]), unet_forward(fresh, *SIZES[0])) < CLOSE


def test_a_patch_and_a_lora_that_is_applied_at_each_call(models, fresh, block_programs):
    """Both at once: patched blocks and those with the LoRA in eager, the others on programs."""
    fast = compiled(fresh)
    lora = with_lora(fast, f"{BLOCK}.attn1.to_q")
    calls = []
    for each in (lora, fresh):
        each.set_model_attn2_replace(
            lambda q, k, v, options: calls.append(1) or v.mean(1, keepdim=True).expand_as(q), "middle", 0
        )
    lora.patch_model(torch.device("cpu"), lowvram_model_memory=1, force_patch_weights=False)
    for size in SIZES + SIZES:
        before = len(calls)
        wanted = unet_forward(fresh, *size)
        once = len(calls) - before
        assert error(unet_forward(lora, *size), wanted) < CLOSE and len(calls) == before + 2 * once
    assert any(path.endswith(".0") for path in block_programs) and shapes()[-1]["state"] == "tape"
    assert not any("middle_block.1" in path for path in block_programs)
    lora.unpatch_model(torch.device("cpu"))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_of_lora_at_each_call(models, kind):
    """A partly loaded model keeps them beside its weights."""
    patcher = models.unet("sd15", torch.float32, **SMALL_UNET)
    state, outs = lora(patcher, kind), []
    for each in (patcher, compiled(patcher)):
        loaded = loras.with_lora(each, state)
        loaded.patch_model(torch.device("cpu"), lowvram_model_memory=1, force_patch_weights=False)
        try:
            assert any(getattr(m, "weight_function", None) for m in loaded.model.modules())
            outs.append([unet_forward(loaded, 72, 56, seed=seed) for seed in range(3)])
        finally:
            loaded.unpatch_model(torch.device("cpu"))
    assert all(error(out, wanted) < CLOSE for wanted, out in zip(*outs, strict=True))
    assert error(outs[0][0], unet_forward(patcher, 72, 56)) > CHANGED
    assert {shape["state"] for shape in shapes()} == {"tape"}


@pytest.fixture
def away(fresh):
    """Within, weights of these parts lie elsewhere: no second device is here, and nobody reads what is added."""

    @contextmanager
    def weights_of(*names):
        parts = [fresh.model.diffusion_model.get_submodule(name) for name in names]
        for part in parts:
            part.away = torch.nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)
        yield
        for part in parts:
            del part.away

    return weights_of


@pytest.fixture
def ours(pack, monkeypatch):
    """The blocks that something of ours ran around."""
    from anyshape.accel.block_tier import BlockTier

    return driving.calls_of(monkeypatch, BlockTier, "_fast", lambda self, visit, path, *args: path)


def test_blocks_whose_weights_are_elsewhere_are_left_alone(fresh, away, ours):
    """As low VRAM has it: nothing of ours runs around them, until weights have moved."""
    from anyshape.accel.reasons import say

    fast = compiled(fresh)
    lora = with_lora(fast, f"{BLOCK}.attn1.to_q")
    lora.patch_model(torch.device("cpu"), lowvram_model_memory=1, force_patch_weights=False)
    names = [name for name, _ in fresh.model.diffusion_model.named_modules()]
    transformers = [name for name in names if name.endswith("transformer_blocks.0")]

    def looked_at(seed):
        """(the transformers that something of ours ran around, how many other blocks)"""
        ours.clear()
        assert error(unet_forward(lora, 64, 64, seed=seed), unet_forward(fresh, 64, 64, seed=seed)) < CLOSE
        return {path for path in ours if path in transformers}, len(set(ours) - set(transformers))

    assert looked_at(0)[0] == set(transformers)
    with away(*(name for name in transformers if name != BLOCK)):
        for seed in range(1, 4):
            found, others = looked_at(seed)
            assert found == {BLOCK} and others > 5
    assert say("weights_elsewhere") in shapes()[-1]["reason"] and "one by one" in shapes()[-1]["note"]
    assert looked_at(4)[0] == set(transformers)
    lora.unpatch_model(torch.device("cpu"))


def test_few_blocks_with_weights_on_the_device_are_left_alone(fresh, away, ours, block_programs):
    """Nothing of ours runs around them. When the weights are back, they run on programs again."""
    from anyshape.accel.block_forwards import Blocks

    fast = compiled(fresh)
    lora = with_lora(fast, f"{BLOCK}.attn1.to_q")
    lora.patch_model(torch.device("cpu"), lowvram_model_memory=1, force_patch_weights=False)
    blocks = Blocks(stages=True)
    blocks.look(fresh.model.diffusion_model, 0)
    with away(*(path for path in blocks.paths if not path.startswith("input_blocks.1"))):
        for seed in range(3):
            assert error(unet_forward(lora, 64, 64, seed=seed), unet_forward(fresh, 64, 64, seed=seed)) < CLOSE
    assert ours == [] and {shape["state"] for shape in shapes()} == {"eager"}
    assert error(unet_forward(lora, 64, 64, seed=3), unet_forward(fresh, 64, 64, seed=3)) < CLOSE
    assert block_programs and shapes()[-1]["state"] == "tape"
    lora.unpatch_model(torch.device("cpu"))
