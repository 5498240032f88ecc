"""Idioms over [batch, channels, height, width]: UNets and VAEs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import CHANNELS, GROUPS, HALF, HEADS, pictures


@pictures
def res_block(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = model.convs[number % 3](F.silu(model.groups[0](a))) + model.embed(F.silu(vector))[:, :, None, None]
    return a + model.convs[(number + 1) % 3](F.silu(model.groups[1](x)))


@pictures
def scaled_and_shifted(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    scale, shift = model.modulate(vector)[:, :, None, None].chunk(2, dim=1)
    return F.silu(model.groups[number % 2](a) * (1 + scale) + shift)


@pictures
def skip_connection(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return model.join(F.silu(model.joined(torch.cat([a, b], 1))))


@pictures
def up_and_down(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return model.down(F.interpolate(a, scale_factor=2.0, mode="nearest"))


@pictures
def geglu_of_pixels(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = a.flatten(2).transpose(1, 2)
    y, gate = model.wide[number % 2](F.layer_norm(x, (CHANNELS,))).chunk(2, -1)
    return (model.lins[number % 4](y * F.gelu(gate)) + x).transpose(1, 2).reshape(a.shape)


@pictures
def cropped(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.silu(F.pad(a, (1, 1, 1, 1)))[:, :, 1:-1, 1:-1]


@pictures
def channels_to_pixels(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.pixel_unshuffle(F.pixel_shuffle(a, 2) + 0.5, 2)


@pictures
def some_channels(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y[:, :HALF] = y[:, :HALF] * 1.2
    return (y.permute(0, 2, 3, 1) * 2 + b.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pictures
def vector_over_channels(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y[:, :HALF] = model.embed(vector)[:, :HALF, None, None]
    return y + b


@pictures
def border(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a * 2
    y[:, :, 0] = 0
    y[..., -1:] = b[..., :1]
    return y


@pictures
def pooled(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    even = F.pad(a, (0, a.shape[-1] % 2, 0, a.shape[-2] % 2), mode="replicate")
    return F.interpolate(F.avg_pool2d(even, 2), size=a.shape[-2:], mode="bilinear") + b


@pictures
def depthwise(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.conv2d(a, model.convs[number % 3].weight[:, :1], model.convs[0].bias, padding=1, groups=CHANNELS) + b


@pictures
def pointwise_conv(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.conv2d(F.silu(a), model.convs[number % 3].weight[:, :, 1:2, 1:2], model.convs[1].bias) + b


@pictures
def circular(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    padded = F.pad(a, (1, 1, 1, 1), mode="circular" if number % 2 else "replicate")
    return F.conv2d(padded, model.convs[number % 3].weight)


@pictures
def space_to_depth(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    h, w = a.shape[-2:]
    x = F.pad(a, (0, w % 2, 0, h % 2))
    B, C, H, W = x.shape
    x = x.view(B, C, H // 2, 2, W // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(B, C * 4, H // 2, W // 2) * 1.1
    x = x.view(B, C, 2, 2, H // 2, W // 2).permute(0, 1, 4, 2, 5, 3).reshape(B, C, H, W)
    return x[..., :h, :w] + b


@pictures
def turned_picture(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return (a.transpose(2, 3).contiguous() + 1).transpose(2, 3) * b.rot90(2, (2, 3))


@pictures
def freeu(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.mean(1, keepdim=True)
    y = (y - y.amin((2, 3), True)) / (y.amax((2, 3), True) - y.amin((2, 3), True) + 1)
    x = a.clone()
    x[:, :HALF] = x[:, :HALF] * (y + 1)
    return torch.cat([x, b], 1)[:, HALF:-HALF]


@pictures
def attention_of_pixels(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    q, k = (x.flatten(2).transpose(1, 2).unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (a, b))
    o = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
    return a + o.transpose(1, 2).unflatten(-1, a.shape[-2:])


@pictures
def norm_of_channels(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.silu(F.normalize(a, dim=1) * 32**0.5 * model.norms[number % 3][:, None, None]) + b


@pictures
def layer_norm_of_pixels(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.layer_norm(a.permute(0, 2, 3, 1), (CHANNELS,), model.norms[number % 3], model.norms[0])
    return x.permute(0, 3, 1, 2) * b


@pictures
def conv_of_parts(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = torch.cat([a[:, :HALF], b[:, HALF:]], 1)
    p, q = model.convs[number % 3](x).chunk(2, 1)
    return torch.cat([q, p * torch.sigmoid(q)], 1)


@pictures
def up_to_size(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.interpolate(a[:, :, ::2, ::2], size=a.shape[-2:], mode="nearest") * b


@pictures
def norm_of_a_part(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.group_norm(torch.cat([a[:, :HALF], b[:, :HALF]], 1), GROUPS, model.norms[0], model.norms[1]).relu_()
