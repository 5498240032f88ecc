"""GEGLU of a linear layer as one kernel: the halves of the product never reach memory. See ``reference``.

A program computes one tile of both halves side by side, as one product with [value, gate] columns, and multiplies them
where they are, in registers. Tiles come through Hopper's tensor memory accelerator (host-side descriptors), which pads
what lies outside the tensors with zeros and clips what is written there.
"""

import importlib.util

import torch
import triton
import triton.language as tl
from torch import Tensor

from .geglu_upsample import gelu
from .launch import cdiv, launch

BLOCK = (128, 64, 64)  # rows, columns of each half, depth; measured on an H200
GROUP = 8  # tiles of rows that share their weights in the cache
TILES_A_PROCESSOR = 2  # that run side by side on one multiprocessor
# how much of the waves of tiles must be in use for it to be faster; measured on an H200, see docs/decisions.md
SHALLOW_DEPTH = 640
SHALLOW, FEW_WAVES, MANY_WAVES = 0.75, 0.8, 0.87
CAPABILITY = (9, 0)  # of the cards on which it was measured


@triton.jit(do_not_specialize=["M"])
def linear_geglu_kernel(
    x, weight, bias, out, M, INNER, K,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Descriptors of x [M, K], weight [2, INNER, K], out [M, INNER]; bias [2 * INNER]."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(INNER, BN)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    m = first + tl.program_id(0) % (GROUP * tiles_n) % rows
    n = tl.program_id(0) % (GROUP * tiles_n) // rows
    acc = tl.zeros((BM, 2 * BN), tl.float32)
    for k in range(0, K, BK):
        a = x.load([m * BM, k])
        b = weight.load([0, n * BN, k]).reshape(2 * BN, BK)
        acc = tl.dot(a, b.T, acc)
    value, gate = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
    if HAS_BIAS:
        c = n * BN + tl.arange(0, BN)
        value += tl.load(bias + c, mask=c < INNER, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(bias + INNER + c, mask=c < INNER, other=0.0).to(tl.float32)[None, :]
    out.store([m * BM, n * BN], (value * gelu(gate)).to(out.dtype))


def linear_geglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GEGLU(x [..., K] through weight [2I, K] and bias [2I]): [..., I]."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # not in Triton before 3.4

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    (rows, depth), inner = flat.shape, weight.shape[0] // 2
    out = x.new_empty(*x.shape[:-1], inner)
    bm, bn, bk = BLOCK
    launch(linear_geglu_kernel, (cdiv(rows, bm) * cdiv(inner, bn),),
        TensorDescriptor.from_tensor(flat, [bm, bk]),
        TensorDescriptor.from_tensor(weight.view(2, inner, depth), [2, bn, bk]),
        flat if bias is None else bias,
        TensorDescriptor.from_tensor(out.view(rows, inner), [bm, bn]),
        rows, inner, depth, bias is not None, bm, bn, bk, GROUP, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def works_on(capability: tuple[int, int]) -> bool:
    """Whether the card has the memory accelerator, and this Triton the means to describe tensors to it (3.4)."""
    return capability == CAPABILITY and importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the descriptors can describe these tensors: in half precision, rows at multiples of 16 bytes."""
    return (
        x.dtype in (torch.float16, torch.bfloat16)
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 8 == 0
    )


def is_faster(rows: int, depth: int, inner: int, processors: int) -> bool:
    """Whether the tiles fill the card well enough to beat cuBLAS with GEGLU as a kernel of its own.

    The last wave of tiles takes as long as a full one, and cuBLAS has smaller tiles to choose from. A shallow product
    is bound by what it writes, of which this one writes half.
    """
    tiles = cdiv(rows, BLOCK[0]) * cdiv(inner, BLOCK[1])
    waves = cdiv(tiles, TILES_A_PROCESSOR * processors)
    used = rows * inner / (waves * TILES_A_PROCESSOR * processors * BLOCK[0] * BLOCK[1])
    return used >= (SHALLOW if depth <= SHALLOW_DEPTH else FEW_WAVES if waves <= 4 else MANY_WAVES)
