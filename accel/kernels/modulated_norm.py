"""The residual stream of a diffusion transformer between two layers, for any batch and tokens; see ``reference``.

One pass over a row: the gated branch of the layer before is added, the sum is stored, its LayerNorm is modulated by the
next layer's shift and scale. Eager reads and writes the row six times.
"""

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .reference import FP16_MAX
from .rows import as_rows

MAX_CHANNELS = 8192  # one program holds a row in registers


@triton.jit(do_not_specialize=["T", "X_ROWS", "BRANCH_ROWS"])
def modulated_norm_kernel(
    x, branch, gate, shift, scale, total, y, T, X_ROWS, BRANCH_ROWS, X_STRIDE, BRANCH_STRIDE, GATE_STRIDE,
    SHIFT_STRIDE, SCALE_STRIDE, C, eps, LIMIT,
    HAS_BRANCH: tl.constexpr, FINITE: tl.constexpr, HAS_NORM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One row of [B * T, C] a program: total = x + gate * branch, y = LayerNorm(total) * (1 + scale) + shift.

    *_ROWS: rows from one image to the next; *_STRIDE: elements from one row to the next.
    """
    image, token = (tl.program_id(0) // T).to(tl.int64), tl.program_id(0) % T
    row = tl.program_id(0).to(tl.int64) * C
    c = tl.arange(0, BC)
    mask = c < C
    v = tl.load(x + (image * X_ROWS + token) * X_STRIDE + c, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        b = tl.load(branch + (image * BRANCH_ROWS + token) * BRANCH_STRIDE + c, mask=mask, other=0.0)
        v += tl.load(gate + image * GATE_STRIDE + c, mask=mask, other=0.0).to(tl.float32) * b.to(tl.float32)
        if FINITE:
            v = tl.minimum(tl.maximum(tl.where(v == v, v, 0.0), -LIMIT), LIMIT)
        tl.store(total + row + c, v.to(total.dtype.element_ty), mask=mask)
    if HAS_NORM:
        mean = tl.sum(v, 0) / C
        d = tl.where(mask, v - mean, 0.0)
        n = d / tl.sqrt(tl.sum(d * d, 0) / C + eps)
        n *= 1.0 + tl.load(scale + image * SCALE_STRIDE + c, mask=mask, other=0.0).to(tl.float32)
        n += tl.load(shift + image * SHIFT_STRIDE + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + row + c, n.to(y.dtype.element_ty), mask=mask)


def modulated_norm(
    x: Tensor,  # [B, T, C]
    branch: Tensor | None,  # [B, T, C]
    gate: Tensor | None,  # [B, C]
    shift: Tensor | None,  # [B, C]; None: no norm
    scale: Tensor | None,  # [B, C]
    eps: float = 0.0,
    finite: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(x + gate * branch, or x itself without a branch; its modulated norm, or None); new tensors are contiguous.

    ``finite`` clamps the sum to fp16's range, NaN to 0. Raises ValueError for rows that one program cannot hold.
    """
    batch, tokens, c = x.shape
    if c > MAX_CHANNELS:
        raise ValueError(f"modulated_norm takes at most {MAX_CHANNELS} channels, got {c}")
    x_rows, branch_rows = as_rows(x), as_rows(x if branch is None else branch)
    vectors, strides = zip(*((x, 0) if v is None else _vectors(v) for v in (gate, shift, scale)), strict=True)
    total = x if branch is None else x.new_empty(x.shape)
    y = None if shift is None else x.new_empty(x.shape)
    launch(modulated_norm_kernel, (batch * tokens,),
        x_rows.tensor, branch_rows.tensor, *vectors, total, total if y is None else y, tokens,
        x_rows.image, branch_rows.image, x_rows.row, branch_rows.row, *strides, c, eps,
        FP16_MAX, branch is not None, finite, y is not None, triton.next_power_of_2(c), num_warps=4,
    )  # fmt: skip
    return total, y


def _vectors(v: Tensor) -> tuple[Tensor, int]:
    """([B, C] with its channels side by side, elements from one image to the next)."""
    v = v if v.stride(-1) == 1 else v.contiguous()
    return v, v.stride(0)
