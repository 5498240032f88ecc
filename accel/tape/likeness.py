"""Whether patches are those of a recording but for their objects: then the same tape serves, with other tensors.

A node that is given another image makes its patches again: other functions and objects, of the same code and with the
same settings, around other tensors of the same form. Nothing of a recording follows from the numbers of those, which
are its leaves, nor from which object it was. So each object may take the place of one that was there, as long as all
agree on which.
"""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

from .identity import Role, TensorRole
from .named_tensors import PLAIN
from .state import Part

ALIGNED = 16  # bytes: what kernels may know of an address


class Pairs:
    """Which objects have taken the place of which.

    leaves: ids of tensors that are leaves of the recording, the only ones that may be others; None: all may.
    """

    def __init__(self, leaves: Collection[int] | None) -> None:
        self.tensors: dict[int, Tensor] = {}  # by the ids of those whose place they have taken
        self._leaves = leaves
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._parts: set[tuple[int, int]] = set()

    def alike(self, old: Any, new: Any) -> bool:
        """Whether two states (see ``state``), or parts of such, differ in nothing but objects."""
        kind = type(old)
        if kind is not type(new):
            return False
        if kind is tuple:
            return len(old) == len(new) and all(map(self.alike, old, new))
        if kind is Part:
            known = (id(old), id(new)) in self._parts
            self._parts.add((id(old), id(new)))
            return known or self.alike(old.state, new.state)
        if issubclass(kind, Role):
            return self._takes_its_place(old, new)
        return old == new

    def _takes_its_place(self, old: Role, new: Role) -> bool:
        if self._new.setdefault(old.number, new.number) != new.number:
            return False
        if self._old.setdefault(new.number, old.number) != old.number:
            return False
        if not isinstance(old, TensorRole) or old == new:
            return True
        if self._leaves is None:
            return True
        tensor = new.tensor
        if old.number not in self._leaves or type(tensor) not in PLAIN:
            return False
        self.tensors[old.number] = tensor
        return old.form[:-1] == new.form[:-1] and old.form[-1] % ALIGNED == new.form[-1] % ALIGNED


def differing(old: Any, new: Any, place: tuple) -> Iterator[tuple]:
    """Where two options differ that ``options.frozen`` gave, in nested containers. place: of the whole."""
    if old == new:
        return
    kind = old[0] if isinstance(old, tuple) and isinstance(new, tuple) and old[:1] == new[:1] else None
    if kind is dict and [key for key, _ in old[1]] == [key for key, _ in new[1]]:
        for (key, mine), (_, theirs) in zip(old[1], new[1], strict=True):
            yield from differing(mine, theirs, (*place, key))
    elif kind in (list, tuple) and len(old[1]) == len(new[1]):
        for number, (mine, theirs) in enumerate(zip(old[1], new[1], strict=True)):
            yield from differing(mine, theirs, (*place, number))
    else:
        yield place
