"""Decides what is compared by value, and recognises an object without keeping it alive."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

PLAIN = (int, float, str, bytes, bool, type(None), complex)
EQUAL = (*PLAIN, torch.dtype, torch.device, torch.Size)  # compared by value


class Same:
    """An object, by identity."""

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        function = getattr(value, "__func__", None)  # a bound method is made again at each access
        parts = (function, value.__self__) if function is not None else (value,)
        self._object = tuple(_reference(part) for part in parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or len(self._object) != len(other._object):
            return False
        pairs = [(mine(), theirs()) for mine, theirs in zip(self._object, other._object, strict=True)]
        return all(mine is theirs and mine is not None for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # numbers of other libraries, and their kin: small
        return lambda: value


def slots_of(kind: type) -> list[str]:
    """The names of a class's attributes that are in no ``__dict__``."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]
