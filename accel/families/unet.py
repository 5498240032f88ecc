"""ComfyUI's ``UNetModel`` (SD1.5, SD2, SDXL and their kin) as a family; its forward is in ``unet_forward``."""

from typing import Any

from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor, nn

from ..ops import FusedOps
from ..reasons import say
from .family import Arguments, residuals, unconsumed, unknown_patches
from .unet_forward import Control, Inputs, UNetForward
from .unet_plan import Plan, unknown_layers
from .unet_stages import ending

__all__ = ["Plan"]  # a name of the family's protocol

DEEP = "deep"  # the name of the deep feature among a call's tensors
EAGER = Plan(nn.Module(), ())  # nothing is fused
KIND = "model"
MODEL = UNetModel
MIRRORED = ("_forward",)
LATENT_TO_PIXELS = 8
PATCHES = frozenset(  # that ``forward`` calls, or that its blocks do
    "input_block_patch input_block_patch_after_skip middle_block_after_patch output_block_patch emb_patch "
    "forward_timestep_embed_patch attn1_patch attn1_output_patch attn2_patch attn2_output_patch middle_patch".split()
)


def unsupported(model: UNetModel) -> str:
    """Why this UNet is not one that ``forward`` mirrors; "" if it is."""
    if model.predict_codebook_ids:
        return say("unet_codebook")
    foreign = unknown_layers([*model.input_blocks, *model.output_blocks, model.middle_block or []])
    return say("unet_layers", names=foreign) if foreign else ""


def arguments(
    x: Tensor, timesteps: Tensor | None = None, context: Tensor | None = None, y: Tensor | None = None,
    control: Control = None, transformer_options: dict[str, Any] | None = None, **extra: Any,
) -> Arguments:  # fmt: skip
    """UNetModel._forward's arguments."""
    options = {} if transformer_options is None else transformer_options
    return Arguments(
        tensors={"x": x, "timesteps": timesteps, "context": context, "y": y},
        lists=residuals(control),
        options=options,
        original=lambda: (x, timesteps, context, y, unconsumed(control), options),
        extra=extra,
    )


def obstacle(given: Arguments) -> str:
    """Why only ComfyUI's own forward is right for this call; "" if ours is."""
    return unknown_patches(given, PATCHES, "a UNet")


def forward(ops: FusedOps, model: UNetModel, plan: Plan, given: Arguments, tensors: dict[str, Tensor]) -> Tensor:
    """The fused forward on flattened tensors."""
    return _made(ops, model, plan, given, tensors).whole()


def full(
    ops: FusedOps, model: UNetModel, plan: Plan, given: Arguments, tensors: dict[str, Tensor], depth: int
) -> tuple[Tensor, Tensor]:
    """(``forward``, the deep feature that ``skipped`` takes)."""
    return _made(ops, model, plan, given, tensors).full(depth)


def skipped(
    ops: FusedOps, model: UNetModel, plan: Plan, given: Arguments, tensors: dict[str, Tensor], depth: int
) -> Tensor:
    """``forward`` with ``tensors["deep"]`` in place of the deep blocks, which do not run."""
    return _made(ops, model, plan, given, tensors).skipped(depth, tensors[DEEP])


def shallow_parts(model: UNetModel, depth: int) -> list[nn.Module]:
    """The parts that ``skipped`` runs."""
    upsampling = ending(model.output_blocks[-depth - 2])
    return [*model.input_blocks[: depth + 1], *upsampling, *model.output_blocks[-depth - 1 :], model.out]


def _made(ops: FusedOps, model: UNetModel, plan: Plan, given: Arguments, tensors: dict[str, Tensor]) -> UNetForward:
    x, timesteps, context, y = (tensors.get(name) for name in ("x", "timesteps", "context", "y"))
    return UNetForward(ops, model, plan, given.options, Inputs(x, timesteps, context, y, given.control(tensors)))
