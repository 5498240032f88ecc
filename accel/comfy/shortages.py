"""Memory that was too short for the model's own weights (DynamicVRAM), so that what failed is not tried in every run.

Recording needs more memory than ComfyUI's own forward, so a model that nearly fits would be recorded in vain once per
prompt. Filling weights needs some too, so one that fits even less would be filled in vain. What is known outlives a
sampling run, and ends as soon as there is more memory.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from ..key import ShapeKey

TRIES = 2  # the first one may have been chance: another program was large for a moment
MARGIN = 256 << 20  # bytes by which free memory changes from prompt to prompt
LITTLE = 32 << 20  # the same where to try in vain costs little, and not to try costs much
MOST = 32  # that are remembered


class _Shortage(NamedTuple):
    elements: int  # of the call's inputs
    free: int  # 0 if it was not asked
    why: str


class Shortages:
    """Those of one model. free: bytes of the device that were free when all weights were there."""

    def __init__(self) -> None:
        self._known: list[_Shortage] = []
        self.unfit = Unfit()

    def add(self, key: ShapeKey, free: int, why: str) -> None:
        """Notes that a call has pushed weights out."""
        self._known = [*self._known[1 - MOST :], _Shortage(_elements(key), free, why)]

    def expected(self, key: ShapeKey) -> Callable[[int], str] | None:
        """Given ``free``, why such a call is not begun; "" if it may be. None if nothing as large has failed."""
        elements = _elements(key)
        smaller = [each for each in self._known if each.elements <= elements]

        def too_short(free: int) -> str:
            with_more = [each.why for each in smaller if free <= each.free + MARGIN]
            return with_more[-1] if with_more and len(smaller) >= TRIES else ""

        return too_short if smaller else None


class Unfit:
    """How much was free beside a model's weights when filling them came to nothing.

    That took 30 to 50 ms of SDXL's weights, in the first step of a run, and pushes out what ComfyUI streams with.

    free: if no other model kept any memory. others: what they kept. Their pages may be in the way or give way, so it is
    tried again when they are gone.
    """

    def __init__(self) -> None:
        self._known: list[tuple[int, int]] = []  # free, and free as it was

    def add(self, free: int, others: int) -> None:
        """Notes that memory was too short once weights had been filled."""
        self._known = [*self._known[1 - MOST :], (free, free - others)]

    def clear(self) -> None:
        """All weights are there."""
        self._known = []

    def expects(self, free: int, others: int) -> bool:
        """Whether it would come to nothing again."""
        now = free - others
        return sum(free <= most + LITTLE and now <= then + LITTLE for most, then in self._known) >= TRIES


def _elements(key: ShapeKey) -> int:
    return sum(math.prod(spec.shape) for spec in key.inputs)
