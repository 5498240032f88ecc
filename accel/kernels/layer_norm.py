"""LayerNorm of a residual stream and of what the layer before adds to it, for any number of rows; see ``reference``.

One pass over a row: the branch is added, the sum is rounded and stored as eager does, and normalised.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

MAX_CHANNELS = 8192  # one program holds a row in registers
ROWS_OF_TWO = 1024  # channels up to which a program takes two rows


@triton.jit(do_not_specialize=["ROWS"])
def stream_layer_norm_kernel(
    x, branch, weight, bias, total, y, ROWS, eps, C: tl.constexpr, HAS_BRANCH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BR rows of [ROWS, C] a program: total = x + branch, y = LayerNorm(total) * weight + bias."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    in_c = c < C
    mask = (r[:, None] < ROWS) & in_c[None, :]
    place = r[:, None].to(tl.int64) * C + c[None, :]
    v = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        v += tl.load(branch + place, mask=mask, other=0.0).to(tl.float32)
        rounded = v.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=mask)
        v = rounded.to(tl.float32)
    mean = tl.sum(v, 1) / C
    d = tl.where(mask, v - mean[:, None], 0.0)
    out = d / tl.sqrt(tl.sum(d * d, 1) / C + eps)[:, None]
    if HAS_WEIGHT:
        out *= tl.load(weight + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        out += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)


def stream_layer_norm(
    x: Tensor,  # [..., C]
    branch: Tensor | None,  # [..., C]
    weight: Tensor | None,  # [C]
    bias: Tensor | None,  # [C]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(x + branch, or x itself without a branch; its LayerNorm). Raises ValueError for rows too long for a program."""
    c = x.shape[-1]
    if c > MAX_CHANNELS:
        raise ValueError(f"stream_layer_norm takes at most {MAX_CHANNELS} channels, got {c}")
    x = x.contiguous()
    branch = x if (alone := branch is None) else branch.contiguous()
    total, y = x if alone else torch.empty_like(x), torch.empty_like(x)
    rows, block = x.numel() // c, triton.next_power_of_2(c)
    rows_each = 2 if block <= ROWS_OF_TWO else 1
    launch(stream_layer_norm_kernel, (triton.cdiv(rows, rows_each),),
        x, branch, x if weight is None else weight, x if bias is None else bias, total, y, rows, eps, c,
        not alone, weight is not None, bias is not None, rows_each, block, num_warps=2,
    )  # fmt: skip
    return total, y
