"""Settings of other packs' parts that change while a model runs, and that its forward does not touch.

A pack may note something in its part at each call (the frames of a context window, say), which the forward would read
only if another of the pack's settings asked for it. Such an attribute is left out of what is compared of the part, for
as long as no recorded forward reads or sets it: each recording watches. The first that sees it touched is refused, and
from then on the attribute counts again.

A descriptor in the class watches while a forward is recorded. Instances find and set their attribute through it as
without it. What another thread touches counts as well: that costs a recording.
"""

import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..origin import is_known
from .code_names import beside, names_of

AROUND = frozenset(("__dict__", "vars"))  # by which code reads an attribute unseen
Names = weakref.WeakKeyDictionary[type, set[str]]


class Untouched:
    """The attributes that are left out, by their classes. Holds no class."""

    def __init__(self) -> None:
        self.changes = 0  # how often they became others: a look that knew others says nothing
        self._left_out: Names = weakref.WeakKeyDictionary()
        self._touched: Names = weakref.WeakKeyDictionary()  # those that a forward did read or set
        self._recordings: list[Callable[[str], None]] = []
        self._watched: set[tuple[type, str]] = set()  # while there are any
        self._lock = threading.RLock()

    def of(self, kind: type) -> set[str] | frozenset[str]:
        """The names that do not count in instances of this class."""
        return self._left_out.get(kind, NONE) if self._left_out else NONE

    def suppose(self, changed: Iterable[tuple[nn.Module, str]]) -> bool:
        """Leaves out, of these (part, attribute), those that can be watched; whether there are any."""
        with self._lock:
            found = {(type(part), name) for part, name in changed if self._may_be(part, name)}
            for kind, name in found:
                self._left_out.setdefault(kind, set()).add(name)
            self.changes += bool(found)
        return bool(found)

    def _may_be(self, part: nn.Module, name: str) -> bool:
        kind = type(part)
        return not (
            is_known(kind)
            or name not in part.__dict__
            or isinstance(part.__dict__.get(name), (Tensor, nn.Module))
            or callable(part.__dict__.get(name))
            or name in self._touched.get(kind, NONE)
            or any(name in vars(base) for base in kind.__mro__)
            or type(kind) is not type
            or kind.__getattribute__ is not object.__getattribute__
            or any(names_of(code) & AROUND for code in code_beside(kind))
        )

    def touched(self, kind: type, name: str) -> None:
        """It counts from now on, and forwards that are being recorded are refused."""
        with self._lock:
            if name not in self.of(kind):
                return
            self._left_out[kind].discard(name)
            self._touched.setdefault(kind, set()).add(name)
            self.changes += 1
            for refuse in self._recordings:
                refuse(f"{kind.__name__}.{name}")

    @contextmanager
    def watched(self, refuse: Callable[[str], None]) -> Iterator[None]:
        """Within the body ``refuse`` is called with the class and the name of each that is touched."""
        if not self._left_out:
            yield
            return
        with self._lock:
            self._recordings.append(refuse)
            wanted = {(kind, name) for kind, names in self._left_out.items() for name in names} - self._watched
            self._watched |= wanted
            for kind, name in wanted:
                setattr(kind, name, _Watched(self, kind, name))
        try:
            yield
        finally:
            with self._lock:
                self._recordings.remove(refuse)
                while self._watched and not self._recordings:
                    kind, name = self._watched.pop()
                    if isinstance(vars(kind).get(name), _Watched):
                        delattr(kind, name)


class _Watched:
    """Stands in a class for an attribute of its instances."""

    def __init__(self, untouched: Untouched, kind: type, name: str) -> None:
        self._untouched, self._kind, self._name = untouched, kind, name

    def __get__(self, part: Any, kind: type | None = None) -> Any:
        self._untouched.touched(self._kind, self._name)
        if part is None or self._name not in part.__dict__:
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {self._name!r}")
        return part.__dict__[self._name]

    def __set__(self, part: Any, value: Any) -> None:
        self._untouched.touched(self._kind, self._name)
        part.__dict__[self._name] = value

    def __delete__(self, part: Any) -> None:
        self._untouched.touched(self._kind, self._name)
        if self._name not in part.__dict__:
            raise AttributeError(self._name)
        del part.__dict__[self._name]


def code_beside(kind: type) -> Iterator[types.CodeType]:
    """The code of a class, of its bases that are another pack's, and of the functions in their files."""
    bases = [base for base in kind.__mro__ if not is_known(base)]
    files = {id(names): names for base in bases for names in beside(base)}
    for there in [*map(vars, bases), *files.values()]:
        for value in list(there.values()):
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                yield function.__code__
            elif isinstance(value, type) and not is_known(value):
                yield from (each.__code__ for each in vars(value).values() if isinstance(each, types.FunctionType))


NONE: frozenset[str] = frozenset()
UNTOUCHED = Untouched()
