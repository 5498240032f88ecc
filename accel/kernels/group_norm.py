"""GroupNorm + SiLU in channels_last, for any size.

Three passes: the moments of each channel over blocks of rows, one scale and one shift per (image, channel), and the
element-wise application. Per-channel moments make the timestep embedding and the biases before free: adding a
constant to a channel moves its mean and leaves its second moment alone.

Numbers: inside a block the sums are taken relative to the block's first row (shifted data, Chan, Golub & LeVeque 1983,
"Algorithms for computing the sample variance", sec. 1.2), blocks are merged by their means and centred second moments
(ibid., sec. 2), so nothing cancels when |mean| >> std. There are no atomics: results do not depend on scheduling.

Sizes are run-time arguments that Triton is told not to specialise on: one compilation serves every height, width and
batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch, next_power_of_2

# tuned on an H200; see docs/decisions.md
MOMENTS_BLOCK = (64, 32)  # rows, channels
APPLY_BLOCK = (32, 64)
MAX_PENDING = 2  # biases: the convolution's before and the timestep embedding's
MAX_ROW_BLOCKS = 64  # of an image; a large one is split further so that one block stays below MAX_ROWS
MAX_ROWS = 2048


@triton.jit(do_not_specialize=["HW", "ROWS"])
def moments_kernel(x, part, HW, ROWS, C, BR: tl.constexpr, BC: tl.constexpr):
    """x [N, HW, C] -> part [N, blocks, 2, C] float32: mean and centred second moment of each channel over ROWS rows."""
    block, n = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < C
    first = block * ROWS
    last = tl.minimum(first + ROWS, HW)
    base = x + n.to(tl.int64) * HW * C
    pivot = tl.load(base + first.to(tl.int64) * C + c, mask=in_c, other=0.0).to(tl.float32)
    s = tl.zeros((BR, BC), tl.float32)
    q = tl.zeros((BR, BC), tl.float32)
    for r0 in range(first, last, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r[:, None] < last) & in_c[None, :]
        v = tl.load(base + r[:, None].to(tl.int64) * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, v - pivot[None, :], 0.0)
        s += d
        q += d * d
    count = (last - first).to(tl.float32)
    total = tl.sum(s, 0)
    out = part + (n * tl.num_programs(0) + block).to(tl.int64) * 2 * C + c
    tl.store(out, pivot + total / count, mask=in_c)
    tl.store(out + C, tl.maximum(tl.sum(q, 0) - total * total / count, 0.0), mask=in_c)


@triton.jit(do_not_specialize=["HW", "ROWS", "BLOCKS"])
def coefficients_kernel(
    part, shift, p0, p1, weight, bias, ab, HW, ROWS, BLOCKS, C, CG, eps, HAS_SHIFT: tl.constexpr,
    PENDING: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BB: tl.constexpr, BCG: tl.constexpr,
):  # fmt: skip
    """part [N, BLOCKS, 2, C] -> ab [N, 2, C]: x * ab[0] + ab[1] is GroupNorm(x + shift + p0 + p1) * weight + bias."""
    group, n = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BCG)
    in_g = k < CG
    c = group * CG + k
    t = tl.zeros((BCG,), tl.float32)
    if HAS_SHIFT:
        t = tl.load(shift + n * C + c, mask=in_g, other=0.0).to(tl.float32)
    if PENDING > 0:
        t += tl.load(p0 + c, mask=in_g, other=0.0).to(tl.float32)
    if PENDING > 1:
        t += tl.load(p1 + c, mask=in_g, other=0.0).to(tl.float32)
    base = part + n.to(tl.int64) * BLOCKS * 2 * C + c
    total = tl.zeros((BB, BCG), tl.float32)
    for b0 in range(0, BLOCKS, BB):
        b = b0 + tl.arange(0, BB)
        mask = (b[:, None] < BLOCKS) & in_g[None, :]
        count = tl.minimum(HW - b * ROWS, ROWS).to(tl.float32)[:, None]
        total += tl.where(
            mask, count * (tl.load(base[None, :] + b[:, None] * 2 * C, mask=mask, other=0.0) + t[None, :]), 0.0
        )
    size = HW.to(tl.float32) * CG
    mean = tl.sum(tl.sum(total, 0), 0) / size
    spread = tl.zeros((BB, BCG), tl.float32)
    for b0 in range(0, BLOCKS, BB):
        b = b0 + tl.arange(0, BB)
        mask = (b[:, None] < BLOCKS) & in_g[None, :]
        count = tl.minimum(HW - b * ROWS, ROWS).to(tl.float32)[:, None]
        where = base[None, :] + b[:, None] * 2 * C
        d = tl.load(where, mask=mask, other=0.0) + t[None, :] - mean
        spread += tl.where(mask, tl.load(where + C, mask=mask, other=0.0) + count * d * d, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(spread, 0), 0) / size + eps)
    a = tl.zeros((BCG,), tl.float32) + rstd
    if HAS_WEIGHT:
        a *= tl.load(weight + c, mask=in_g, other=0.0).to(tl.float32)
    b_out = (t - mean) * a
    if HAS_BIAS:
        b_out += tl.load(bias + c, mask=in_g, other=0.0).to(tl.float32)
    tl.store(ab + n * 2 * C + c, a, mask=in_g)
    tl.store(ab + n * 2 * C + C + c, b_out, mask=in_g)


@triton.jit(do_not_specialize=["HW"])
def apply_kernel(x, ab, y, HW, C, BR: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr):
    """y = x * ab[0] + ab[1], then SiLU; x, y [N, HW, C] and ab [N, 2, C] float32."""
    n = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    in_c = c < C
    mask = (r[:, None] < HW) & in_c[None, :]
    where = (n.to(tl.int64) * HW + r[:, None].to(tl.int64)) * C + c[None, :]
    a = tl.load(ab + n * 2 * C + c, mask=in_c, other=0.0)
    b = tl.load(ab + n * 2 * C + C + c, mask=in_c, other=0.0)
    v = tl.load(x + where, mask=mask, other=0.0).to(tl.float32) * a[None, :] + b[None, :]
    if SILU:
        v = v * tl.sigmoid(v)
    tl.store(y + where, v.to(y.dtype.element_ty), mask=mask)


def _row_blocks(rows: int) -> tuple[int, int]:
    """(rows a block, blocks): enough blocks to fill the device, few enough to merge quickly."""
    step = MOMENTS_BLOCK[0]
    blocks = max(min(MAX_ROW_BLOCKS, cdiv(rows, 2 * step)), cdiv(rows, MAX_ROWS))
    per_block = cdiv(cdiv(rows, blocks), step) * step
    return per_block, cdiv(rows, per_block)


def _coefficients(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float,
    shift: Tensor | None, pending: tuple[Tensor, ...],
) -> Tensor:  # fmt: skip
    """The scale and the shift of each (image, channel), [N, 2, C] float32; x is channels_last."""
    n, c, h, w = x.shape
    rows, blocks = _row_blocks(h * w)
    part = torch.empty(n, blocks, 2, c, device=x.device, dtype=torch.float32)
    ab = torch.empty(n, 2, c, device=x.device, dtype=torch.float32)
    grid = (blocks, cdiv(c, MOMENTS_BLOCK[1]), n)
    launch(moments_kernel, grid, x, part, h * w, rows, c, *MOMENTS_BLOCK)
    cg = c // groups
    block_cg = next_power_of_2(cg)
    launch(coefficients_kernel, (groups, n),
        part, part if shift is None else shift, *(*pending, part, part)[:MAX_PENDING],
        ab if weight is None else weight, ab if bias is None else bias, ab, h * w, rows, blocks, c, cg, eps,
        shift is not None, len(pending), weight is not None, bias is not None, 32, block_cg,
    )  # fmt: skip
    return ab


def group_norm(
    x: Tensor,  # [N, C, H, W], any layout
    weight: Tensor | None,  # [C]
    bias: Tensor | None,  # [C]
    groups: int,
    eps: float,
    shift: Tensor | None = None,  # [N, C]
    silu: bool = True,
    pending: tuple[Tensor, ...] = (),  # each [C]
) -> Tensor:
    """SiLU(GroupNorm(x + shift + pending)); the result is channels_last. See ``reference.group_norm``.

    Raises ValueError for more pending biases than a ResBlock leaves.
    """
    if len(pending) > MAX_PENDING:
        raise ValueError(f"group_norm takes at most {MAX_PENDING} pending biases, got {len(pending)}")
    x = x.contiguous(memory_format=torch.channels_last)
    n, c, h, w = x.shape
    shift = None if shift is None else shift.expand(n, c).contiguous()
    ab = _coefficients(x, weight, bias, groups, eps, shift, pending)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    grid = (cdiv(h * w, APPLY_BLOCK[0]), cdiv(c, APPLY_BLOCK[1]), n)
    launch(apply_kernel, grid, x, ab, y, h * w, c, *APPLY_BLOCK, silu)
    return y
