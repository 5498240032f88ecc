"""Idioms over [batch, channels, frames, height, width]: VAEs of videos."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import CHANNELS, HALF, HEADS, videos


def _along(model: Any, number: int, x: Tensor) -> Tensor:
    return F.conv3d(x, model.videos[number % 2].weight, model.convs[0].bias, padding=(0, 1, 1))


@videos
def causal_conv(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = torch.cat([a[:, :, :1], a[:, :, :1], a], 2)
    return _along(model, number, x) + b


@videos
def zero_causal_conv(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.conv3d(F.pad(F.silu(a), (1, 1, 1, 1, 2, 0)), model.videos[number % 2].weight)


@videos
def video_res_block(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.silu(F.normalize(a, dim=1) * 32**0.5 * model.norms[number % 3][:, None, None, None])
    return a + model.videos[number % 2](x)


@videos
def frames_conv(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = a.transpose(1, 2).flatten(0, 1)
    x = model.convs[number % 3](F.silu(model.groups[0](x)))
    return x.unflatten(0, (len(a), -1)).transpose(1, 2) + b


@videos
def frames_up(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = a.transpose(1, 2).flatten(0, 1)
    x = model.down(F.interpolate(x, scale_factor=2.0, mode="nearest-exact"))
    return x.unflatten(0, (len(a), -1)).transpose(1, 2) * b


@videos
def frames_doubled(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = torch.stack([a, b], 3).flatten(2, 3)
    return x[:, :, ::2] + x[:, :, 1::2] * 0.5


@videos
def frames_attend(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = a.permute(0, 2, 3, 4, 1).flatten(0, 1).flatten(1, 2)
    q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    o = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
    B, C, T, H, W = a.shape
    return model.lins[number % 4](o).view(B, T, H, W, C).permute(0, 4, 1, 2, 3) + b


@videos
def video_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.layer_norm(a.flatten(2).transpose(1, 2), (CHANNELS,))
    s, g = model.modulate(vector).chunk(2, -1)
    return (x * (1 + s[:, None]) + g[:, None]).transpose(1, 2).unflatten(-1, a.shape[2:]) + b


@videos
def first_frame(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y[:, :, :1] = b[:, :, :1] * 2
    y[:, :, -1:] += a[:, :, :1]
    return y


@videos
def video_group_norm(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.silu(model.groups[number % 2](a)) * b


@videos
def part_of_video(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return torch.cat([a[:, :HALF], F.silu(b[:, HALF:])], 1) + model.embed(vector)[:, :, None, None, None]


@videos
def cached_frames(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    out, cache = [], torch.zeros_like(a[:, :, :1]).repeat(1, 1, 2, 1, 1)
    for i in range(a.shape[2]):
        x = torch.cat([cache, a[:, :, i : i + 1]], 2)
        cache = x[:, :, -2:].clone()
        out.append(_along(model, number, x))
    return torch.cat(out, 2) + b


@videos
def video_pooled(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    frames, *sides = a.shape[2:]
    x = F.interpolate(a, size=(frames, *((side + 1) // 2 for side in sides)), mode="trilinear")
    return F.interpolate(x, size=a.shape[2:], mode="nearest") + b


@videos
def unshuffled(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    B, C, T, H, W = a.shape
    x = a.reshape(B, 2, 2, C // 4, T, H, W).permute(0, 3, 4, 5, 1, 6, 2).reshape(B, C // 4, T, H * 2, W * 2) + 0.5
    x = x.view(B, C // 4, T, H, 2, W, 2).permute(0, 4, 6, 1, 2, 3, 5).reshape(B, C, T, H, W)
    return x * b
