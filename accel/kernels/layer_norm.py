"""LayerNorm of a residual stream with biases still to be added, for any number of rows; see ``reference``.

The layers before it end in a matrix product that adds to the stream in place (``addmm_``), which leaves their biases
out. They are added here, where the row is read anyway.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

MAX_CHANNELS = 8192  # one program holds a row in registers
ROWS_OF_TWO = 1024  # channels up to which a program takes two rows
MAX_PENDING = 3  # biases: self-attention's, cross-attention's and the feed-forward's


@triton.jit(do_not_specialize=["ROWS"])
def stream_layer_norm_kernel(
    x, p0, p1, p2, weight, bias, total, y, ROWS, eps, C: tl.constexpr, PENDING: tl.constexpr, STORE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BR rows of [ROWS, C] a program: total = x + p0 + p1 + p2, y = LayerNorm(total) * weight + bias."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    in_c = c < C
    mask = (r[:, None] < ROWS) & in_c[None, :]
    place = r[:, None].to(tl.int64) * C + c[None, :]
    v = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if PENDING > 0:
        v += tl.load(p0 + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if PENDING > 1:
        v += tl.load(p1 + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if PENDING > 2:
        v += tl.load(p2 + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if STORE:
        tl.store(total + place, v.to(total.dtype.element_ty), mask=mask)
    mean = tl.sum(v, 1) / C
    d = tl.where(mask, v - mean[:, None], 0.0)
    out = d / tl.sqrt(tl.sum(d * d, 1) / C + eps)[:, None]
    if HAS_WEIGHT:
        out *= tl.load(weight + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        out += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["ROWS"])
def add_pending_kernel(x, p0, p1, p2, y, ROWS, C, PENDING: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """y = x + p0 + p1 + p2; x, y [ROWS, C]."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    mask = (r[:, None] < ROWS) & in_c[None, :]
    place = r[:, None].to(tl.int64) * C + c[None, :]
    biases = tl.load(p0 + c, mask=in_c, other=0.0).to(tl.float32)
    if PENDING > 1:
        biases += tl.load(p1 + c, mask=in_c, other=0.0).to(tl.float32)
    if PENDING > 2:
        biases += tl.load(p2 + c, mask=in_c, other=0.0).to(tl.float32)
    v = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) + biases[None, :]
    tl.store(y + place, v.to(y.dtype.element_ty), mask=mask)


def _three(pending: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
    """The biases, and something to point at in the place of those that are missing."""
    if len(pending) > MAX_PENDING:
        raise ValueError(f"a stream has at most {MAX_PENDING} pending biases, got {len(pending)}")
    return (*pending, x, x, x)[:MAX_PENDING]


def add_pending(x: Tensor, pending: tuple[Tensor, ...]) -> Tensor:
    """x [..., C] + each of ``pending`` [C]. Raises ValueError for more than a transformer block leaves."""
    x, c = x.contiguous(), x.shape[-1]
    y, rows = torch.empty_like(x), x.numel() // c
    grid = (triton.cdiv(rows, 8), triton.cdiv(c, 256))
    launch(add_pending_kernel, grid, x, *_three(pending, x), y, rows, c, len(pending), 8, 256)
    return y


def stream_layer_norm(
    x: Tensor,  # [..., C]
    pending: tuple[Tensor, ...],  # each [C]
    weight: Tensor | None,  # [C]
    bias: Tensor | None,  # [C]
    eps: float,
    store: bool,
) -> tuple[Tensor, Tensor]:
    """(x + pending if ``store`` else x, LayerNorm(x + pending)).

    Raises ValueError for rows that one program cannot hold, or more biases than a transformer block leaves.
    """
    c = x.shape[-1]
    if c > MAX_CHANNELS:
        raise ValueError(f"stream_layer_norm takes at most {MAX_CHANNELS} channels, got {c}")
    x = x.contiguous()
    total, y = torch.empty_like(x) if store else x, torch.empty_like(x)
    rows, block = x.numel() // c, triton.next_power_of_2(c)
    rows_each = 2 if block <= ROWS_OF_TWO else 1
    launch(stream_layer_norm_kernel, (triton.cdiv(rows, rows_each),),
        x, *_three(pending, x), x if weight is None else weight, x if bias is None else bias, total, y, rows, eps, c,
        len(pending), store, weight is not None, bias is not None, rows_each, block, num_warps=2,
    )  # fmt: skip
    return total, y
