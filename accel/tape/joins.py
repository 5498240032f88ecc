"""Joins whose parts are stored directly where they belong: the memory, and the places in it."""

from functools import partial

import torch

from .group import VIEW
from .traits import aten
from .values import Operation, Sizes, Value


def join(value: Value) -> Operation:
    """What makes the memory of a join."""
    make = partial(torch.empty_strided, value.shape, value.stride, dtype=value.dtype, device=value.device)
    return Operation(make, (), {}, [], [value], opaque=True)


def part(value: Value, dim: int, start: int, shape: tuple[int, ...], sizes: Sizes) -> Operation:
    """What makes the place of one part, of this shape, from ``start`` on along ``dim``."""
    place = value.part(shape, sizes)
    return Operation(aten.slice.Tensor, (value, dim, start, start + shape[dim]), {}, [value], [place], kind=VIEW)
