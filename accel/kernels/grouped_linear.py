"""Many linear layers of one input in one launch, with biases or without; any number of rows. See ``reference``.

A UNet projects the text into keys and values once a block: 140 products of 154 rows in SDXL, each too small to fill the
card. Together they are one product of 154 rows with 160,000 columns. The weights stay where they are: a table holds
their addresses and those of their biases, one row a tile of columns.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch

BLOCK = (64, 128, 64)  # rows, columns, depth
COLUMNS = 6  # of the table


@triton.jit(do_not_specialize=["M"])
def grouped_linear_kernel(
    x, table, out, M, K, COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """One tile of an x [M, K] times one tile of a weight; row ``program_id(1)`` of ``table`` names both."""
    row = table + tl.program_id(1) * COLS
    weight = tl.load(row).to(tl.pointer_type(x.dtype.element_ty))  # of the tile's first column: [BN, K]
    start, column, width = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    bias = tl.load(row + 4)  # of the tile's first column: [BN]; 0: none
    weight = tl.multiple_of(weight, 16)
    x += M * tl.load(row + 5) * K  # which of several inputs, one behind the other
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    in_m, in_n = m < M, column + n < width
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * K + k[None, :], mask=in_m[:, None] & (k[None, :] < K), other=0.0)
        b = tl.load(weight + n[None, :] * K + k[:, None], mask=in_n[None, :] & (k[:, None] < K), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    added = tl.load(bias.to(tl.pointer_type(x.dtype.element_ty)) + n, mask=in_n & (bias != 0), other=0.0)
    acc += added.to(tl.float32)[None, :]
    place = out + M * start + m[:, None] * width + column + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def make_table(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, several: bool = False
) -> Tensor:
    """[tiles, 6] int64 on the weights' device: address, columns before this weight, first column, columns, bias, input.

    several: each weight has an input of its own.

    Valid as long as the weights stay at their addresses. Made outside a capture: it is copied from the host.
    """
    rows, start = [], 0
    for index, (weight, bias) in enumerate(zip(weights, biases or [None] * len(weights), strict=True)):
        width, depth = weight.shape
        size = weight.element_size()
        for column in range(0, width, BLOCK[1]):
            added = 0 if bias is None else bias.data_ptr() + column * size
            rows.append((weight.data_ptr() + column * depth * size, start, column, width, added, index * several))
        start += width
    return torch.tensor(rows, dtype=torch.int64, device=weights[0].device)


def tiles(widths: Sequence[int]) -> int:
    """The rows of a table."""
    return sum(cdiv(width, BLOCK[1]) for width in widths)


def grouped_linear(x: Tensor | Sequence[Tensor], weights: Sequence[Tensor], table: Tensor) -> list[Tensor]:
    """x [..., K] through each of ``weights`` [N, K], with the biases in ``table``: a list of [..., N].

    x: one input for all, or as many as weights, of one shape.
    """
    flat = x.contiguous() if isinstance(x, Tensor) else torch.cat([each.reshape(-1) for each in x])
    x = x if isinstance(x, Tensor) else x[0]
    rows, depth = x.shape[:-1].numel(), x.shape[-1]
    widths = [weight.shape[0] for weight in weights]
    out = x.new_empty(rows * sum(widths))
    grid = (cdiv(rows, BLOCK[0]), table.shape[0])
    launch(grouped_linear_kernel, grid, flat, table, out, rows, depth, COLUMNS, *BLOCK)
    parts = out.split([rows * width for width in widths])
    return [part.view(*x.shape[:-1], width) for part, width in zip(parts, widths, strict=True)]


def fits(weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> bool:
    """Whether these weights can go into one table: alike, contiguous, aligned for wide loads, in half precision."""
    first = weights[0]
    return (
        first.dtype in (torch.float16, torch.bfloat16)
        and all(
            w.dtype == first.dtype
            and w.device == first.device
            and w.shape[1] == first.shape[1]
            and w.is_contiguous()
            and w.data_ptr() % 16 == 0
            and w.shape[1] % 8 == 0
            for w in weights
        )
        and all(
            b is None or (b.dtype == first.dtype and b.device == first.device and b.stride() == (1,)) for b in biases
        )
    )
