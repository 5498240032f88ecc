"""One forward of ComfyUI's ``UNetModel`` in fused operations.

It mirrors ``UNetModel._forward`` (comfy/ldm/modules/diffusionmodules/openaimodel.py) step by step, so that ControlNet
residuals, FreeU, IPAdapter-style attention patches and the rest meet the same points; only the inside of the blocks
that nobody patched is ours.
"""

from dataclasses import dataclass
from typing import Any

import torch
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor

from ..ops import FusedOps
from .compat import HAS_MIDDLE_PATCH
from .layers import norm_of
from .unet_plan import Plan
from .unet_stages import Stages

Control = dict[str, list[Tensor | None]] | None


@dataclass(frozen=True)
class Inputs:
    """What a UNet is called with."""

    x: Tensor  # [N, C, H, W]
    timesteps: Tensor  # [N]
    context: Tensor  # [N, L, D]
    y: Tensor | None  # [N, A]
    control: Control  # lists of our own: they are emptied from their ends


class UNetForward(Stages):
    """One forward, made for a call and dropped after it."""

    def __init__(self, ops: FusedOps, model: UNetModel, plan: Plan, options: dict[str, Any], inputs: Inputs) -> None:
        super().__init__(ops, model, plan, options, inputs.context)
        self.inputs, self.x, self.control = inputs, inputs.x, inputs.control
        options["original_shape"], options["transformer_index"] = list(inputs.x.shape), 0
        self.embed(self._embedding(inputs.x, inputs.timesteps, inputs.y))
        self.skips: list[Tensor] = []

    def whole(self) -> Tensor:
        """UNetModel._forward: [N, C', H, W]."""
        return self._out(self._up(self._middle(self._down(self.laid_out(self.x)))))

    def _out(self, h: Tensor) -> Tensor:
        h, out = h.type(self.x.dtype), self.model.out
        if not self.plan.fuses(out):
            return out(h).contiguous()
        return out[2](self.ops.group_norm(h, norm_of(out[0], h))).contiguous()

    def _embedding(self, x: Tensor, timesteps: Tensor, y: Tensor | None) -> Tensor:
        model = self.model
        if (y is not None) != (model.num_classes is not None):
            raise ValueError("the model takes a pooled embedding y and got none, or got one that it does not take")
        emb = self.time_embedding(x, timesteps)
        for patch in self.patches.get("emb_patch", ()):
            emb = patch(emb, model.model_channels, self.options)
        return emb if y is None else emb + model.label_emb(y)

    def _down(self, h: Tensor) -> Tensor:
        """Input blocks; what they give to the output blocks is appended to ``skips``."""
        for index, layers in enumerate(self.model.input_blocks):
            self.options["block"] = ("input", index)
            h = openaimodel.apply_control(self.run(layers, h), self.control, "input")
            for patch in self.patches.get("input_block_patch", ()):
                h = patch(h, self.options)
            self.skips.append(h)
            for patch in self.patches.get("input_block_patch_after_skip", ()):
                h = patch(h, self.options)
        return h

    def _middle(self, h: Tensor) -> Tensor:
        self.options["block"] = ("middle", 0)
        if self.model.middle_block is not None:
            h = self.run(self.model.middle_block, h)
        h = openaimodel.apply_control(h, self.control, "middle")
        for patch in self.patches.get("middle_block_after_patch", ()) if HAS_MIDDLE_PATCH else ():
            given = {"h": h, "emb": self.emb, "transformer_options": self.options}
            names = ("x", "timesteps", "context", "y")
            h = patch(given | {name: getattr(self.inputs, name) for name in names})["h"]
        return h

    def _up(self, h: Tensor) -> Tensor:
        """Output blocks; each takes the last of ``skips``."""
        for index, layers in enumerate(self.model.output_blocks):
            self.options["block"] = ("output", index)
            skip = openaimodel.apply_control(self.skips.pop(), self.control, "output")
            for patch in self.patches.get("output_block_patch", ()):
                h, skip = patch(h, skip, self.options)
            if skip is not None:  # a patch may have joined them
                h = torch.cat([h, skip], dim=1)  # in channels_last if both are
            del skip  # not held while the stage runs, as in eager
            h = self.run(layers, h, self.skips[-1].shape if self.skips else None)
        return h
