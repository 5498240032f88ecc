"""Idioms over [batch, channels, length]: models of sound and their VAEs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import CHANNELS, GROUPS, HALF, HEADS, sounds


def _weight(model: Any, number: int) -> Tensor:
    return model.convs[number % 3].weight[..., 1]  # [channels, channels, 3]


@sounds
def sound_block(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.conv1d(F.silu(model.groups[number % 2](a)), _weight(model, number), model.convs[0].bias, padding=1)
    return a + x * (1 + model.embed(vector)[..., None])


@sounds
def snake(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    alpha = model.norms[number % 3][None, :, None]
    return a + (1 / (alpha + 1e-9)) * torch.sin(a * alpha).pow(2) + b


@sounds
def dilated(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.conv1d(F.elu(a), _weight(model, number), padding=2, dilation=2) + b


@sounds
def causal_sound(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.conv1d(F.pad(a, (2, 0)), _weight(model, number)) * b


@sounds
def mirrored(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.pad(a, (1, 1), mode="replicate")
    return F.conv1d(x, _weight(model, number)[:, :1], model.convs[1].bias, groups=CHANNELS) + b


@sounds
def transposed(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.conv_transpose1d(a, _weight(model, number), stride=2, padding=1, output_padding=1)
    return x[..., ::2] + x[..., 1::2] * b


@sounds
def doubled(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.interpolate(a, scale_factor=2.0, mode="nearest") * 1.5
    return F.avg_pool1d(x, 2) + b


@sounds
def sound_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.layer_norm(a.mT, (CHANNELS,), model.norms[0], model.norms[1])
    y, gate = model.wide[number % 2](x).chunk(2, -1)
    return (model.lins[number % 4](y * F.silu(gate))).mT + b


@sounds
def sound_attention(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    laid = torch.contiguous_format  # torch's kernels refuse an odd stride, even along what is 1
    q, k = (x.unflatten(1, (HEADS, -1)).transpose(2, 3).clone(memory_format=laid) for x in (a, b))
    return F.scaled_dot_product_attention(q, k, k).transpose(2, 3).flatten(1, 2)


@sounds
def gated_sound(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = torch.cat([a, b], 1)
    p, q = F.group_norm(x, GROUPS).chunk(2, 1)
    return p.tanh() * q.sigmoid()


@sounds
def samples_folded(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    n = a.shape[-1]
    x = F.pad(a, (0, -n % 2)).unflatten(-1, (-1, 2)).permute(0, 3, 1, 2).flatten(1, 2) + 0.5
    return x.unflatten(1, (2, -1)).permute(0, 2, 3, 1).flatten(2)[..., :n] * b


@sounds
def written_samples(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = torch.zeros_like(a)
    y[:, :HALF, ::2] = a[:, :HALF, ::2]
    y[:, HALF:] += b[:, HALF:] * 2
    y[..., -1] = a[..., 0]
    return y


@sounds
def overlapped(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.pad(a, (1, 1))
    return x[..., :-2] * 0.25 + x[..., 1:-1] * 0.5 + x[..., 2:] * 0.25 - b


@sounds
def loudness(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a / (a.abs().amax((1, 2), keepdim=True) + 1) + b.pow(2).mean(1, keepdim=True).sqrt()
