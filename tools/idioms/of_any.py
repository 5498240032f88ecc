"""Idioms over tensors of any form: [batch, ..., channels] as well as [batch, channels, ...]."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import any_kind

ACTIVATIONS = (F.mish, F.softplus, F.hardswish, F.elu, F.leaky_relu, torch.tanh, F.logsigmoid, F.relu6, torch.square)


@any_kind
def add(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a + b


@any_kind
def gated(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * torch.sigmoid(b)


@any_kind
def chosen(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return torch.where(a > b, a.clamp(-1, 1), b * 0.5)


@any_kind
def in_16_bits(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return (F.silu(a.bfloat16()) * b.bfloat16()).to(a.dtype)


@any_kind
def in_place(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y.add_(b)
    return y.mul_(1.5)


@any_kind
def first_row(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y[:, 0] = b[:, 0]
    y[:, 0].add_(1)
    return y + y[:, -1:]


@any_kind
def view_before_a_write(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a + 1
    view = y[..., :1]
    return y.mul_(2) + view


@any_kind
def written_view(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = (a + 1).contiguous()
    y.view(len(a), -1).mul_(2)
    return y + b


@any_kind
def broadcast_row(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y[:, 1:] = b[:, :1]
    return y


@any_kind
def masked(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a * 1.1
    y.masked_fill_(b > 1.5, -0.5)
    return y + b


@any_kind
def activation(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return ACTIVATIONS[number % len(ACTIVATIONS)](a) + b


@any_kind
def lerped(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return torch.lerp(a, b, 0.3).nan_to_num_().addcmul_(a, b, value=0.1)


@any_kind
def compared_with(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return torch.maximum(a, b) * (a * a > 1e-9).to(a.dtype) + torch.erf(b) * torch.log1p(a.abs())


@any_kind
def batches_joined(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = torch.cat([a, b], 0)
    x = x * torch.sigmoid(x)
    p, q = x.chunk(2)
    return p + q * 0.5


@any_kind
def stacked(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = torch.stack([a, b], 1).flatten(0, 1) * 1.5 + 1
    x = x.unflatten(0, (-1, 2))
    return x[:, 0] - x[:, 1]


@any_kind
def scale_by_mean(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a * (b.mean(1, keepdim=True) + 1) / (a.std(1, keepdim=True, unbiased=False) + 1)


@any_kind
def normalised(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.normalize(a, dim=-1 if number % 2 else 1) * b


@any_kind
def flipped(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a.flip(1) + torch.roll(b, (1, 2), (1, 2))


@any_kind
def lies_otherwise(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = a.transpose(1, 2).contiguous().transpose(1, 2)
    y = x + 1
    y[:, :1] *= b[:, :1]
    return y * b


@any_kind
def unequal_parts(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    n = a.shape[1]
    first, rest = a.split((n - n // 2, n // 2), 1)
    return torch.cat([rest * 2, first.tanh()], 1) + b


@any_kind
def swapped_in_place(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a * 1.2
    y[:, :1], y[:, -1:] = y[:, -1:].clone(), y[:, :1].clone()
    y[..., -1:] += y[..., :1]
    return y * b


@any_kind
def view_of_a_view(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = torch.cat([a, b], 1)
    inner = y[:, 1:][..., :1]
    inner.clamp_(-1, 0.5).mul_(2)
    return y[:, : a.shape[1]] + y[:, -a.shape[1] :]


@any_kind
def given_out(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = torch.empty_like(b)
    torch.mul(a, b, out=y)
    z = torch.add(y, a, alpha=0.5)
    torch.sigmoid(z, out=y)
    return y + z


@any_kind
def other_dtype_copied(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = torch.empty_like(a)
    y.copy_(a.double() + 1)
    y[:, :1].copy_((b[:, :1] > 0).float())
    return y - b


@any_kind
def logical(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    inside = (a > 0) & ~(b > 0.5) | (a < -1)
    return a.masked_fill(inside, 0.25) + inside.to(a.dtype) * torch.where(inside.logical_not(), 1.0, b)


@any_kind
def softmaxes(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a.softmax(-1) * 4 + b.float().softmax(1).to(b.dtype) + (a - a.amax(1, keepdim=True)).exp()


@any_kind
def summed_up(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a.cumsum(1) * 0.1 + b.sum((0, 1), keepdim=True) * 0.01


@any_kind
def moments(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    dims = tuple(range(1, a.ndim))
    var, mean = torch.var_mean(a.float(), dims, keepdim=True, correction=0)
    return ((a.float() - mean) * torch.rsqrt(var + 1e-3)).to(a.dtype) * b


@any_kind
def constants(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    scale = torch.tensor([0.5, 1.5], device=a.device, dtype=a.dtype)
    y = torch.full_like(a, 0.5)
    y[:, ::2] = scale[1]
    return torch.addcdiv(a * scale[0], y, b.abs() + 1) - a.new_ones(a.shape[-1]) * 0.5


@any_kind
def stacked_otherwise(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    rows = torch.stack([a, b, a * b], 0).unbind(0)
    x = torch.stack([rows[2], rows[0]], -1)
    return x[..., 0] + torch.einsum("...i,i->...", x, x.new_tensor([0.5, 2.0])) + rows[1]


@any_kind
def repeated_rows(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    rest = (1,) * (a.ndim - 1)
    x = a[:1].repeat(len(a), *rest) + b[:, :1].expand(*b.shape).contiguous()
    x[-1:] *= 2
    return x


@any_kind
def each_row_by_itself(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return torch.cat([row * (i + 1) + b[i] for i, row in enumerate(a)], 0).view_as(a)


@any_kind
def put_at_places(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y, places = a.clone(), torch.arange(0, a.shape[1], 2, device=a.device)
    y[:, places] = b[:, places] * 2
    return y.index_add(1, places, a[:, places])


@any_kind
def guided(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = b + (a - b) * 4.5
    x = x * (a.std(tuple(range(1, a.ndim)), keepdim=True, unbiased=False) + 1e-2)
    return 0.7 * x + 0.3 * a
