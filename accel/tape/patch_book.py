"""What is known of patches' code from one recording to the next: which must be called in each forward, which is odd."""

import functools
import weakref
from collections.abc import Mapping
from typing import Any

from . import patch_call
from .values import wrapped

MOST_KNOWN = 256


class PatchBook:
    """What is known of patches' code, for one model."""

    def __init__(self) -> None:
        self._live: dict[int, Any] = {}
        self._odd: dict[int, Any] = {}
        self._misfits: dict[tuple[int, int], tuple] = {}
        self._prepared: dict[int, Any] = {}

    def is_live(self, who: Any) -> bool:
        """Whether it must be called in each forward."""
        return id(who) in self._live

    def among(self, options: Mapping[Any, Any]) -> frozenset[tuple]:
        """(place, code, whether it must be called in each forward) of every patch in these options."""
        found: set[tuple] = set()

        def add(place: tuple, patch: Any) -> None:
            who = code_of(patch)
            found.add((place, who, self.is_live(who)))

        for kind in patch_call.RAW:
            wrapped(options.get(kind), add, (kind,))
        return frozenset(found)

    def is_odd(self, who: Any) -> bool:
        """Whether it gives results of several forms, so that nothing around it is recorded."""
        return id(who) in self._odd

    def live(self, who: Any) -> None:
        """From now on it is called in each forward."""
        _keep(self._live, who)

    def may_prepare(self, who: Any) -> bool:
        """It changed itself in a forward that was recorded. Whether it may have prepared something, for this size, say.

        Not twice with no forward in between that went well: then it will do so in each one.
        """
        before = id(who) in self._prepared
        _keep(self._prepared, who)
        return not before

    def went_well(self, any_patch: bool) -> None:
        """A recording fits, or is complete: if a patch is written down in it, none has changed itself again."""
        if any_patch:
            self._prepared.clear()

    def misfit(self, program: Any, patch: Any) -> None:
        """From now on ``patch`` is not called from ``program``, which was recorded with another one of its code."""
        self._misfits[id(program), id(patch)] = weakref.ref(program), patch
        while len(self._misfits) > MOST_KNOWN:
            self._misfits.pop(next(iter(self._misfits)))

    def is_misfit(self, program: Any, patch: Any) -> bool:
        """Whether it was found to give another form of result than that program was made for."""
        found = self._misfits.get((id(program), id(patch)))
        return found is not None and found[0]() is program

    def odd(self, who: Any) -> None:
        """From now on forwards with it are not recorded."""
        _keep(self._odd, who)


def _keep(table: dict[int, Any], who: Any) -> None:
    table[id(who)] = who  # kept, so that its id is nobody else's
    while len(table) > MOST_KNOWN:
        table.pop(next(iter(table)))


def code_of(patch: Any) -> Any:
    """What patches have in common that do the same: their code, or their class."""
    if isinstance(patch, functools.partial):
        return code_of(patch.func)
    function = getattr(patch, "__func__", patch)
    return getattr(function, "__code__", None) or type(patch)


def shown(patch: Any) -> str:
    """A patch's name, as a user may know it."""
    function = getattr(patch, "func", patch)
    return getattr(function, "__qualname__", type(function).__qualname__).replace(".<locals>.", ".")
