"""Decides what is compared by value, and recognises an object without keeping it alive."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (int, float, str, bytes, bool, type(None), complex)
MOST_HELD = 32  # attributes of a bundle
HEAP = 1 << 9  # of a type's flags: a class that Python code made
EQUAL = (*PLAIN, torch.dtype, torch.device, torch.Size)  # compared by value


class Same:
    """An object, by identity."""

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        function = getattr(value, "__func__", None)  # a bound method is made again at each access
        parts = (function, value.__self__) if function is not None else (value,)
        self._object = tuple(map(kept, parts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or len(self._object) != len(other._object):
            return False
        pairs = [(mine(), theirs()) for mine, theirs in zip(self._object, other._object, strict=True)]
        return all(mine is theirs and mine is not None for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]


class Role(Same):
    """An object whose place another one may take, as far as what lies in it is alike. number: its id."""

    __slots__ = ("number",)

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.number = id(value)

    __hash__ = None  # type: ignore[assignment]


class TensorRole(Role):
    """A tensor, which has stayed the same if its form has, too. form: see ``unchanged.form_of``."""

    __slots__ = ("form",)

    def __init__(self, tensor: Tensor, form: tuple) -> None:
        super().__init__(tensor)
        self.form = form

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorRole) and super().__eq__(other) and self.form == other.form

    @property
    def tensor(self) -> Tensor | None:
        """The tensor itself; None if it is gone."""
        return self._object[0]()

    __hash__ = None  # type: ignore[assignment]


def kept(value: Any) -> Callable[[], Any]:
    """What gives ``value`` as long as it lives, so that nothing new at its address is taken for it."""
    try:
        return weakref.ref(value)
    except TypeError:  # a property, a number of another library: small, and of no module
        return lambda: value


def slots_of(kind: type) -> list[str]:
    """The names of a class's attributes that are in no ``__dict__``."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def bundled(value: Any) -> dict[str, Any] | None:
    """What an object bundles (shift, scale and gate, say), by name; None of one that may hold more than its attributes.

    Objects of C types do, and layers; one with many attributes is no bundle.
    """
    kind, own = type(value), getattr(value, "__dict__", None)
    if not all(base is object or base.__flags__ & HEAP for base in kind.__mro__) or isinstance(value, nn.Module):
        return None
    slots = slots_of(kind)
    hidden = (own is None and not slots) or any(name.startswith("__") for name in slots)  # such names are mangled
    held = {} if hidden else {name: getattr(value, name) for name in slots if hasattr(value, name)} | (own or {})
    return None if hidden or len(held) > MOST_HELD else held


def ids_in(item: Any) -> Any:
    """The ids of an object and of what lies in it, where it is a container."""
    if type(item) is dict:
        return id(item), [(id(name), ids_in(each)) for name, each in item.items()]
    return (id(item), list(map(ids_in, item))) if type(item) in (list, tuple) else id(item)
