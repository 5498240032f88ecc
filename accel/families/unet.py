"""ComfyUI's ``UNetModel`` (SD1.5, SD2, SDXL and their kin) as a family; its forward is in ``unet_forward``."""

from typing import Any

from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor

from ..ops import FusedOps
from ..reasons import say
from .family import Arguments, residuals, unconsumed, unknown_patches
from .unet_forward import Control, Inputs, UNetForward
from .unet_plan import Plan, unknown_layers

__all__ = ["Plan"]  # a name of the family's protocol

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
    x, timesteps, context, y = (tensors.get(name) for name in ("x", "timesteps", "context", "y"))
    inputs = Inputs(x, timesteps, context, y, given.control(tensors))
    return UNetForward(ops, model, plan, given.options, inputs).whole()
