"""Attention without a plan: one kernel for any number of queries and keys at any size. See ``reference``.

cuDNN, the fastest on Hopper, takes 35 to 50 ms to plan the first call of each number of tokens. Here one program goes
through all keys of its queries with the softmax kept running (Milakov & Gimelshein 2018, "Online normalizer calculation
for softmax", alg. 3; Dao 2023, "FlashAttention-2", alg. 1), straight from the layout [B, T, heads * D] of the
projections.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch, next_power_of_2

QUERIES = 64  # of a block; this and what follows was measured on an H200
HEAD = 64  # channels of a head for which the kernel is used for any number of keys; at 4096 cuDNN is 6 % faster
KEYS, FEW_KEYS = 64, 32  # of a block for such heads, and for others
MAX_KEYS = 256  # for others: above, libraries are faster
MAX_HEAD = 128  # channels of a head
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["T", "L"])
def flash_attention_kernel(
    q, k, v, out, T, L, C, SCALE, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr
):
    """q, out [B, T, C], k, v [B, L, C]; program (b and tile of T, head); SCALE is in units of log2, and positive."""
    tiles = tl.cdiv(T, BT)  # along with b, which may be more than a grid's other axes take
    head, b = tl.program_id(1), (tl.program_id(0) // tiles).to(tl.int64)
    t = tl.program_id(0) % tiles * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)[None, :]
    key = tl.arange(0, BL)
    in_q = t[:, None] < T if D == BD else (t[:, None] < T) & (d < D)
    place = (b * T + t[:, None]) * C + head * D + d
    queries = tl.load(q + place, mask=in_q, other=0.0)
    highest = tl.full((BT,), -1e30, tl.float32)
    total = tl.zeros((BT,), tl.float32)
    acc = tl.zeros((BT, BD), tl.float32)
    where = (b * L + key[:, None]) * C + head * D + d
    k += where
    v += where
    whole = L // BL
    # No function shared with the rest below: that took 199 registers instead of 128, and a third more time.
    for _ in range(0, whole):
        keys = tl.load(k) if D == BD else tl.load(k, mask=d < D, other=0.0)
        scores = tl.dot(queries, keys.T)
        higher = tl.maximum(highest, tl.max(scores, 1) * SCALE)
        p = tl.exp2(scores * SCALE - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(v) if D == BD else tl.load(v, mask=d < D, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values)
        highest = higher
        k += BL * C
        v += BL * C
    left = L - whole * BL
    if left > 0:
        in_k = (key[:, None] < left) & (d < D)
        scores = tl.dot(queries, tl.load(k, mask=in_k, other=0.0).T) * SCALE
        scores = tl.where(key[None, :] < left, scores, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(v, mask=in_k, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values)
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_q)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each head; q [B, T, C], k, v [B, L, C] -> [B, T, C]."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    b, t, c = q.shape
    head = c // heads
    out = torch.empty_like(q)
    block = max(16, next_power_of_2(head)), QUERIES, KEYS if head == HEAD else FEW_KEYS
    launch(flash_attention_kernel, (b * cdiv(t, QUERIES), heads),
        q, k, v, out, t, k.shape[1], c, head**-0.5 * LOG2_E, head, *block, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def fits(q: Tensor, k: Tensor, heads: int) -> bool:
    """Whether the kernel takes these: half precision, heads of a usual size."""
    return q.dtype in (torch.float16, torch.bfloat16) and k.dtype == q.dtype and q.shape[2] // heads <= MAX_HEAD


def suits(head: int, keys: int) -> bool:
    """Whether it is fast for heads of so many channels, and so many keys."""
    return head == HEAD or keys <= MAX_KEYS
