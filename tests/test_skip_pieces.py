"""The head, the deep piece and the tail of a UNet are its own forward, bit for bit; and what each depth costs."""

import pytest
import torch

from tools.driving import UNETS, options_of, residuals, unet_inputs
from tools.oracles import error
from tools.patching import PATCHES

SIZES = [(104, 72), (72, 136), (64, 64)]  # odd latent sides included
KINDS = ["none", "controlnet", "with gaps", "short", "t2i adapter"]


def pieces(patcher, size, depth, kind="none", ops=None, between=lambda: None):
    """(ComfyUI's output, ours of a full step, ours of a skipped step with that very step's deep feature)."""
    from anyshape.accel.families import unet
    from anyshape.accel.ops import FusedOps

    model, inputs = patcher.model.diffusion_model, unet_inputs(patcher, *size)
    plan, ops = (unet.EAGER, FusedOps()) if ops is None else (unet.Plan(model), ops)

    def control():
        return None if kind == "none" else residuals(patcher, tuple(inputs["x"].shape), kind)

    def given():
        return unet.arguments(**inputs, control=control(), transformer_options=options_of(patcher))

    with torch.inference_mode():
        wanted = model._forward(**inputs, control=control(), transformer_options=options_of(patcher))
        between()
        call = given()
        out, deep = unet.full(ops, model, plan, call, call.flat(), depth)
        between()
        call = given()
        skipped = unet.skipped(ops, model, plan, call, call.flat() | {unet.DEEP: deep.clone()}, depth)
    return wanted, out, skipped


@pytest.mark.parametrize("name", list(UNETS))
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("depth", [0, 2, 3, 7])
def test_pieces_are_the_forward(unets, name, size, depth):
    wanted, out, skipped = pieces(unets[name], size, depth)
    assert torch.equal(out, wanted) and torch.equal(skipped, wanted)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("depth", [0, 2, 4, 7])
def test_every_residual_reaches_its_own_block(unets, kind, depth):
    """The ports give the shallow blocks the deepest residuals, whose shapes do not fit: ControlNet is lost."""
    wanted, out, skipped = pieces(unets["sd15"], SIZES[0], depth, kind)
    plain, _, _ = pieces(unets["sd15"], SIZES[0], depth)
    assert error(wanted, plain) > 1e-3
    assert torch.equal(out, wanted) and torch.equal(skipped, wanted)


@pytest.mark.parametrize("patch", PATCHES)
def test_patches_see_what_they_see_without_us(unets, patch):
    """In a full step the same places in the same order, in a skipped one those of them that run."""
    log, patched = [], unets["sd15"].clone()
    patch(patched, log)
    ends = []
    wanted, out, skipped = pieces(patched, SIZES[0], 2, between=lambda: ends.append(len(log)))
    assert torch.equal(out, wanted) and torch.equal(skipped, wanted)
    theirs, full, less = log[: ends[0]], log[ends[0] : ends[1]], log[ends[1] :]
    assert full == theirs and 0 < len(less) <= len(full)
    assert [place for place in full if place in less] == less


def test_a_deep_feature_is_not_written_into(unets):
    """FreeU edits the input of an output block in place; the stored feature must not see it."""
    from anyshape.accel.families import unet
    from anyshape.accel.ops import FusedOps

    patched = unets["sd15"].clone()
    patched.set_model_output_block_patch(lambda h, skip, options: (h.mul_(0), skip))
    model, inputs = patched.model.diffusion_model, unet_inputs(patched, 128, 128)
    for depth in range(4):
        call = unet.arguments(**inputs, transformer_options=options_of(patched))
        with torch.inference_mode():
            _, deep = unet.full(FusedOps(), model, unet.EAGER, call, call.flat(), depth)
        assert deep.abs().sum() > 0


@pytest.mark.parametrize("name", list(UNETS))
@pytest.mark.parametrize("kind", ["none", "short"])
def test_pieces_fused(unets, name, kind):
    from tools.stand_in import StandIn

    for depth in (0, 3):
        wanted, out, skipped = pieces(unets[name], SIZES[0], depth, kind, StandIn())
        assert error(out, wanted) < 1e-4 and error(skipped, wanted) < 1e-4


# Costs ------------------------------------------------------------------------------------------------------------


def full_size(models, name, **changes):
    """A full-size UNet without memory for its weights."""
    family, config = models.UNETS[name]
    settings = family(models.SPATIAL | config | changes)
    settings.unet_config.update({k: v for k, v in config.items() if k in ("num_heads", "num_head_channels")})
    settings.set_inference_dtype(torch.float16, None)
    return settings.get_model({}, "", device="meta").diffusion_model


@pytest.mark.parametrize("name, side, chosen", [("sdxl", 128, 2), ("sdxl", 64, 2), ("sd15", 64, 0), ("sd15", 96, 0)])
def test_depth_auto_is_the_deepest_cheap_one(models, name, side, chosen):
    from anyshape.accel.families.skipping import depth_of
    from anyshape.accel.skip.settings import SkipSettings

    assert depth_of(SkipSettings(), full_size(models, name), side, side) == chosen
    assert depth_of(SkipSettings(depth="3"), full_size(models, name), side, side) == 3
    assert depth_of(SkipSettings(depth="10"), full_size(models, "sdxl"), side, side) == 2


FEWER_BLOCKS = {  # than SDXL's 70, each of which torch counts alone
    "sdxl": {
        "transformer_depth": [0, 0, 1, 1, 3, 3], "transformer_depth_output": [0, 0, 0, 1, 1, 1, 3, 3, 3],
        "transformer_depth_middle": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_shares_are_those_that_torch_counts(models, name):
    """By torch's own counter of FLOPs, on tensors without memory."""
    from anyshape.accel.families import unet
    from anyshape.accel.families.unet_cost import shares
    from anyshape.accel.ops import FusedOps
    from torch.utils.flop_counter import FlopCounterMode

    model = full_size(models, name, **FEWER_BLOCKS.get(name, {}))
    width, y = (2048, 2816) if name == "sdxl" else (768, None)
    meta = {"device": "meta", "dtype": torch.float16}
    x, context = torch.empty(1, 4, 64, 64, **meta), torch.empty(1, 77, width, **meta)
    inputs = {"x": x, "timesteps": torch.empty(1, device="meta"), "context": context}
    inputs["y"] = None if y is None else torch.empty(1, y, **meta)

    def counted(run):
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            out = run(unet.arguments(**inputs, transformer_options={}))
        return counter.get_total_flops(), out

    for depth in (0, 2, 3, 5):
        whole, (_, deep) = counted(lambda call, k=depth: unet.full(FusedOps(), model, unet.EAGER, call, call.flat(), k))
        less, _ = counted(
            lambda call, k=depth, d=deep: unet.skipped(
                FusedOps(), model, unet.EAGER, call, call.flat() | {unet.DEEP: d}, k
            )
        )
        assert shares(model, 64, 64)[depth] == pytest.approx(less / whole, abs=0.005)
