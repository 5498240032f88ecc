"""Residual add + LayerNorm in one pass, for any number of rows; see ``reference.add_layer_norm``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_CHANNELS = 8192  # one program holds a row in registers


@triton.jit
def add_layer_norm_kernel(
    x, residual, weight, bias, total, y, C, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One row of [ROWS, C] a program: total = x + residual, y = LayerNorm(total) * weight + bias."""
    row = tl.program_id(0).to(tl.int64) * C
    c = tl.arange(0, BC)
    mask = c < C
    v = tl.load(x + row + c, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        v += tl.load(residual + row + c, mask=mask, other=0.0).to(tl.float32)
        v = v.to(total.dtype.element_ty)
        tl.store(total + row + c, v, mask=mask)
        v = v.to(tl.float32)  # eager normalises the rounded sum; so does this
    mean = tl.sum(v, 0) / C
    d = tl.where(mask, v - mean, 0.0)
    out = d / tl.sqrt(tl.sum(d * d, 0) / C + eps)
    if HAS_WEIGHT:
        out *= tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row + c, out.to(y.dtype.element_ty), mask=mask)


def add_layer_norm(
    x: Tensor,  # [..., C]
    residual: Tensor | None,  # like x
    weight: Tensor | None,  # [C]
    bias: Tensor | None,  # [C]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(x + residual, LayerNorm(x + residual)); raises ValueError for rows that one program cannot hold."""
    c = x.shape[-1]
    if c > MAX_CHANNELS:
        raise ValueError(f"add_layer_norm takes at most {MAX_CHANNELS} channels, got {c}")
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    total, y = x if residual is None else torch.empty_like(x), torch.empty_like(x)
    add_layer_norm_kernel[(x.numel() // c,)](
        x, x if residual is None else residual, x if weight is None else weight, x if bias is None else bias,
        total, y, c, eps, residual is not None, weight is not None, bias is not None, triton.next_power_of_2(c),
    )  # fmt: skip
    return total, y
