"""Idioms over [batch, tokens, channels]: transformers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import CHANNELS, GROUPS, HALF, HEADS, tokens


@tokens
def modulated(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    scale, shift = model.modulate(vector).chunk(2, -1)
    return a * (1 + scale[:, None]) + shift[:, None]


@tokens
def gated_residual(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return torch.addcmul(a, model.embed(vector).unsqueeze(1).tanh(), b)


@tokens
def swiglu(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x, gate = model.wide[number % 2](a).chunk(2, -1)
    return x * F.silu(gate)


@tokens
def rms_norm(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.rms_norm(a, (CHANNELS,), model.norms[number % 3], 1e-6)


@tokens
def rms_norm_by_hand(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1e-6)


@tokens
def layer_norm(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    weights = (model.norms[number % 3], model.norms[0]) if number % 2 else (None, None)
    return F.layer_norm(a, (CHANNELS,), *weights, 1e-6)


@tokens
def norm_of_heads(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = a.reshape(*a.shape[:2], HEADS, -1).transpose(1, 2)
    return (F.rms_norm(x, x.shape[-1:]) * 2 + 1).transpose(1, 2).reshape(a.shape)


@tokens
def rotary(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x, cos, sin = a.reshape(*a.shape[:2], HALF, 2), torch.cos(b[..., :HALF]), torch.sin(b[..., :HALF])
    return torch.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], -1).flatten(-2)


@tokens
def rotary_of_halves(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x, y = a.chunk(2, dim=-1)
    return a * torch.cos(b) + torch.cat([-y, x], -1) * torch.sin(b)


@tokens
def attention(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in (a, b, a))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(a.shape)


@tokens
def stream_apart(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.silu(torch.cat([a, b], 1)) + 1
    return x[:, a.shape[1] :] + x[:, : a.shape[1]]


@tokens
def some_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    middle = a.shape[1] // 2
    return torch.cat([a[:, :middle] * 2, b[:, middle:]], 1)


@tokens
def written_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y, middle = torch.zeros_like(a), a.shape[1] // 2
    y[:, : middle + 1] = a[:, : middle + 1]
    y[..., 3:5] += b[..., 3:5]
    return y


@tokens
def written_channels(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = torch.empty_like(a)
    y[..., :HALF], y[..., HALF:] = a[..., HALF:], b[..., :HALF]
    y[..., :HALF].mul_(b[..., HALF:])
    return y


@tokens
def turned_around(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return (a.transpose(1, 2).contiguous() * 1.5).transpose(1, 2) + torch.roll(b, 1, 1)


@tokens
def repeated(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a[:, :1].repeat_interleave(a.shape[1], 1) + b - b.mean(1, keepdim=True)


@tokens
def vector_into_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y[:, -1:] = model.embed(vector)[:, None]
    y[:, :1] += b[:, :1]
    return y


@tokens
def vector_over_all(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = torch.empty_like(a)
    y.copy_(model.embed(vector)[:, None])
    y[..., :4] = b[..., 4:8]
    return y * a


@tokens
def complex_rotary(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = torch.view_as_complex(a.float().reshape(*a.shape[:2], HALF, 2).contiguous())
    angles = b[..., :HALF].float()
    return torch.view_as_real(x * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(a.dtype)


@tokens
def heads_unbound(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    q, k = model.wide[number % 2](a).view(*a.shape[:2], 2, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    o = F.scaled_dot_product_attention(q, F.layer_norm(k, k.shape[-1:]), k)
    return o.transpose(1, 2).flatten(2) + b


@tokens
def attention_by_hand(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    q, k = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (a, b))
    w = (q @ k.transpose(-1, -2) * 0.25).softmax(-1)
    return (w @ k).transpose(1, 2).flatten(2)


@tokens
def masked_attention(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    q, k = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (a, b))
    mask = (b[..., 0] * 2)[:, None, None].expand(-1, HEADS, a.shape[1], -1)
    return F.scaled_dot_product_attention(q, k, k, mask).transpose(1, 2).flatten(2)


@tokens
def einsum(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    w = torch.einsum("btc,bsc->bts", a, b) / 32
    return torch.einsum("bts,bsc->btc", w.tanh(), b)


@tokens
def positions(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    place, each = (torch.arange(n, dtype=torch.float32, device=a.device) for n in (a.shape[1], HALF))
    p = place[:, None] * torch.exp(-each / HALF)[None]
    return a + torch.cat([p.cos(), p.sin()], -1)[None].to(a.dtype) * b


@tokens
def windows(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    t = a.shape[1]
    pad = -t % 4
    x = F.pad(a, (0, 0, 0, pad)).unflatten(1, (-1, 4))
    x = F.layer_norm(x, (CHANNELS,)) + x.mean(2, keepdim=True)
    return x.flatten(1, 2)[:, :t] + b


@tokens
def windows_shuffled(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    t = a.shape[1]
    pad = -t % 2
    x = F.pad(a, (0, 0, 0, pad)).unflatten(1, (2, -1)).transpose(1, 2).reshape(a.shape[0], -1, CHANNELS)
    return model.lins[number % 4](x)[:, :t] * b


@tokens
def two_halves_in_memory(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.new_zeros(*a.shape[:2], 2, HALF)
    y[:, :, 0] = a[..., :HALF]
    y[:, :, 1] = b[..., HALF:]
    y[:, :, 1] *= 2
    return y.flatten(2)


@tokens
def interleaved_in_memory(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = torch.empty_like(a)
    y[..., ::2] = a[..., :HALF]
    y[..., 1::2] = b[..., :HALF]
    return y


@tokens
def tokens_written_in_steps(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = torch.zeros_like(a)
    mid = a.shape[1] // 2
    y[:, :mid].copy_(a[:, :mid]).mul_(2)
    y[:, mid:].copy_(b[:, mid:]).add_(1)
    y[:, :1] = y[:, -1:]
    return y


@tokens
def over_and_over(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    for i in range(4):
        y[..., i * 8 : (i + 1) * 8] = y[..., i * 8 : (i + 1) * 8] * (i + 1) + b[..., :8]
    return y


@tokens
def gather(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    order = torch.arange(a.shape[1] - 1, -1, -1, device=a.device)
    return a[:, order] + torch.index_select(b, 1, order)


@tokens
def sorted_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    order = b[..., 0].argsort(1)[..., None].expand_as(a)
    x = a.gather(1, order) * 2
    return torch.zeros_like(a).scatter(1, order, x)


@tokens
def wide_cat(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = torch.cat([a, model.embed(vector)[:, None].expand(-1, a.shape[1], -1)], -1)
    x = F.layer_norm(x, x.shape[-1:])
    return F.silu(x[..., :CHANNELS]) * x[..., CHANNELS:]


@tokens
def group_norm_of_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.group_norm(a.transpose(1, 2), GROUPS).transpose(1, 2) + b


@tokens
def gates_of_parts(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    g = model.modulate(vector)[:, None].unflatten(-1, (4, HALF)).unbind(2)
    x = torch.cat([a[..., :HALF] * g[0] + g[1], a[..., HALF:] * g[2]], -1)
    return x + b * torch.cat([g[3], g[0]], -1)


@tokens
def partial_rotary(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    r, p = a[..., :HALF], a[..., HALF:]
    x, y = r.chunk(2, -1)
    c, s = b[..., : HALF // 2].cos(), b[..., : HALF // 2].sin()
    return torch.cat([x * c - y * s, y * c + x * s, p], -1)


@tokens
def residual_in_place(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = model.lins[number % 4](a)
    x += b
    x[:, :1] -= a[:, :1]
    return x


@tokens
def repeat_interleaved_heads(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    k = a[..., :HALF].unflatten(-1, (1, HALF)).repeat_interleave(2, 2).flatten(2)
    return k * b


@tokens
def turned_where_they_lie(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    q, k, v = torch.cat([model.wide[number % 2](a), model.lins[number % 4](b)], -1).split(CHANNELS, -1)
    q, k, v = (x.view(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    q.mul_(b.tanh().unflatten(-1, (HEADS, -1)))
    k.add_(q if number % 2 else 1).tanh_()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v.clone()))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(a.shape)


@tokens
def some_heads_written(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    heads = model.wide[number % 2](a).unflatten(-1, (2 * HEADS, -1))
    first, rest = heads[:, :, :HEADS], heads[:, :, HEADS:]
    first.transpose(1, 2).mul_(model.embed(vector).tanh().view(-1, 1, HEADS, HALF).transpose(1, 2)).sub_(1)
    return first.flatten(2) * 2 + rest.flatten(2) + b
