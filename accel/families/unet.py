"""ComfyUI's ``UNetModel`` (SD1.5, SD2, SDXL and their kin) in fused operations.

``forward`` mirrors ``UNetModel._forward`` (comfy/ldm/modules/diffusionmodules/openaimodel.py) step by step, so that
ControlNet residuals, FreeU, IPAdapter-style attention patches and the rest meet the same points; only the inside of the
blocks that nobody patched is ours.
"""

from collections.abc import Callable
from typing import Any

import comfy.ldm.modules.attention as attention
import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention, SpatialTransformer
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, ResBlock, UNetModel, Upsample
from comfy.ldm.modules.diffusionmodules.util import timestep_embedding
from torch import Tensor, nn

from ..ops import FusedOps, LinearGroup, Stream, linear
from .family import Arguments, residuals
from .layers import (
    Survey,
    conv,
    is_altered,
    is_cast,
    norm_of,
    pointwise,
    product,
    to_image,
    to_tokens,
    weights_of,
)

Control = dict[str, list[Tensor | None]] | None
ATTENTION_PATCHES = ("attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch", "middle_patch")


KIND = "unet"
MODEL = UNetModel
MIRRORED = ("_forward",)
LATENT_TO_PIXELS = 8


def unsupported(model: UNetModel) -> str:
    """Why this UNet is not one that ``forward`` mirrors; "" if it is."""
    if model.predict_codebook_ids:
        return "UNets that predict codebook ids are not supported"
    foreign = {type(layer).__name__ for layer in _layers(model) if not _is_known(layer)}
    return f"the UNet has layers that AnyShape does not know: {', '.join(sorted(foreign))}" if foreign else ""


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
        original=(x, timesteps, context, y, control, options),
        extra=extra,
    )


def obstacle(given: Arguments) -> str:
    """A UNet has nothing of its own that ``forward`` could not do."""
    return ""


def forward(ops: FusedOps, model: UNetModel, plan: "Plan", given: Arguments, tensors: dict[str, Tensor]) -> Tensor:
    """The fused forward on flattened tensors."""
    fused = UNetForward(ops, model, plan, given.options)
    return fused(tensors["x"], tensors["timesteps"], tensors["context"], tensors.get("y"), given.control(tensors))


def _layers(model: UNetModel) -> list[nn.Module]:
    stages = [*model.input_blocks, *model.output_blocks, *([model.middle_block] if model.middle_block else [])]
    return [layer for stage in stages for layer in stage]


def _is_known(layer: nn.Module) -> bool:
    # exact types: VideoResBlock and SpatialVideoTransformer are subclasses with other forwards
    return type(layer) in (ResBlock, SpatialTransformer, Upsample, Downsample) or isinstance(layer, nn.Conv2d)


class Plan:
    """Which parts of one UNet may run on fused operations, decided once a sampling run.

    A part runs its own forward if another pack hooked or replaced anything in it, if it has layers of an unknown kind,
    or if it is of a form that no model in use has (scale-shift norm, an ungated feed-forward, ...).
    """

    def __init__(self, model: UNetModel) -> None:
        self.survey = Survey(model)
        self.res_blocks = {id(m): m for m in model.modules() if self._fits(m, ResBlock, _plain_res_block)}
        projections = {key: m.emb_layers[1] for key, m in self.res_blocks.items() if not is_cast(m.emb_layers[1])}
        self.embedded = list(projections)
        self.embedding = LinearGroup([layer.weight for layer in projections.values()])
        self.upsamplings = self._fit(model, Upsample, lambda m: m.dims == 2)
        self.transformer_blocks = self._fit(model, BasicTransformerBlock, _plain_transformer_block)
        self.transformers = self._fit_transformers(model)
        blocks = [m for m in model.modules() if id(m) in self.transformer_blocks and not _is_streamed(m)]
        self.text_blocks = [id(m) for m in blocks]
        self.text = LinearGroup([weight for m in blocks for weight in _text_weights(m)])

    def constants(self) -> tuple[Tensor | None, ...]:
        """The tables of the weights that are multiplied together."""
        return self.text.table, self.embedding.table

    def _fit_transformers(self, model: UNetModel) -> set[int]:
        """Transformers whose own layers are as they should be: their blocks are judged one by one."""
        found = (m for m in model.modules() if type(m) is SpatialTransformer and not is_altered(m))
        return {id(m) for m in found if not self.survey.odd & {id(m.norm), id(m.proj_in), id(m.proj_out)}}

    def _fit(self, model: UNetModel, kind: type, is_plain: Callable[[nn.Module], bool]) -> set[int]:
        return {id(m) for m in model.modules() if self._fits(m, kind, is_plain)}

    def _fits(self, m: nn.Module, kind: type, is_plain: Callable[[nn.Module], bool]) -> bool:
        return type(m) is kind and id(m) not in self.survey.odd and is_plain(m)


def _is_streamed(m: BasicTransformerBlock) -> bool:
    layers = (m.attn2.to_k, m.attn2.to_v)
    return any(is_cast(layer) or layer.bias is not None for layer in layers)


def _text_weights(m: BasicTransformerBlock) -> tuple[Tensor, Tensor]:
    return m.attn2.to_k.weight, m.attn2.to_v.weight


def _plain_res_block(m: ResBlock) -> bool:
    return (
        isinstance(m.in_layers[-1], nn.Conv2d)
        and not m.use_scale_shift_norm
        and not m.exchange_temb_dims
        and not m.skip_t_emb
        and not m.training
    )


def _plain_transformer_block(m: BasicTransformerBlock) -> bool:
    return (
        not m.ff_in
        and m.is_res
        and type(m.attn1) is CrossAttention
        and type(m.attn2) is CrossAttention
        and not m.disable_self_attn
        and not m.switch_temporal_ca_to_sa
        and type(m.ff.net[0]) is attention.GEGLU
        and not m.training
    )


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


class UNetForward:
    """One forward of a UNet in fused operations. Made for a call, dropped after it."""

    def __init__(self, ops: FusedOps, model: UNetModel, plan: Plan, options: dict[str, Any]) -> None:
        self.ops, self.model, self.plan, self.options = ops, model, plan, options
        self.patches: dict[str, list[Callable]] = options.get("patches", {})
        self.replacements: dict[str, dict] = options.get("patches_replace", {})

    def __call__(self, x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor | None, control: Control) -> Tensor:
        """UNetModel._forward; x [N, C, H, W] -> [N, C', H, W]."""
        model, options = self.model, self.options
        options["original_shape"], options["transformer_index"] = list(x.shape), 0
        emb = self._embedding(x, timesteps, y)
        self.shifts = self._project_embedding(F.silu(emb))
        self.text = self._project_text(context)
        h = x.contiguous(memory_format=torch.channels_last) if self.ops.channels_last else x
        h, skips = self._down(h, emb, context, control)
        options["block"] = ("middle", 0)
        if model.middle_block is not None:
            h = self._stage(model.middle_block, h, emb, context)
        h = openaimodel.apply_control(h, control, "middle")
        h = self._up(h, skips, emb, context, control).type(x.dtype)
        if id(model.out) in self.plan.survey.odd:
            return model.out(h).contiguous()
        return model.out[2](self.ops.group_norm(h, norm_of(model.out[0], h))).contiguous()

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

    def _text_of(self, m: BasicTransformerBlock, context: Tensor) -> tuple[Tensor, Tensor]:
        if id(m) in self.text:
            return self.text[id(m)]
        k, v = (linear(context, weights_of(layer, context)) for layer in (m.attn2.to_k, m.attn2.to_v))
        return k, v

    def _embedding(self, x: Tensor, timesteps: Tensor, y: Tensor | None) -> Tensor:
        model = self.model
        if (y is not None) != (model.num_classes is not None):
            raise ValueError("the model takes a pooled embedding y and got none, or got one that it does not take")
        emb = model.time_embed(timestep_embedding(timesteps, model.model_channels, repeat_only=False).to(x.dtype))
        for patch in self.patches.get("emb_patch", ()):
            emb = patch(emb, model.model_channels, self.options)
        return emb if y is None else emb + model.label_emb(y)

    def _down(self, h: Tensor, emb: Tensor, context: Tensor, control: Control) -> tuple[Tensor, list[Tensor]]:
        skips = []
        for index, stage in enumerate(self.model.input_blocks):
            self.options["block"] = ("input", index)
            h = openaimodel.apply_control(self._stage(stage, h, emb, context), control, "input")
            for patch in self.patches.get("input_block_patch", ()):
                h = patch(h, self.options)
            skips.append(h)
            for patch in self.patches.get("input_block_patch_after_skip", ()):
                h = patch(h, self.options)
        return h, skips

    def _up(self, h: Tensor, skips: list[Tensor], emb: Tensor, context: Tensor, control: Control) -> Tensor:
        for index, stage in enumerate(self.model.output_blocks):
            self.options["block"] = ("output", index)
            skip = openaimodel.apply_control(skips.pop(), control, "output")
            for patch in self.patches.get("output_block_patch", ()):
                h, skip = patch(h, skip, self.options)
            h = torch.cat([h, skip], dim=1)  # in channels_last if both are
            del skip  # not held while the stage runs, as in eager
            h = self._stage(stage, h, emb, context, skips[-1].shape if skips else None)
        return h

    def _stage(
        self, stage: nn.Module, h: Tensor, emb: Tensor, context: Tensor, output_shape: torch.Size | None = None
    ) -> Tensor:
        """One stage of layers; h [N, C, H, W]."""
        for layer in stage:
            if id(layer) in self.plan.res_blocks:
                h = res_block(self.ops, layer, h, *self.shifts[id(layer)])
            elif id(layer) in self.plan.transformers:
                h = self._transformer(layer, h, context)
                self.options["transformer_index"] += 1
            elif id(layer) in self.plan.upsamplings:
                h = upsample(self.ops, layer, h, output_shape)
            else:  # downsampling, the first convolution, blocks that are not plain, what a patch handles
                h = openaimodel.forward_timestep_embed([layer], h, emb, context, self.options, output_shape)
        return h

    def _transformer(self, m: SpatialTransformer, x: Tensor, context: Tensor) -> Tensor:
        """attention.SpatialTransformer.forward."""
        self.options["activations_shape"] = list(x.shape)
        h = to_tokens(self.ops.group_norm(x, norm_of(m.norm, x), silu=False))
        stream = Stream(pointwise(m.proj_in, h))
        for index, block in enumerate(m.transformer_blocks):
            self.options["block_index"] = index
            if self._is_ours(block, index):
                stream = transformer_block(self.ops, block, stream, self._text_of(block, context), self.options)
            else:
                stream = Stream(block(stream.settled(), context=context, transformer_options=self.options))
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
