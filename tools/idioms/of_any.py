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
