"""Tensors full of one number, as a forward pads with, and memory that it is about to fill: made again at each replay.

A constant would be kept from one call to the next, however large it is.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .values import Constant, Operation, Value

COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)  # by ``aminmax``


def blank(tensor: Tensor, number: Any, value: Value | None = None) -> Operation:
    """The operation that makes memory like ``tensor``, full of ``number``; with None whatever is there."""
    sizes = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    return Operation(_made, (*sizes, number), {}, [], [] if value is None else [value], opaque=True)


def _made(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, number: Any
) -> Tensor:
    out = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return out if number is None else out.fill_(number)


def _is_odd(tensor: Tensor, number: Any) -> Tensor:
    """Whether ``tensor`` holds another number, on its device; where it can, without another tensor of its size."""
    if tensor.dtype not in COMPARED or not tensor.numel():
        return (tensor != number).any()
    low, high = torch.aminmax(tensor)
    return (low != number) | (high != number)


class Blanks:
    """Those of one recording that no operation has written into: whoever reads one must find its number there.

    Somebody may have written past torch's dispatcher. One that is a constant is looked at in the end, or before it is
    written into. One that nobody keeps is looked at when it is first read.
    """

    def __init__(self) -> None:
        self._kept: dict[Value, tuple[Tensor, Any]] = {}
        self._full: dict[Value, tuple[weakref.ref[Tensor], Any]] = {}
        self._odd: list[Tensor] = []  # whether another number was found, on the device

    def kept(self, value: Value, tensor: Tensor, number: Any) -> None:
        """``value`` is a new one, and a constant."""
        self._kept[value] = tensor, number

    def made(self, value: Value, tensor: Tensor, number: Any) -> None:
        """``value`` is a new one."""
        self._full[value] = weakref.ref(tensor), number

    def read(self, values: Sequence[Value]) -> None:
        """An operation reads these values."""
        if self._full:
            for value in values:
                tensor, number = self._full.pop(value.root, (None, None))
                if tensor is not None and (found := tensor()) is not None:
                    self._odd.append(_is_odd(found, number))

    def before_write(self, root: Value) -> None:
        """An operation of the tape is about to write into it, all of it or a part."""
        if root in self._kept:
            tensor, number = self._kept[root]
            self._odd.append(_is_odd(tensor, number))
        self.read((root,))

    def written(self, root: Value) -> None:
        """An operation of the tape has written into it."""
        self._full.pop(root, None)
        self._kept.pop(root, None)

    def were_filled(self) -> bool:
        """Whether one of them was not what it should be. Waits for the GPU if there were any."""
        odd = self._odd + [_is_odd(tensor, number) for tensor, number in self._kept.values()]
        return bool(odd) and bool(torch.stack(odd).any())

    def note(self) -> None:
        """Has each constant that holds its number say so. For the end, when that was looked at."""
        for value, (tensor, number) in self._kept.items():
            if type(value.leaf) is Constant:
                value.leaf = Constant(tensor, number)

    def clear(self) -> None:
        """Lets go of what is left."""
        self._full.clear()
        self._kept.clear()
        self._odd.clear()
