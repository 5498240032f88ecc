"""The fused operations as symbolic-size regions: what runs where there is no Triton.

Every argument is brought into a form in which no dimension is ever 1 for a real model: a batch is merged with the
tokens or with the groups, and attention itself stays outside, with whatever backend the user chose. So a handful of
graphs serve every size, batch, context length and channel count of one dtype, and batch 1 needs none of its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels import reference
from .ops import FusedOps, Norm, Parts, Stream, Weights
from .regions import Region


def _normalise(x: Tensor, dims: tuple[int, ...], eps: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: Tensor) -> Tensor:  # [R, C]
    return (_normalise(x.float(), (-1,), eps) * weight.float() + bias.float()).to(x.dtype)


def _query_key_value(x: Tensor, w: Tensor, b: Tensor, eps: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple:
    n = _layer_norm(x, w, b, eps)
    return F.linear(n, q), F.linear(n, k), F.linear(n, v)


def _cross_query(
    a: Tensor, x: Tensor, out_w: Tensor, out_b: Tensor, w: Tensor, b: Tensor, eps: Tensor, q: Tensor
) -> tuple:
    x = x + F.linear(a, out_w, out_b)
    return x, F.linear(_layer_norm(x, w, b, eps), q)


def _feed_forward(
    a: Tensor, x: Tensor, out_w: Tensor, out_b: Tensor, w: Tensor, b: Tensor, eps: Tensor,
    up_w: Tensor, up_b: Tensor, down_w: Tensor, down_b: Tensor,
) -> Tensor:  # fmt: skip
    x = x + F.linear(a, out_w, out_b)
    p = F.linear(_layer_norm(x, w, b, eps), up_w, up_b)
    return x + F.linear(reference.geglu(p), down_w, down_b)


def _group_norm_silu(
    x: Tensor,  # [R, D, HW], R = batch * groups, D = channels a group
    scale: Tensor,  # [R, D]
    offset: Tensor,  # [R, D]
    eps: Tensor,  # []
) -> Tensor:
    y = _normalise(x.float(), (1, 2), eps) * scale.float()[:, :, None] + offset.float()[:, :, None]
    return F.silu(y).to(x.dtype)


def _bias_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:  # [R, C], [C], [R, C]
    return x + bias + residual


QUERY_KEY_VALUE = Region(_query_key_value)
CROSS_QUERY = Region(_cross_query)
FEED_FORWARD = Region(_feed_forward)
GROUP_NORM_SILU = Region(_group_norm_silu)
BIAS_ADD = Region(_bias_add)
ALL = (QUERY_KEY_VALUE, CROSS_QUERY, FEED_FORWARD, GROUP_NORM_SILU, BIAS_ADD)


def _rows(x: Tensor) -> Tensor:
    """[..., C] -> [R, C], contiguous: strides are guarded."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _image_rows(x: Tensor) -> Tensor:
    """[N, C, H, W] -> [N * H * W, C]; free in channels_last."""
    return _rows(x.permute(0, 2, 3, 1))


def _complete(norm: Norm, *layers: Weights) -> bool:
    """A region takes every parameter; a layer that lacks one (no model in use does) runs in plain torch."""
    return norm.weight is not None and norm.bias is not None and all(layer.bias is not None for layer in layers)


def _is_one_row(x: Tensor) -> bool:
    """A single token (an image of 64x64, deep in the UNet) would need graphs of its own: it runs in plain torch."""
    return x.numel() == x.shape[-1]


def _uniform(weight: Tensor) -> Tensor:
    """The same storage under a tensor whose kind depends on the caller's mode alone.

    A parameter loaded outside inference mode and one that a LoRA made inside it differ in their dispatch keys, which
    Dynamo guards; without this the first LoRA would compile everything again.
    """
    view = torch.empty(0, dtype=weight.dtype, device=weight.device)
    return view.set_(weight.untyped_storage(), weight.storage_offset(), weight.size(), weight.stride())


def _affine(norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    return _uniform(norm.weight), _uniform(norm.bias), norm.weight.new_full((), norm.eps, dtype=torch.float32)


def _layer(weights: Weights) -> tuple[Tensor, Tensor]:
    return _uniform(weights.weight), _uniform(weights.bias)


class RegionOps(FusedOps):
    """See ``FusedOps``: the transformer's parts between attentions, GroupNorm with SiLU, and skip connections.

    On a CPU, GroupNorm stays torch's own, which is twice as fast as what inductor makes of it.
    """

    name = "regions"

    def __init__(self, channels_last: bool = False) -> None:
        self.channels_last = self.defer_bias = channels_last

    def group_norm(self, parts: Parts, norm: Norm, shift: Tensor | None = None, silu: bool = True) -> Tensor:  # noqa: D102
        x = reference.joined(parts)
        if x.device.type == "cpu" or not silu or not _complete(norm) or x.shape[2:].numel() == 1:
            return super().group_norm((x,), norm, shift, silu)
        if shift is not None:
            x = x + shift[:, :, None, None]
        n, c = x.shape[:2]
        shape = (n * norm.groups, c // norm.groups)
        weight, bias, eps = _affine(norm)
        scale, offset = weight.expand(n, c).reshape(shape), bias.expand(n, c).reshape(shape)
        return GROUP_NORM_SILU(x.contiguous().view(*shape, -1), scale, offset, eps).view(x.shape)

    def bias_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:  # noqa: D102
        if bias is None or not self.channels_last or x.numel() == x.shape[1]:
            return super().bias_add(x, bias, residual)
        n, _, h, w = x.shape
        y = BIAS_ADD(_image_rows(x), _uniform(bias), _image_rows(residual))
        return y.view(n, h, w, -1).permute(0, 3, 1, 2)

    def query_key_value(  # noqa: D102
        self, stream: Stream, norm: Norm, q: Weights, k: Weights, v: Weights
    ) -> tuple[Stream, Tensor, Tensor, Tensor]:
        with_bias = q.bias is not None or k.bias is not None or v.bias is not None
        if not _complete(norm) or with_bias or _is_one_row(stream.value):
            return super().query_key_value(stream, norm, q, k, v)
        x = stream.settled()
        out = QUERY_KEY_VALUE(_rows(x), *_affine(norm), *(_uniform(p.weight) for p in (q, k, v)))
        return Stream(x), *(t.view(*x.shape[:-1], -1) for t in out)

    def cross_query(self, a: Tensor, stream: Stream, out: Weights, norm: Norm, q: Weights) -> tuple[Stream, Tensor]:  # noqa: D102
        if not _complete(norm, out) or q.bias is not None or _is_one_row(stream.value):
            return super().cross_query(a, stream, out, norm, q)
        x = stream.settled()
        y, query = CROSS_QUERY(_rows(a), _rows(x), *_layer(out), *_affine(norm), _uniform(q.weight))
        return Stream(y.view(x.shape)), query.view(*x.shape[:-1], -1)

    def feed_forward(self, a: Tensor, stream: Stream, out: Weights, norm: Norm, up: Weights, down: Weights) -> Stream:  # noqa: D102
        if not _complete(norm, out, up, down) or _is_one_row(stream.value):
            return super().feed_forward(a, stream, out, norm, up, down)
        x = stream.settled()
        y = FEED_FORWARD(_rows(a), _rows(x), *_layer(out), *_affine(norm), *_layer(up), *_layer(down))
        return Stream(y.view(x.shape))


def graphs() -> int:
    """How many region graphs this process has compiled."""
    return sum(region.graphs for region in ALL)


def misses() -> int:
    """Calls whose guards failed since the process started; they ran uncompiled and right."""
    return sum(region.misses for region in ALL)
