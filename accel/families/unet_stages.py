"""The stages of layers that a UNet and its ControlNet are made of, in fused operations.

The inside of the blocks that nobody patched is ours; every other layer runs ComfyUI's own code.
"""

from collections.abc import Callable, Iterable
from typing import Any

import comfy.ldm.modules.attention as attention
import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention, SpatialTransformer
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock, Upsample
from comfy.ldm.modules.diffusionmodules.util import timestep_embedding
from torch import Tensor, nn

from ..ops import FusedOps, Stream, linear
from .layers import conv, norm_of, pointwise, product, to_image, to_tokens, weights_of
from .unet_plan import Plan

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


class Stages:
    """What the stages of one forward run on, a UNet's or a ControlNet's; made for a call and dropped after it.

    options: transformer_options, where patches and counters are; a ControlNet is given none by ComfyUI.
    """

    def __init__(self, ops: FusedOps, model: nn.Module, plan: Plan, options: dict[str, Any], context: Tensor) -> None:
        self.ops, self.model, self.plan, self.options, self.context = ops, model, plan, options, context
        self.patches: dict[str, list[Callable]] = options.get("patches", {})
        self.replacements: dict[str, dict] = options.get("patches_replace", {})
        # classes of layers that patches run instead: which of them, ComfyUI's own code decides
        self.patched = tuple(kind for kind, _ in self.patches.get("forward_timestep_embed_patch", ()))

    def embed(self, emb: Tensor) -> None:
        """What the stages need of the embedding [N, E] and the prompt; to be called before the first of them."""
        self.emb = emb
        self.shifts = self._project_embedding(F.silu(emb))
        self.text = self._project_text(self.context)

    def time_embedding(self, x: Tensor, timesteps: Tensor) -> Tensor:
        """[N] -> [N, E] in the dtype of ``x``."""
        model = self.model
        return model.time_embed(timestep_embedding(timesteps, model.model_channels, repeat_only=False).to(x.dtype))

    def laid_out(self, x: Tensor) -> Tensor:
        """An image in the layout of the activations."""
        return x.contiguous(memory_format=torch.channels_last) if self.ops.channels_last else x

    def run(self, stage: Iterable[nn.Module], h: Tensor, output_shape: torch.Size | None = None) -> Tensor:
        """A stage's layers; h [N, C, H, W], output_shape: of the skip connection that the result will meet."""
        for layer in stage:
            if isinstance(layer, self.patched):
                h = openaimodel.forward_timestep_embed([layer], h, self.emb, self.context, self.options, output_shape)
            elif id(layer) in self.plan.res_blocks:
                h = res_block(self.ops, layer, h, *self.shifts[id(layer)])
            elif id(layer) in self.plan.transformers:
                h = self._transformer(layer, h)
                if "transformer_index" in self.options:
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
        place = self.options.get("block", ())
        return not any(
            key in self.replacements.get(name, {}) for name in ("attn1", "attn2") for key in (place, (*place, index))
        )

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
