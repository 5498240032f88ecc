"""Remembers the contents of a list, a dict or an object of settings, so that a change in place is seen.

A forward may read ``self.skip_layers`` or ``self.params.theta``, and another node may have changed it: the list is the
same one, what lies in it is not.
"""

import enum
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .identity import EQUAL, Same, slots_of
from .named_tensors import DEPTH_OF_NOTES
from .unchanged import Unchanged

MOST = 300  # things in one picture: more is no setting
MOST_NOTES = 5000  # in that of a weight's notes: a LoRA has some 20
DEPTH = 4
BY_IDENTITY = (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
ELSEWHERE = (Tensor, nn.Module)  # they are looked after elsewhere


def is_held(value: Any) -> bool:
    """Whether a part's attribute is a container, or an object of settings."""
    return not isinstance(value, (type, *ELSEWHERE, *EQUAL)) and not callable(value)


def picture(value: Any) -> Any:
    """``value`` as something that can be compared later, and keeps nothing alive.

    Containers and objects by what lies in them, functions by identity. Of tensors, layers and what lies too deep only
    the type.
    """
    return _Picture().of(value, DEPTH)


def picture_of_notes(notes: dict[str, Any], seen: Unchanged | None = None) -> Any:
    """``picture`` of what a weight notes of itself: deeper, and with tensors (a LoRA's) and layers by identity.

    seen: notes what holds others. What is too much for a picture is like no other.
    """
    walk = _Picture(Same, seen, MOST_NOTES)
    found = walk.of(notes, DEPTH_OF_NOTES)
    if walk.is_cut and seen is not None:
        seen.other(object)
    return Same(found) if walk.is_cut else found


class _Picture:
    def __init__(self, elsewhere: Callable[[Any], Any] = type, seen: Unchanged | None = None, most: int = MOST) -> None:
        self._left, self._elsewhere, self._seen = most, elsewhere, seen
        self.is_cut = False

    def of(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, EQUAL):
            return kind, value
        if isinstance(value, BY_IDENTITY):
            return Same(value)
        self._left -= 1
        if isinstance(value, ELSEWHERE):
            return self._elsewhere(value)
        if not depth or self._left < 0:
            self.is_cut = True
            return kind
        if self._seen is not None:
            self._note(value, kind, self._seen)
        if isinstance(value, dict):
            return kind, [(self.of(key, depth - 1), self.of(each, depth - 1)) for key, each in value.items()]
        if isinstance(value, (list, tuple)):
            return kind, [self.of(each, depth - 1) for each in value]
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(each for each in value if isinstance(each, EQUAL)), len(value)
        own = dict(getattr(value, "__dict__", None) or {})
        own |= {name: getattr(value, name) for name in slots_of(kind) if hasattr(value, name)}
        return kind, [(name, self.of(each, depth - 1)) for name, each in own.items()]

    @staticmethod
    def _note(value: Any, kind: type, seen: Unchanged) -> None:
        """What ``value`` holds now."""
        if isinstance(value, dict):
            seen.mapping(value)
        elif isinstance(value, (set, frozenset)):
            seen.other(lambda: set(value))
        elif not isinstance(value, (list, tuple)):
            seen.mapping(getattr(value, "__dict__", None) or {})
            seen.named(lambda name: getattr(value, name, None), slots_of(kind))
        elif kind is not tuple:
            seen.sequence(value)
