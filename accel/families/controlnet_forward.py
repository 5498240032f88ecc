"""One forward of ComfyUI's ``ControlNet`` for SD's UNets, union ones included, in fused operations.

It mirrors ``ControlNet.forward`` (comfy/cldm/cldm.py) step by step, on the stages that it shares with the UNet. ComfyUI
gives a ControlNet no transformer_options, so there are no patches to meet.
"""

from typing import Any

import torch
import torch.nn.functional as F
from comfy.cldm.cldm import ControlNet
from comfy.ldm.modules.diffusionmodules.openaimodel import TimestepEmbedSequential
from comfy.ldm.modules.diffusionmodules.util import timestep_embedding
from torch import Tensor

from ..ops import FusedOps
from ..reasons import say
from .family import Arguments
from .layers import is_altered
from .run_state import call_obstacle
from .unet_plan import Plan, unknown_layers
from .unet_stages import Stages

__all__ = ["Plan"]  # what a run asks of a family

KIND = "controlnet"
MODEL = ControlNet
LATENT_TO_PIXELS = 8
TENSORS = ("x", "hint", "timesteps", "context", "y")
TYPE = "control_type"  # which of a union ControlNet's kinds of hint this is; a list of at most one number


def unsupported(model: ControlNet) -> str:
    """Why this ControlNet is not one that ``forward`` mirrors; "" if it is."""
    foreign = unknown_layers([*model.input_blocks, model.middle_block])
    return say("control_layers", names=foreign) if foreign else ""


def arguments(
    x: Tensor, hint: Tensor, timesteps: Tensor, context: Tensor, y: Tensor | None = None, **extra: Any
) -> Arguments:
    """ControlNet.forward's arguments."""
    known = {TYPE: extra.pop(TYPE)} if TYPE in extra else {}
    given = (x, hint, timesteps, context, y)
    return Arguments(
        tensors=dict(zip(TENSORS, given, strict=True)),
        lists={},
        options={},
        original=lambda: given,
        extra=extra,
        known=known,
        plain={name: str(value) for name, value in known.items()},
    )


def obstacle(model: ControlNet, given: Arguments) -> str:
    """Why only ComfyUI's own forward is right for this call of this ControlNet; "" if ours is."""
    if is_altered(model):
        return say("foreign_control")
    if not isinstance(given.tensors["hint"], Tensor) or given.tensors["hint"].ndim != 4:
        return say("control_hint")
    if model.num_classes is not None and given.tensors["y"] is None:
        return say("control_pooled")
    types = given.known.get(TYPE, ())
    if model.control_add_embedding is not None and (len(types) > 1 or max(types, default=0) >= model.num_control_type):
        return say("control_type")
    return call_obstacle(given)


def graph_obstacle(model: ControlNet, plan: Plan, x: Tensor) -> str:
    """Why the forward must not be captured; "" if it may."""
    if any(parameter.device != x.device for parameter in model.parameters(recurse=False)):
        return say("control_streamed")
    return plan.survey.graph_obstacle()


def forward(
    ops: FusedOps, model: ControlNet, plan: Plan, given: Arguments, tensors: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """The residuals of the UNet's input blocks, then the one of its middle block; each has memory of its own."""
    x, hint, timesteps, context, y = (tensors.get(name) for name in TENSORS)
    types = given.known.get(TYPE, ())
    fused = ControlForward(ops, model, plan, {}, context)
    emb = fused.time_embedding(x, timesteps)
    if model.control_add_embedding is not None:
        emb = emb + fused.type_embedding(types, emb)
    fused.embed(emb if model.num_classes is None else emb + model.label_emb(y))
    return fused(x, fused.guide(hint, types))


class ControlForward(Stages):
    """One forward, made for a call and dropped after it."""

    def __call__(self, x: Tensor, guide: Tensor) -> tuple[Tensor, ...]:
        """x [N, C, H, W], guide [N or 1, C', H, W] -> what ``forward`` gives."""
        h, out = self.laid_out(x), []
        for index, (block, zero_conv) in enumerate(zip(self.model.input_blocks, self.model.zero_convs, strict=True)):
            h = self._stage(block, h)
            if index == 0:
                h = h + guide
            out.append(self._stage(zero_conv, h))
        h = self._stage(self.model.middle_block, h)
        return *out, self._stage(self.model.middle_block_out, h)

    def _stage(self, stage: TimestepEmbedSequential, h: Tensor) -> Tensor:
        """A stage as ComfyUI calls it here: as a module, on which another pack may have hung something."""
        return stage(h, self.emb, self.context) if is_altered(stage) else self.run(stage, h)

    def guide(self, hint: Tensor, types: list[int]) -> Tensor:
        """What the hint [N or 1, 3, 8H, 8W] adds to the first block: [N or 1, C', H, W]."""
        hint = self.laid_out(hint)
        if self.model.control_add_embedding is not None and len(types) > 0:
            return self.model.union_controlnet_merge(hint[None], types, self.emb, self.context)
        return self.model.input_hint_block(hint, self.emb, self.context)

    def type_embedding(self, types: list[int], like: Tensor) -> Tensor:
        """ControlAddEmbedding.forward without its copy from the host, which no graph can hold: [1, E]."""
        layer = self.model.control_add_embedding
        if not self.plan.fuses(layer):
            return layer(types, like.dtype, like.device)
        flags = torch.zeros(layer.num_control_type, device=like.device)
        for number in types:
            flags[number].fill_(1.0)
        c = timestep_embedding(flags, layer.in_dim, repeat_only=False).to(like.dtype)
        return layer.linear_2(F.silu(layer.linear_1(c.reshape(-1, layer.num_control_type * layer.in_dim))))
