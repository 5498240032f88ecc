"""Looks at the state of patches (``state``) in one sampling run: the first is a whole one, the others are quick."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from .state import State, look_at
from .unchanged import Unchanged

MOST_KNOWN = 256  # looks of a run


class Looks:
    """Looks during one run: after the first one it is enough that what was there still is. Holds what it has seen."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[Any], tuple[State | None, ...], Unchanged]] = {}
        self._equal: dict[int, tuple[tuple, tuple]] = {}  # states that turned out to be the same, by the earlier ones

    def changed(self, values: Iterable[Any], before: tuple[State, ...], module: nn.Module | None) -> int | None:
        """The number of the first whose state is not as it was; None if all are as they were."""
        now = self.at(list(values), module)
        if now is self._equal.get(id(before), (before, None))[1]:
            return None
        for number, (old, new) in enumerate(zip(before, now, strict=False)):
            if old != new:
                return number
        self._equal[id(before)] = before, now
        return None

    def at(self, values: list[Any], module: nn.Module | None) -> tuple[State | None, ...]:
        """The state of each."""
        key = tuple(map(id, values))
        known = self._known.get(key)
        if known is not None and known[2].holds():
            return known[1]
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        seen = Unchanged()
        states = look_at(values, module, seen=seen)
        self._known[key] = values, states, seen
        return states
