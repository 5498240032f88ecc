"""The fused operations as symbolic-size regions: what runs where there is no Triton.

Every argument is brought into a form in which no dimension is ever 1 for a real model: a batch is merged with the
tokens or with the groups, and attention itself stays outside, with whatever backend the user chose. So a handful of
graphs serve every size, batch, context length and channel count of one dtype, and batch 1 needs none of its own.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels import reference
from .ops import FusedOps, GatedStream, Heads, Modulation, Norm, Stream, Weights
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


def _modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: Tensor) -> Tensor:  # [T, C], [C], [C], []
    return _normalise(x.float(), (-1,), eps) * (1 + scale.float()) + shift.float()


def _modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, eps: Tensor) -> Tensor:
    return _modulate(x, shift, scale, eps).to(x.dtype)


def _gated_norm(x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: Tensor) -> tuple:
    x = x + gate * branch
    return x, _modulate(x, shift, scale, eps).to(x.dtype)


def _rotary(
    q: Tensor,  # [T, H, D]
    k: Tensor,
    query_scale: Tensor,  # [D]
    key_scale: Tensor,
    own: Tensor,  # [T, D]: what each channel keeps of itself
    other: Tensor,  # [T, D]: and takes of its neighbour
    neighbours: Tensor,  # [D], int64
    eps: Tensor,
) -> tuple:
    out = []
    for x, scale in ((q, query_scale), (k, key_scale)):
        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * scale.float()
        y = n * own[:, None] + n.index_select(-1, neighbours) * other[:, None]
        out.append(y.to(x.dtype))
    return tuple(out)


def _linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:  # [R, C]
    return F.gelu(F.linear(x, w, b), approximate="tanh")


QUERY_KEY_VALUE = Region(_query_key_value)
CROSS_QUERY = Region(_cross_query)
FEED_FORWARD = Region(_feed_forward)
GROUP_NORM_SILU = Region(_group_norm_silu)
BIAS_ADD = Region(_bias_add)
MODULATED_NORM = Region(_modulated_norm)
GATED_NORM = Region(_gated_norm)
ROTARY = Region(_rotary)
LINEAR_GELU = Region(_linear_gelu)
ALL = (
    QUERY_KEY_VALUE, CROSS_QUERY, FEED_FORWARD, GROUP_NORM_SILU, BIAS_ADD,
    MODULATED_NORM, GATED_NORM, ROTARY, LINEAR_GELU,
)  # fmt: skip


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


def _scalar(value: float, like: Tensor) -> Tensor:
    return like.new_full((), value, dtype=torch.float32)


def _images(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors [B, ...] of each image, contiguous. A batch of its own would need a graph for batch 1."""
    return zip(*((image.contiguous() for image in tensor) for tensor in tensors), strict=True)


def _batch(images: list[Tensor]) -> Tensor:
    return images[0][None] if len(images) == 1 else torch.stack(images)


def _centring(x: Tensor, groups: int, shift: Tensor | int) -> Tensor:
    """``shift`` less the mean of each group of x + shift [N, C, H, W], as [N, C]: the norm is the same without it.

    On a CPU torch's GroupNorm in channels_last takes the variance as the mean square less the squared mean, of which
    nothing is left where the mean is far above the spread: a plain white picture.
    """
    shift = (x.new_zeros(x.shape[:2]) + shift).unflatten(1, (groups, -1))
    mean = x.mean((2, 3)).unflatten(1, (groups, -1)) + shift
    return (shift - mean.mean(2, keepdim=True)).flatten(1)


def _affine(norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    return _uniform(norm.weight), _uniform(norm.bias), _scalar(norm.eps, norm.weight)


def _layer(weights: Weights) -> tuple[Tensor, Tensor]:
    return _uniform(weights.weight), _uniform(weights.bias)


class RegionOps(FusedOps):
    """See ``FusedOps``: a transformer's parts between attentions, GroupNorm with SiLU, and skip connections.

    On a CPU, GroupNorm stays torch's own, which is twice as fast as what inductor makes of it.
    """

    name = "regions"

    def __init__(self, channels_last: bool = False) -> None:
        self.channels_last = self.defer_bias = channels_last

    def group_norm(  # noqa: D102
        self, x: Tensor, norm: Norm, shift: Tensor | None = None, silu: bool = True, pending: tuple[Tensor, ...] = ()
    ) -> Tensor:
        if x.device.type == "cpu" and self.channels_last:
            centred = _centring(x, norm.groups, sum(pending, 0 if shift is None else shift))
            return super().group_norm(x, norm, centred, silu)
        if x.device.type == "cpu" or not silu or not _complete(norm) or x.shape[2:].numel() == 1:
            return super().group_norm(x, norm, shift, silu, pending)
        if shift is not None or pending:
            x = x + sum(pending, 0 if shift is None else shift).expand(len(x), -1)[:, :, None, None]
        n, c = x.shape[:2]
        shape = (n * norm.groups, c // norm.groups)
        weight, bias, eps = _affine(norm)
        scale, offset = weight.expand(n, c).reshape(shape), bias.expand(n, c).reshape(shape)
        return GROUP_NORM_SILU(x.contiguous().view(*shape, -1), scale, offset, eps).view(x.shape)

    def bias_add(  # noqa: D102
        self, x: Tensor, bias: Tensor | None, residual: Tensor, residual_bias: Tensor | None = None
    ) -> Tensor:
        if bias is None or not self.channels_last or x.numel() == x.shape[1]:
            return super().bias_add(x, bias, residual, residual_bias)
        if residual_bias is not None:  # the two biases go together: a region takes one
            bias = bias + residual_bias
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

    def modulated_norm(self, stream: GatedStream, modulation: Modulation) -> tuple[GatedStream, Tensor]:  # noqa: D102
        if stream.finite or stream.value.shape[1] == 1:  # fp16 with its clamp, and a single token, run in plain torch
            return super().modulated_norm(stream, modulation)
        m, eps = modulation, _scalar(modulation.eps, stream.value)
        if stream.branch is None:
            normed = [MODULATED_NORM(*image, eps) for image in _images(stream.value, m.shift, m.scale)]
            return stream, _batch(normed)
        images = _images(stream.value, stream.branch, stream.gate, m.shift, m.scale)
        totals, normed = zip(*(GATED_NORM(*image, eps) for image in images), strict=True)
        return GatedStream(_batch(totals)), _batch(normed)

    def _rotary_part(self, part: Heads, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if part.qkv.shape[1] == 1:
            return super()._rotary_part(part, rotation)
        scales, eps = (_uniform(part.query_scale), _uniform(part.key_scale)), _scalar(part.eps, part.qkv)
        q, k, v = part.qkv.unflatten(-1, (3, -1, part.query_scale.shape[0])).unbind(2)  # [B, T, H, D]
        own, other, neighbours = _planes(rotation.expand(q.shape[0], *rotation.shape[1:]))
        each = [ROTARY(q, k, *scales, a, b, neighbours, eps) for q, k, a, b in _images(q, k, own, other)]
        q, k = (_batch(list(images)) for images in zip(*each, strict=True))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def linear_gelu(self, x: Tensor, layer: Weights) -> Tensor:  # noqa: D102
        if layer.bias is None or _is_one_row(x):
            return super().linear_gelu(x, layer)
        return LINEAR_GELU(_rows(x), *_layer(layer)).view(*x.shape[:-1], -1)


def _planes(rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotations [B, 1, T, D / 2, 2, 2] as (own, other) [B, T, D], and the neighbour of each channel [D].

    So that a region needs no pairs: channel c of the result is own * x[c] + other * x[neighbour of c].
    """
    matrices = rotation[:, 0]
    own, other = matrices.diagonal(dim1=-2, dim2=-1), matrices.flip(-1).diagonal(dim1=-2, dim2=-1)
    channels = torch.arange(own.shape[-2] * 2, device=rotation.device)
    return own.flatten(-2), other.flatten(-2), channels + 1 - 2 * (channels % 2)


def graphs() -> int:
    """How many region graphs this process has compiled."""
    return sum(region.graphs for region in ALL)


def misses() -> int:
    """Calls whose guards failed since the process started; they ran uncompiled and right."""
    return sum(region.misses for region in ALL)
