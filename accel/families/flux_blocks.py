"""The blocks of Flux.1 in fused operations: which may run so, and how (comfy/ldm/flux/layers.py)."""

from collections.abc import Sequence
from typing import Any

import comfy.ldm.flux.layers as layers
import comfy.ldm.flux.math as flux_math
import torch
import torch.nn.functional as F
from comfy.ldm.flux.layers import DoubleStreamBlock, LastLayer, SingleStreamBlock
from comfy.ldm.flux.model import Flux
from torch import Tensor, nn

from ..ops import FusedOps, GatedStream, Heads, LinearGroup, Modulation, linear
from .compat import RMS_NORMS, drops_out
from .layers import Survey, is_cast, rms_norm_of, weights_of


class Plan:
    """Which blocks of one Flux may run on fused operations, decided once a sampling run.

    A block runs its own forward if another pack hooked or replaced anything in it, if it has layers of an unknown kind,
    or if it is of a form that Flux.1 does not have.
    """

    def __init__(self, model: Flux) -> None:
        self.survey = Survey(model, own_layers=RMS_NORMS)
        candidates = [*model.double_blocks, *model.single_blocks, model.final_layer]
        ours = [m for m in candidates if id(m) not in self.survey.odd and _is_plain(m)]
        self.ours = {id(m) for m in ours}
        grouped = [lin for m in ours for lin in _modulation_layers(m) if not is_cast(lin) and lin.bias is not None]
        self.grouped = [id(lin) for lin in grouped]
        self.group = LinearGroup([lin.weight for lin in grouped], [lin.bias for lin in grouped])

    def constants(self) -> tuple[Tensor | None, ...]:
        """The table of the modulations' weights."""
        return (self.group.table,)


def _is_plain(m: nn.Module) -> bool:
    plain = {DoubleStreamBlock: _plain_double_block, SingleStreamBlock: _plain_single_block, LastLayer: _plain_last}
    return type(m) in plain and plain[type(m)](m) and not drops_out(m)


def _plain_double_block(m: DoubleStreamBlock) -> bool:
    parts = (
        ((m.img_attn, m.img_mlp, m.img_mod), (m.txt_attn, m.txt_mlp, m.txt_mod))
        if getattr(m, "modulation", True)
        else ()
    )
    return (
        bool(parts)
        and not getattr(m, "flipped_img_txt", False)
        and all(
            _plain_norm(attn.norm) and len(mlp) == 3 and _is_tanh_gelu(mlp[1]) and mod.is_double
            for attn, mlp, mod in parts
        )
    )


def _plain_single_block(m: SingleStreamBlock) -> bool:
    return bool(m.modulation) and not m.modulation.is_double and _is_tanh_gelu(m.mlp_act) and _plain_norm(m.norm)


def _plain_last(m: LastLayer) -> bool:
    return len(m.adaLN_modulation) == 2 and type(m.adaLN_modulation[0]) is nn.SiLU


def _plain_norm(m: nn.Module) -> bool:
    return type(m) is layers.QKNorm and all(type(n) in RMS_NORMS for n in (m.query_norm, m.key_norm))


def _is_tanh_gelu(m: nn.Module) -> bool:
    return type(m) is nn.GELU and m.approximate == "tanh"


def _modulation_layers(m: nn.Module) -> tuple[nn.Module, ...]:
    """The linear layers of a plain part that take SiLU of the conditioning vector."""
    if type(m) is DoubleStreamBlock:
        return m.img_mod.lin, m.txt_mod.lin
    return (m.modulation.lin,) if type(m) is SingleStreamBlock else (m.adaLN_modulation[1],)


class Modulations:
    """What the modulation layers make of the conditioning vector [B, C], most of them in one launch."""

    def __init__(self, ops: FusedOps, plan: Plan, vec: Tensor) -> None:
        self._silu = F.silu(vec)
        grouped = bool(plan.grouped) and plan.group.weights[0].dtype == vec.dtype
        outs = ops.grouped_linear(self._silu, plan.group) if grouped else []
        self._outs = dict(zip(plan.grouped, outs, strict=False))

    def __call__(self, layer: nn.Module, count: int) -> tuple[Tensor, ...]:
        """The ``count`` vectors [B, C] of a modulation layer: views of one tensor."""
        out = self._outs.get(id(layer))
        if out is None:
            out = linear(self._silu, weights_of(layer, self._silu))
        return out.chunk(count, dim=-1)


class Attention:
    """Self-attention over all tokens, by whatever backend the user chose."""

    def __init__(self, ops: FusedOps, rotation: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
        self._ops, self._rotation, self._mask, self._options = ops, rotation, mask, options

    def __call__(self, parts: Sequence[Heads], heads: int) -> Tensor:
        """[B, T, H * D] over the tokens of all parts."""
        q, k, v = self._ops.rotary_query_key_value(parts, self._rotation)
        return flux_math.optimized_attention(
            q, k, v, heads, skip_reshape=True, mask=self._mask, transformer_options=self._options
        )


def double_block(
    ops: FusedOps, m: DoubleStreamBlock, img: GatedStream, txt: GatedStream, modulations: Modulations,
    attend: Attention,
) -> tuple[GatedStream, GatedStream]:  # fmt: skip
    """layers.DoubleStreamBlock.forward; img [B, T, C], txt [B, L, C]."""
    of_img, of_txt = modulations(m.img_mod.lin, 6), modulations(m.txt_mod.lin, 6)
    img, img_heads = _enter(ops, m.img_norm1, m.img_attn, img, of_img)
    txt, txt_heads = _enter(ops, m.txt_norm1, m.txt_attn, txt, of_txt)
    a = attend((txt_heads, img_heads), m.num_heads)
    length = txt.value.shape[1]
    txt = _leave(ops, a[:, :length], m.txt_attn.proj, m.txt_norm2, m.txt_mlp, txt, of_txt, is_half(txt.value))
    return _leave(ops, a[:, length:], m.img_attn.proj, m.img_norm2, m.img_mlp, img, of_img), txt


def _enter(
    ops: FusedOps, norm: nn.Module, attn: layers.SelfAttention, stream: GatedStream, modulation: Sequence[Tensor]
) -> tuple[GatedStream, Heads]:
    """The first half of a double block for one stream: (the stream, its projection for attention)."""
    shift, scale = modulation[:2]
    stream, n = ops.modulated_norm(stream, Modulation(shift, scale, norm.eps))
    return stream, _heads(attn.norm, linear(n, weights_of(attn.qkv, n)))


def _leave(
    ops: FusedOps, a: Tensor, proj: nn.Module, norm: nn.Module, mlp: nn.Sequential, stream: GatedStream,
    modulation: Sequence[Tensor], finite: bool = False,
) -> GatedStream:  # fmt: skip
    """The second half: attention's output [B, T, C] and the feed-forward are added to the stream."""
    _, _, gate, shift, scale, last_gate = modulation
    a = a.contiguous()  # above batch 1 a slice; torch adds the bias within the product only to whole rows
    stream = GatedStream(stream.value, linear(a, weights_of(proj, a)), gate)
    stream, n = ops.modulated_norm(stream, Modulation(shift, scale, norm.eps))
    h = ops.linear_gelu(n, weights_of(mlp[0], n))
    return GatedStream(stream.value, linear(h, weights_of(mlp[2], h)), last_gate, finite)


def _heads(norm: layers.QKNorm, qkv: Tensor) -> Heads:
    query, key = (rms_norm_of(n, qkv) for n in (norm.query_norm, norm.key_norm))
    return Heads(qkv, query.weight, key.weight, query.eps)


def is_half(x: Tensor) -> bool:
    """ComfyUI keeps fp16 streams finite at the points where we ask this."""
    return x.dtype == torch.float16


def single_block(
    ops: FusedOps, m: SingleStreamBlock, stream: GatedStream, modulations: Modulations, attend: Attention
) -> GatedStream:
    """layers.SingleStreamBlock.forward on stream [B, T, C]: attention and feed-forward side by side."""
    shift, scale, gate = modulations(m.modulation.lin, 3)
    stream, n = ops.modulated_norm(stream, Modulation(shift, scale, m.pre_norm.eps))
    layer, width = weights_of(m.linear1, n), 3 * m.hidden_size
    qkv, mlp = layer.rows(0, width), layer.rows(width)
    a = attend((_heads(m.norm, linear(n, qkv)),), m.num_heads)
    branch = ops.concat_linear(a, ops.linear_gelu(n, mlp), weights_of(m.linear2, n))
    return GatedStream(stream.value, branch, gate, is_half(branch))


def last_layer(ops: FusedOps, m: LastLayer, stream: GatedStream, modulations: Modulations) -> Tensor:
    """layers.LastLayer.forward; stream [B, T, C] -> [B, T, C']."""
    shift, scale = modulations(m.adaLN_modulation[1], 2)
    _, n = ops.modulated_norm(stream, Modulation(shift, scale, m.norm_final.eps))
    return linear(n, weights_of(m.linear, n))
