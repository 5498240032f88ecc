"""Remembers the contents of a list, a dict or an object of settings, so that a change in place is seen.

A forward may read ``self.skip_layers`` or ``self.params.theta``, and another node may have changed it: the list is the
same one, what lies in it is not.
"""

import enum
import types
from typing import Any

from torch import Tensor, nn

from .identity import EQUAL, Same, slots_of

MOST = 300  # things in one picture: more is no setting
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


class _Picture:
    def __init__(self) -> None:
        self._left = MOST

    def of(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, EQUAL):
            return kind, value
        if isinstance(value, BY_IDENTITY):
            return Same(value)
        self._left -= 1
        if isinstance(value, ELSEWHERE) or not depth or self._left < 0:
            return kind
        if isinstance(value, dict):
            return kind, [(self.of(key, depth - 1), self.of(each, depth - 1)) for key, each in value.items()]
        if isinstance(value, (list, tuple)):
            return kind, [self.of(each, depth - 1) for each in value]
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(each for each in value if isinstance(each, EQUAL)), len(value)
        own = dict(getattr(value, "__dict__", None) or {})
        own |= {name: getattr(value, name) for name in slots_of(kind) if hasattr(value, name)}
        return kind, [(name, self.of(each, depth - 1)) for name, each in own.items()]
