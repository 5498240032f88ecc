"""Views of tokens that a kernel reads row by row, without a copy where the memory allows it.

A stride that depends on the number of tokens, given to Triton as it is, would either make another variant or hide that
rows begin at multiples of 16 bytes. So the distance of two images is counted in rows, which only those addresses use.
"""

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Tokens [B, T, C]: element (b, t, c) lies at (b * image + t) * row + c."""

    tensor: Tensor
    image: int  # rows
    row: int  # elements


def as_rows(x: Tensor) -> Rows:
    """x [B, T, C], copied only if its channels are not side by side or its images not whole rows apart."""
    batch, tokens, channels = x.shape
    row = x.stride(1) if tokens > 1 else channels
    whole = batch == 1 or x.stride(0) % row == 0
    if x.stride(2) != 1 or row < channels or not whole:
        x, row = x.contiguous(), channels
    return Rows(x, tokens if batch == 1 else x.stride(0) // row, row)
