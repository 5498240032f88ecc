"""Attention to few keys, as the cross-attention to a prompt: any number of queries and keys. See ``reference``.

The library's kernels are made for long sequences. Here one program goes through all keys of its queries with the
softmax kept running (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", alg. 3), straight from the
layout [B, T, heads * D] of the projections.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

BLOCK = (64, 32)  # queries, keys; measured on an H200
MAX_KEYS = 256  # above, the library is faster
MAX_HEAD = 128  # channels of a head
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["T", "L"])
def short_attention_kernel(
    q, k, v, out, T, L, C, SCALE, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr
):
    """q, out [B, T, C], k, v [B, L, C]; program (tile of T, head, b); SCALE is in units of log2."""
    head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    in_q = (t[:, None] < T) & (d[None, :] < D)
    place = (b * T + t[:, None]) * C + head * D + d[None, :]
    queries = tl.load(q + place, mask=in_q, other=0.0)
    highest = tl.full((BT,), -1e30, tl.float32)
    total = tl.zeros((BT,), tl.float32)
    acc = tl.zeros((BT, BD), tl.float32)
    for l0 in range(0, L, BL):
        key = l0 + tl.arange(0, BL)
        in_k = (key[:, None] < L) & (d[None, :] < D)
        where = (b * L + key[:, None]) * C + head * D + d[None, :]
        keys = tl.load(k + where, mask=in_k, other=0.0)
        scores = tl.dot(queries, keys.T, input_precision="ieee") * SCALE
        scores = tl.where(key[None, :] < L, scores, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(v + where, mask=in_k, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        highest = higher
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_q)


def short_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each head; q [B, T, C], k, v [B, L, C] -> [B, T, C]."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    b, t, c = q.shape
    head = c // heads
    out = torch.empty_like(q)
    launch(short_attention_kernel, (triton.cdiv(t, BLOCK[0]), heads, b),
        q, k, v, out, t, k.shape[1], c, head**-0.5 * LOG2_E, head, max(16, triton.next_power_of_2(head)), *BLOCK,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def fits(q: Tensor, k: Tensor, heads: int) -> bool:
    """Whether the kernel takes these: half precision, heads of a usual size. It is for at most ``MAX_KEYS`` keys."""
    return q.dtype in (torch.float16, torch.bfloat16) and k.dtype == q.dtype and q.shape[2] // heads <= MAX_HEAD
