"""Attention that libraries need not plan: any number of queries and keys at any size, by one kernel. See ``reference``.

cuDNN, the fastest on Hopper, takes 35 to 85 ms to plan the first call of each number of tokens. Here one program goes
through all keys of its queries with the softmax kept running (Milakov & Gimelshein 2018, "Online normalizer calculation
for softmax", alg. 3; Dao 2023, "FlashAttention-2", alg. 1), straight from the layout [B, T, heads * D] of the
projections.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

QUERIES = 64  # of a block; this and what follows was measured on an H200
HEAD = 64  # channels of a head for which the kernel is as fast as libraries, however many keys there are
KEYS, FEW_KEYS = 64, 32  # of a block for such heads, and for others
MAX_KEYS = 256  # for others: above, libraries are faster
MAX_HEAD = 128  # channels of a head
LOG2_E = 1.4426950408889634


@triton.jit
def _loaded(pointers, rows, channels, WHOLE: tl.constexpr):
    """A block of rows; zero beyond the mask ``rows``, and beyond ``channels`` where a head does not fill its block."""
    if WHOLE:
        block = tl.load(pointers, mask=rows, other=0.0)
    else:
        block = tl.load(pointers, mask=rows & channels, other=0.0)
    return block


@triton.jit
def _taken_in(queries, keys, values, there, SCALE, highest, total, acc, MASKED: tl.constexpr):
    """The running softmax with one block of keys more. there: which of them exist, where not all do."""
    scores = tl.dot(queries, keys.T, input_precision="ieee")
    if MASKED:
        scores = tl.where(there, scores, -1e30)
    higher = tl.maximum(highest, tl.max(scores, 1) * SCALE)
    p = tl.exp2(scores * SCALE - higher[:, None])
    shrink = tl.exp2(highest - higher)
    acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["T", "L"])
def flash_attention_kernel(
    q, k, v, out, T, L, C, SCALE, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr
):
    """q, out [B, T, C], k, v [B, L, C]; program (tile of T, head, b); SCALE is in units of log2, and positive."""
    head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)[None, :]
    in_q = t[:, None] < T
    place = (b * T + t[:, None]) * C + head * D + d
    queries = _loaded(q + place, in_q, d < D, D == BD)
    highest = tl.full((BT,), -1e30, tl.float32)
    total = tl.zeros((BT,), tl.float32)
    acc = tl.zeros((BT, BD), tl.float32)
    key = tl.arange(0, BL)
    where = (b * L + key[:, None]) * C + head * D + d
    whole = L // BL
    for _ in range(0, whole):  # without a mask for keys, which costs a fifth of the time
        if D == BD:
            keys, values = tl.load(k + where), tl.load(v + where)
        else:
            keys, values = tl.load(k + where, mask=d < D, other=0.0), tl.load(v + where, mask=d < D, other=0.0)
        highest, total, acc = _taken_in(queries, keys, values, None, SCALE, highest, total, acc, False)
        where += BL * C
    left = L - whole * BL
    if left > 0:
        in_k = key[:, None] < left
        keys, values = _loaded(k + where, in_k, d < D, D == BD), _loaded(v + where, in_k, d < D, D == BD)
        highest, total, acc = _taken_in(
            queries, keys, values, key[None, :] < left, SCALE, highest, total, acc, True
        )  # fmt: skip
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place, result, mask=in_q if D == BD else in_q & (d < D))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each head; q [B, T, C], k, v [B, L, C] -> [B, T, C]."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    b, t, c = q.shape
    head = c // heads
    out = torch.empty_like(q)
    block = max(16, triton.next_power_of_2(head)), QUERIES, KEYS if head == HEAD else FEW_KEYS
    launch(flash_attention_kernel, (triton.cdiv(t, QUERIES), heads, b),
        q, k, v, out, t, k.shape[1], c, head**-0.5 * LOG2_E, head, *block, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def fits(q: Tensor, k: Tensor, heads: int) -> bool:
    """Whether the kernel takes these: half precision, heads of a usual size."""
    return q.dtype in (torch.float16, torch.bfloat16) and k.dtype == q.dtype and q.shape[2] // heads <= MAX_HEAD


def suits(head: int, keys: int) -> bool:
    """Whether it is fast for heads of so many channels, and so many keys."""
    return head == HEAD or keys <= MAX_KEYS
