"""Puts other objects in the place of some: in containers, in what an object bundles, and in what a function holds."""

import copy
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

from torch import Tensor

from .identity import bundled


def swapped(item: Any, swap: Mapping[int, Any], inside: bool = False) -> Any:
    """``item`` with other objects in place of those whose ids are in ``swap``; what has none of them stays itself.

    inside: of an object, which may lead back to where it is held.
    """
    if id(item) in swap:
        return swap[id(item)]
    kind = type(item)
    if kind is list or kind is tuple:
        new = [swapped(each, swap, inside) for each in item]
        return item if all(a is b for a, b in zip(new, item, strict=True)) else kind(new)
    if kind is dict:
        new = {name: swapped(each, swap, inside) for name, each in item.items()}
        return item if all(new[name] is item[name] for name in item) else new
    if kind is FunctionType:
        return _made_with(item, {**swap, id(item): item}, inside)  # it may hold itself
    held = None if inside or isinstance(item, Tensor) else bundled(item)
    new = {name: swapped(each, swap, inside=True) for name, each in (held or {}).items()}
    if all(new[name] is held[name] for name in new):
        return item
    made = copy.copy(item)
    for name, each in new.items():
        object.__setattr__(made, name, each)  # the class may forbid it
    return made


def contents(function: FunctionType) -> list[Any] | None:
    """What a function was made with: its defaults, and what it closes over. None if some of that is not there yet."""
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return None
    return [function.__defaults__, function.__kwdefaults__, *cells]


def _made_with(function: FunctionType, swap: Mapping[int, Any], inside: bool) -> FunctionType:
    found = contents(function) or []
    new = [swapped(each, swap, inside) for each in found]
    if all(a is b for a, b in zip(new, found, strict=True)):
        return function
    defaults, named, *cells = new
    code, there, name = function.__code__, function.__globals__, function.__name__
    made = FunctionType(code, there, name, defaults, tuple(map(CellType, cells)))
    made.__kwdefaults__ = named
    made.__dict__.update(function.__dict__)
    return made
