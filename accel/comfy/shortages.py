"""First calls of a size that push the model's own weights out (DynamicVRAM), although all of them had fitted before.

Recording needs more memory than ComfyUI's own forward, so a model that nearly fits would be recorded in vain once per
prompt. What is known of such calls outlives a sampling run, and ends as soon as there is more memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..key import ShapeKey

TRIES = 2  # the first one may have been chance: another program was large for a moment
MARGIN = 256 << 20  # bytes by which free memory changes from prompt to prompt
MOST = 96  # kinds of calls of one model


@dataclass
class _Shortage:
    free: int  # bytes beside the weights, at most
    why: str
    times: int = 1


class Shortages:
    """Those of one model. free: bytes of the device that were free when all weights were there."""

    def __init__(self) -> None:
        self._known: dict[ShapeKey, _Shortage] = {}

    def add(self, key: ShapeKey, free: int, why: str) -> None:
        """Notes that a call has pushed weights out."""
        known = self._known.get(key)
        if known is None or free > known.free + MARGIN:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = _Shortage(free, why)
        else:
            known.free, known.why, known.times = max(known.free, free), why, known.times + 1

    def expected(self, key: ShapeKey) -> Callable[[int], str] | None:
        """Given ``free``, why such a call is not begun; "" if it may be. None if it has pushed nothing out."""
        known = self._known.get(key)
        if known is None:
            return None
        return lambda free: known.why if known.times >= TRIES and free <= known.free + MARGIN else ""
