"""Idioms over [batch, tokens, channels] with a second stream of tokens, several heads, or a table for all of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import CHANNELS, HALF, HEADS, tokens

EACH = CHANNELS // HEADS  # channels per head


def _text(model: Any, vector: Tensor) -> Tensor:
    """Two more tokens [batch, 2, channels]."""
    return model.modulate(vector).unflatten(-1, (2, CHANNELS))


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def _table(model: Any, number: int, a: Tensor) -> Tensor:
    """Flux's [1, 1, tokens, channels per pair of head, 2, 2]."""
    place = torch.arange(a.shape[1], dtype=torch.float32, device=a.device)
    omega = 1.0 / 10 ** (torch.arange(0, EACH, 2, dtype=torch.float32, device=a.device) / EACH)
    angle = place[:, None] * omega
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    return turn.unflatten(-1, (2, 2))[None, None]


def _turned(x: Tensor, table: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    out = table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]
    return out.reshape(x.shape).type_as(x)


@tokens
def joint_attention(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    t = _text(model, vector)
    q, k, v = (torch.cat([model.lins[i](t), model.lins[i](x)], 1) for i, x in enumerate((a, b, a)))
    o = F.scaled_dot_product_attention(_heads(q), _heads(k), _heads(v)).transpose(1, 2).flatten(2)
    text, picture = o[:, :2], o[:, 2:]
    return a + model.lins[3](picture) * (1 + text.mean(1, keepdim=True))


@tokens
def turned_heads(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    table = _table(model, number, a)
    q, k = (F.rms_norm(_heads(model.lins[number % 4](x)), (EACH,), model.norms[number % 3][:EACH]) for x in (a, b))
    o = F.scaled_dot_product_attention(_turned(q, table), _turned(k, table), _heads(b))
    return o.transpose(1, 2).reshape(a.shape)


@tokens
def turned_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    table = _table(model, number, a).transpose(1, 2)
    return _turned(a.unflatten(-1, (HEADS, -1)), table).flatten(2) * b


@tokens
def three_projections(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.layer_norm(a, (CHANNELS,))
    q, k, v = model.lins[0](x), model.lins[1](x), model.lins[2](x)
    return F.rms_norm(q, (CHANNELS,), model.norms[0]) * F.rms_norm(k, (CHANNELS,), model.norms[1]) + v * b


@tokens
def projections_of_a_vector(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    v = F.silu(vector)
    shift, scale = model.modulate(v).unsqueeze(1).chunk(2, -1)
    return F.layer_norm(a, (CHANNELS,)) * (1 + scale) + shift + model.embed(v)[:, None] * b


@tokens
def table_of_modulation(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    table = torch.stack([model.norms[0], model.norms[1]])[None, None] * 0.1
    each = (table + model.modulate(vector).reshape(len(a), 1, 2, -1)).unbind(2)
    return F.rms_norm(a, (CHANNELS,)) * (1 + each[0]) + each[1] * b


@tokens
def modulated_per_token(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    scale, gate = model.wide[number % 2](b).chunk(2, -1)
    x = F.layer_norm(a, (CHANNELS,)) * (1 + scale)
    return a + model.lins[number % 4](x) * gate.tanh()


@tokens
def modulated_in_two_parts(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    scale, shift = model.modulate(vector).unsqueeze(1).chunk(2, -1)
    t = a.shape[1] // 2
    x = F.layer_norm(a, (CHANNELS,))
    return torch.cat([x[:, :t] * (1 + scale), x[:, t:] * (1 + shift)], 1) + b


@tokens
def slices_modulated_in_place(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    scale, shift = model.modulate(vector).unsqueeze(1).chunk(2, -1)
    x, t = F.rms_norm(a, (CHANNELS,), model.norms[0]), a.shape[1] // 2
    for part, factor in ((slice(0, t), scale), (slice(t, None), shift)):
        x[:, part].mul_(1 + factor).add_(b[:, part])
    return x


@tokens
def shared_keys(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    q, k, v = _heads(a), b[:, None, :, :EACH], b[:, None, :, EACH:]
    k, v = (x.repeat_interleave(HEADS, 1) if number % 2 else x.expand(-1, HEADS, -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(a.shape)


@tokens
def attention_to_text(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    k, v = (model.lins[i](_text(model, vector)) for i in (0, 1))
    mask = torch.zeros(len(a), 1, 1, 2, dtype=a.dtype, device=a.device)
    mask[..., 1] = -1.5
    o = F.scaled_dot_product_attention(_heads(a), _heads(k), _heads(v), mask)
    return model.lins[number % 4](o.transpose(1, 2).flatten(2)) + b


@tokens
def text_before_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    t = _text(model, vector)
    x = torch.cat((t, a), 1)
    shift, scale, gate, _ = model.wide[number % 2](model.embed(vector)).unsqueeze(1).chunk(4, -1)
    y = F.layer_norm(x, (CHANNELS,))
    y[..., :HALF] = (1 + scale) * y[..., :HALF] + shift
    x = x + torch.cat([gate, gate], -1) * model.lins[number % 4](y)
    return x[:, t.shape[1] :, ...] * b


@tokens
def single_block(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    qkv, up = torch.cat([model.wide[0](a), model.lins[0](a)], -1).split((2 * CHANNELS, CHANNELS), -1)
    q, k = qkv.unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
    return a + F.linear(torch.cat((o, F.gelu(up, approximate="tanh")), 2), torch.cat([model.lins[1].weight] * 2, 1))


@tokens
def turned_in_place(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x, c, s = a.clone(), b[..., :HALF].cos(), b[..., :HALF].sin()
    first, second = x[..., :HALF], x[..., HALF:]
    kept = first.clone()
    first.mul_(c).addcmul_(second, s, value=-1)
    second.mul_(c).addcmul_(kept, s)
    return x


@tokens
def turned_by_cat(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    q = _heads(a)
    c, s = (torch.cat([x, x], -1)[:, None] for x in (b[..., : EACH // 2].cos(), b[..., : EACH // 2].sin()))
    half = torch.cat((-q[..., EACH // 2 :], q[..., : EACH // 2]), -1)
    return (q * c + half * s).transpose(1, 2).flatten(2)


@tokens
def gate_per_head(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    gates = model.lins[number % 4](b)[..., :HEADS].sigmoid() * 2
    return (a.unflatten(-1, (HEADS, EACH)) * gates.unsqueeze(-1)).reshape(a.shape)


@tokens
def patches_of_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    t = a.shape[1]
    x = F.pad(a, (0, 0, 0, -t % 2)).unflatten(1, (-1, 2)).flatten(2)
    x = F.silu(x) * x.mean(-1, keepdim=True)
    return x.unflatten(-1, (2, CHANNELS)).flatten(1, 2).narrow(1, 0, t) + b


@tokens
def near_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.pad(a, (0, 0, 1, 1)).unfold(1, 3, 1)  # [batch, tokens, channels, 3]
    return (x * torch.softmax(x, -1)).sum(-1) + b


@tokens
def only_earlier_tokens(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    t = a.shape[1]
    if number % 2:
        o = F.scaled_dot_product_attention(_heads(a), _heads(b), _heads(b), is_causal=True)
    else:
        later = torch.ones(t, t, dtype=torch.bool, device=a.device).tril()
        o = F.scaled_dot_product_attention(_heads(a), _heads(b), _heads(b), later)
    return o.transpose(1, 2).flatten(2)


@tokens
def filters_of_one_step(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    experts = model.lins[0](b).softmax(-1)[..., :2]
    both = torch.stack([model.lins[1](a), model.lins[2](a)], -1)
    return torch.matmul(both, experts.unsqueeze(-1)).squeeze(-1)


@tokens
def batched_product(model: Any, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    w = torch.baddbmm(a.new_zeros(len(a), a.shape[1], a.shape[1]), a, b.transpose(1, 2), beta=0, alpha=0.1)
    return torch.bmm(w.softmax(-1), b) + torch.addmm(model.norms[0], a.flatten(0, 1), model.lins[0].weight).view_as(a)
