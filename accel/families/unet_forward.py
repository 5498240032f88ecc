"""One forward of ComfyUI's ``UNetModel`` in fused operations, whole or in three pieces.

It mirrors ``UNetModel._forward`` (comfy/ldm/modules/diffusionmodules/openaimodel.py) step by step, so that ControlNet
residuals, FreeU, IPAdapter-style attention patches and the rest meet the same points; only the inside of the blocks
that nobody patched is ours.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import comfy.ldm.modules.attention as attention
import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention, SpatialTransformer
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock, UNetModel, Upsample
from comfy.ldm.modules.diffusionmodules.util import timestep_embedding
from torch import Tensor, nn

from ..ops import FusedOps, Stream, linear
from .compat import HAS_MIDDLE_PATCH
from .layers import conv, norm_of, pointwise, product, to_image, to_tokens, weights_of
from .unet_plan import Plan

Control = dict[str, list[Tensor | None]] | None
ATTENTION_PATCHES = ("attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch", "middle_patch")


def res_block(ops: FusedOps, m: ResBlock, x: Tensor, shift: Tensor, pending: tuple[Tensor, ...] = ()) -> Tensor:
    """openaimodel.ResBlock._forward; x [N, C, H, W], shift + pending = emb_layers(embedding) [N, C]."""
    h = ops.group_norm(x, norm_of(m.in_layers[0], x))
    if m.updown:
        h, x = m.h_upd(h), m.x_upd(x)
    h, bias = conv(ops, m.in_layers[-1], h)
    pending = pending if bias is None else (*pending, bias)
    h = ops.group_norm(h, norm_of(m.out_layers[0], h), shift.type(h.dtype), pending=pending)
    h, bias = conv(ops, m.out_layers[-1], h)
    skip_bias = None
    if isinstance(m.skip_connection, nn.Conv2d):
        x, skip_bias = conv(ops, m.skip_connection, x)
    return ops.bias_add(h, bias, x, skip_bias)


def transformer_block(
    ops: FusedOps, m: BasicTransformerBlock, stream: Stream, text: tuple[Tensor, Tensor], options: dict[str, Any]
) -> Stream:
    """attention.BasicTransformerBlock.forward without patches.

    stream [B, T, C]; text: the keys and the values of cross-attention, [B, L, C] each.
    """
    a1, a2, ff, x = m.attn1, m.attn2, m.ff.net, stream.value
    projections = (weights_of(layer, x) for layer in (a1.to_q, a1.to_k, a1.to_v))
    stream, q, k, v = ops.query_key_value(stream, norm_of(m.norm1, x), *projections)
    a = _attend(a1, q, k, v, options)
    stream, q = ops.cross_query(a, stream, weights_of(a1.to_out[0], x), norm_of(m.norm2, x), weights_of(a2.to_q, x))
    a = _attend_text(ops, a2, q, *text, options)
    out, up, down = (weights_of(layer, x) for layer in (a2.to_out[0], ff[0].proj, ff[2]))
    return ops.feed_forward(a, stream, out, norm_of(m.norm3, x), up, down)


def _attend(m: CrossAttention, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    # looked up at each call: the backend is the user's choice, and other packs may replace it
    return attention.optimized_attention(q, k, v, m.heads, attn_precision=m.attn_precision, transformer_options=options)


def _attend_text(ops: FusedOps, m: CrossAttention, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Cross-attention: by our kernel for few keys where the user's backend is torch's own, which it mirrors."""
    if attention.optimized_attention is attention.attention_pytorch and "optimized_attention_override" not in options:
        out = ops.short_attention(q, k, v, m.heads)
        if out is not None:
            return out
    return _attend(m, q, k, v, options)


def upsample(ops: FusedOps, m: Upsample, x: Tensor, output_shape: torch.Size | None) -> Tensor:
    """openaimodel.Upsample.forward for images; ``output_shape``: of the skip connection to meet."""
    size = (2 * x.shape[2], 2 * x.shape[3]) if output_shape is None else tuple(output_shape[2:])
    if any(2 * side - out not in (0, 1) for side, out in zip(x.shape[2:], size, strict=True)):
        return m(x, output_shape=output_shape)
    x = ops.upsample2x(x, size)
    return m.conv(x) if m.use_conv else x


def ending(stage: Iterable[nn.Module]) -> list[nn.Module]:
    """The upsampling at the end of an output block, if it has one."""
    return [layer for layer in list(stage)[-1:] if isinstance(layer, Upsample)]


@dataclass(frozen=True)
class Inputs:
    """What a UNet is called with."""

    x: Tensor  # [N, C, H, W]
    timesteps: Tensor  # [N]
    context: Tensor  # [N, L, D]
    y: Tensor | None  # [N, A]
    control: Control  # lists of our own: they are emptied from their ends


class UNetForward:
    """One forward, made for a call and dropped after it.

    In pieces, cut at a depth k: the *head* is input blocks 0..k, the *deep* piece the other input blocks, the middle
    and the output blocks that belong to them, the *tail* the last k + 1 output blocks. Where the deep piece would end
    in an upsampling, the tail begins with it instead: before it the deep feature has a quarter of the pixels.
    """

    def __init__(self, ops: FusedOps, model: UNetModel, plan: Plan, options: dict[str, Any], inputs: Inputs) -> None:
        self.ops, self.model, self.plan, self.options = ops, model, plan, options
        self.patches: dict[str, list[Callable]] = options.get("patches", {})
        self.replacements: dict[str, dict] = options.get("patches_replace", {})
        self.inputs, self.x, self.context, self.control = inputs, inputs.x, inputs.context, inputs.control
        # classes of layers that patches run instead: which of them, ComfyUI's own code decides
        self.patched = tuple(kind for kind, _ in self.patches.get("forward_timestep_embed_patch", ()))
        options["original_shape"], options["transformer_index"] = list(inputs.x.shape), 0
        self.emb = self._embedding(inputs.x, inputs.timesteps, inputs.y)
        self.shifts = self._project_embedding(F.silu(self.emb))
        self.text = self._project_text(inputs.context)
        self.skips: list[Tensor] = []

    def whole(self) -> Tensor:
        """UNetModel._forward: [N, C', H, W]."""
        ends = len(self.model.input_blocks), len(self.model.output_blocks)
        h = self._middle(self._down(self._latent(), range(ends[0])))
        return self._out(self._up(h, range(ends[1])))

    def full(self, depth: int) -> tuple[Tensor, Tensor]:
        """(``whole``, the deep feature at the cut [N, C_k, H_k, W_k])."""
        h = self._down(self._latent(), range(depth + 1))
        h = self._middle(self._down(h, range(depth + 1, len(self.model.input_blocks))))
        deep = self._up(h, range(self._cut(depth)), complete=False)
        # patches of the tail may write into their input (FreeU does)
        h = deep.clone() if "output_block_patch" in self.patches else deep
        return self._tail(depth, h), deep

    def skipped(self, depth: int, deep: Tensor) -> Tensor:
        """``whole`` with a deep feature from elsewhere in place of the deep piece; it may be written into."""
        self._down(self._latent(), range(depth + 1))
        self._pass_over(depth)
        return self._tail(depth, deep)

    def _tail(self, depth: int, h: Tensor) -> Tensor:
        cut = self._cut(depth)
        upsampling = ending(self.model.output_blocks[cut - 1])
        self.options["block"] = ("output", cut - 1)
        h = self._stage(upsampling, h, self.skips[-1].shape)
        return self._out(self._up(h, range(cut, len(self.model.output_blocks))))

    def _cut(self, depth: int) -> int:
        """The first output block of the tail."""
        return len(self.model.output_blocks) - depth - 1

    def _pass_over(self, depth: int) -> None:
        """Leaves control and counters as the deep piece would: each residual belongs to one output block."""
        cut, residuals = self._cut(depth), (self.control or {}).get("output", [])
        del residuals[max(0, len(residuals) - cut) :]
        stages = [*self.model.input_blocks[depth + 1 :], self.model.middle_block or [], *self.model.output_blocks[:cut]]
        self.options["transformer_index"] += sum(isinstance(m, SpatialTransformer) for stage in stages for m in stage)

    def _latent(self) -> Tensor:
        return self.x.contiguous(memory_format=torch.channels_last) if self.ops.channels_last else self.x

    def _out(self, h: Tensor) -> Tensor:
        h, out = h.type(self.x.dtype), self.model.out
        if not self.plan.ends_fused:
            return out(h).contiguous()
        return out[2](self.ops.group_norm(h, norm_of(out[0], h))).contiguous()

    def _project_embedding(self, silu: Tensor) -> dict[int, tuple[Tensor, tuple[Tensor, ...]]]:
        """What each ResBlock adds to its channels: (its projection of the embedding [N, C], the bias still to add)."""
        group, blocks = self.plan.embedding, self.plan.embedded
        if not blocks or silu.dtype != group.weights[0].dtype:
            return {id(m): (m.emb_layers[1](silu), ()) for m in self.plan.res_blocks.values()}
        outs = dict(zip(blocks, self.ops.grouped_linear(silu, group), strict=True))
        return {key: self._shift_of(m, silu, outs.get(key)) for key, m in self.plan.res_blocks.items()}

    def _shift_of(self, m: ResBlock, silu: Tensor, out: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        if out is None:
            return m.emb_layers[1](silu), ()
        bias = m.emb_layers[1].bias
        return out, () if bias is None else (bias,)

    def _project_text(self, context: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """The keys and values of every block that takes them as they are, in one launch."""
        if not self.plan.text_blocks or context.dtype != self.plan.text.weights[0].dtype:
            return {}
        parts = iter(self.ops.grouped_linear(context, self.plan.text))
        return {block: (next(parts), next(parts)) for block in self.plan.text_blocks}

    def _text_of(self, m: BasicTransformerBlock) -> tuple[Tensor, Tensor]:
        if id(m) in self.text:
            return self.text[id(m)]
        k, v = (linear(self.context, weights_of(layer, self.context)) for layer in (m.attn2.to_k, m.attn2.to_v))
        return k, v

    def _embedding(self, x: Tensor, timesteps: Tensor, y: Tensor | None) -> Tensor:
        model = self.model
        if (y is not None) != (model.num_classes is not None):
            raise ValueError("the model takes a pooled embedding y and got none, or got one that it does not take")
        emb = model.time_embed(timestep_embedding(timesteps, model.model_channels, repeat_only=False).to(x.dtype))
        for patch in self.patches.get("emb_patch", ()):
            emb = patch(emb, model.model_channels, self.options)
        return emb if y is None else emb + model.label_emb(y)

    def _down(self, h: Tensor, blocks: range) -> Tensor:
        """Input blocks; what they give to the output blocks is appended to ``skips``."""
        for index in blocks:
            self.options["block"] = ("input", index)
            h = openaimodel.apply_control(self._stage(self.model.input_blocks[index], h), self.control, "input")
            for patch in self.patches.get("input_block_patch", ()):
                h = patch(h, self.options)
            self.skips.append(h)
            for patch in self.patches.get("input_block_patch_after_skip", ()):
                h = patch(h, self.options)
        return h

    def _middle(self, h: Tensor) -> Tensor:
        self.options["block"] = ("middle", 0)
        if self.model.middle_block is not None:
            h = self._stage(self.model.middle_block, h)
        h = openaimodel.apply_control(h, self.control, "middle")
        for patch in self.patches.get("middle_block_after_patch", ()) if HAS_MIDDLE_PATCH else ():
            given = {"h": h, "emb": self.emb, "transformer_options": self.options}
            names = ("x", "timesteps", "context", "y")
            h = patch(given | {name: getattr(self.inputs, name) for name in names})["h"]
        return h

    def _up(self, h: Tensor, blocks: range, complete: bool = True) -> Tensor:
        """Output blocks; each takes the last of ``skips``. Not ``complete``: without the last one's ``ending``."""
        for index in blocks:
            self.options["block"] = ("output", index)
            skip = openaimodel.apply_control(self.skips.pop(), self.control, "output")
            for patch in self.patches.get("output_block_patch", ()):
                h, skip = patch(h, skip, self.options)
            if skip is not None:  # a patch may have joined them
                h = torch.cat([h, skip], dim=1)  # in channels_last if both are
            del skip  # not held while the stage runs, as in eager
            layers = list(self.model.output_blocks[index])
            if not complete and index == blocks[-1]:
                layers = layers[: len(layers) - len(ending(layers))]
            h = self._stage(layers, h, self.skips[-1].shape if self.skips else None)
        return h

    def _stage(self, stage: Iterable[nn.Module], h: Tensor, output_shape: torch.Size | None = None) -> Tensor:
        """One stage of layers; h [N, C, H, W], output_shape: of the skip connection that the result will meet."""
        for layer in stage:
            if isinstance(layer, self.patched):
                h = openaimodel.forward_timestep_embed([layer], h, self.emb, self.context, self.options, output_shape)
            elif id(layer) in self.plan.res_blocks:
                h = res_block(self.ops, layer, h, *self.shifts[id(layer)])
            elif id(layer) in self.plan.transformers:
                h = self._transformer(layer, h)
                self.options["transformer_index"] += 1
            elif id(layer) in self.plan.upsamplings:
                h = upsample(self.ops, layer, h, output_shape)
            else:  # downsampling, the first convolution, blocks that are not plain
                h = openaimodel.forward_timestep_embed([layer], h, self.emb, self.context, self.options, output_shape)
        return h

    def _transformer(self, m: SpatialTransformer, x: Tensor) -> Tensor:
        """attention.SpatialTransformer.forward."""
        self.options["activations_shape"] = list(x.shape)
        h = to_tokens(self.ops.group_norm(x, norm_of(m.norm, x), silu=False))
        stream = Stream(pointwise(m.proj_in, h))
        for index, block in enumerate(m.transformer_blocks):
            self.options["block_index"] = index
            if self._is_ours(block, index):
                stream = transformer_block(self.ops, block, stream, self._text_of(block), self.options)
            else:
                stream = Stream(block(stream.settled(), context=self.context, transformer_options=self.options))
        h, bias = product(self.ops, m.proj_out, stream.settled())
        return self.ops.bias_add(to_image(h, x), bias, x)

    def _is_ours(self, block: BasicTransformerBlock, index: int) -> bool:
        """Whether nobody patched this block, by type or by place."""
        if id(block) not in self.plan.transformer_blocks or any(name in self.patches for name in ATTENTION_PATCHES):
            return False
        place = self.options["block"]
        return not any(
            key in self.replacements.get(name, {}) for name in ("attn1", "attn2") for key in (place, (*place, index))
        )
