"""Element-wise fusions: GEGLU, nearest upsampling. Any size; see ``reference``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch

GEGLU_BLOCK = (2, 512)  # rows, columns; measured on an H200


@triton.jit
def gelu(x):
    """GELU by the error function, of float32.

    erf by Abramowitz & Stegun (1964), eq. 7.1.26, within 1.5e-7: half the instructions of the exact one.
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    erf = 1.0 - series * tl.exp2(-1.4426950408889634 * z * z)
    return 0.5 * x * (1.0 + tl.where(x < 0, -erf, erf))


@triton.jit(do_not_specialize=["ROWS"])
def geglu_kernel(p, out, ROWS, INNER, BR: tl.constexpr, BC: tl.constexpr):
    """p [ROWS, 2 * INNER] -> out [ROWS, INNER]."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (r[:, None] < ROWS) & (c[None, :] < INNER)
    row = r[:, None].to(tl.int64)
    half = p + row * 2 * INNER + c[None, :]  # read once, so it need not stay in the cache
    h = tl.load(half, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    g = tl.load(half + INNER, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = h * gelu(g)
    tl.store(out + row * INNER + c[None, :], y.to(out.dtype.element_ty), mask=mask)


def geglu(p: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]."""
    p = p.contiguous()
    inner = p.shape[-1] // 2
    out = p.new_empty(*p.shape[:-1], inner)
    rows = p.numel() // (2 * inner)
    grid = (cdiv(rows, GEGLU_BLOCK[0]), cdiv(inner, GEGLU_BLOCK[1]))
    launch(geglu_kernel, grid, p, out, rows, inner, *GEGLU_BLOCK)
    return out


@triton.jit(do_not_specialize=["ROWS", "H", "W", "OUT_H", "OUT_W"])
def upsample_kernel(x, y, ROWS, H, W, OUT_H, OUT_W, C, BR: tl.constexpr, BC: tl.constexpr):
    """x [ROWS, C], ROWS = N * H * W -> y [N, OUT_H, OUT_W, C]: each row is written to four places, if they exist."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    mask = (r[:, None] < ROWS) & (c[None, :] < C)
    v = tl.load(x + r[:, None].to(tl.int64) * C + c[None, :], mask=mask, other=0.0)
    image, across = (r // (H * W)).to(tl.int64), r % W * 2
    down = r // W % H * 2
    for dy in tl.static_range(2):
        for dx in tl.static_range(2):
            place = (image * OUT_H + down + dy) * OUT_W + across + dx
            exists = (down + dy < OUT_H) & (across + dx < OUT_W)
            tl.store(y + place[:, None] * C + c[None, :], v, mask=mask & exists[:, None])


def upsample2x(x: Tensor, size: tuple[int, int]) -> Tensor:
    """[N, C, H, W] -> [N, C, *size], nearest neighbour; the result is channels_last. See ``reference.upsample2x``."""
    n, c, h, w = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.empty(n, c, *size, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    grid = (cdiv(n * h * w, 64), cdiv(c, 64))
    launch(upsample_kernel, grid, x, y, n * h * w, h, w, *size, c, 64, 64)
    return y
