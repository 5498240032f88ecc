"""Counters of a sampling run with skipped blocks."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .bounded import bounded


@dataclass
class SkipStats:
    """One sampling run with skipped blocks, in evaluations of the sampler (Heun makes two a step).

    An evaluation is skipped if every call of the model in it was.
    """

    model: str  # its class
    depth: int = 0
    entry: str = ""  # the model's name in the stats, known from its first call on
    prompt: int = 0  # as ``ShapeStats`` has it
    workflow: str = ""  # the browser's id of the one that the prompt is of; "" if it came without one, from a script
    share: float = 0.0  # of a full step's work that a skipped one does
    full: int = 0
    skipped: int = 0
    resets: Counter[str] = field(default_factory=Counter)  # calls in full that were not planned, by reason
    seconds: float = 0.0
    bytes: int = 0  # of stored features, at most
    _current: bool | None = field(default=None, repr=False)  # whether the step has been skipped so far

    def begin_evaluation(self) -> None:
        """Begins another prediction of the sampler; what is counted from now on belongs to it."""
        self._current = None

    def count(self, skipped: bool, reason: str = "") -> None:
        """Counts one call of the model."""
        if reason:
            self.resets[reason] += 1
        if self._current is None or (self._current and not skipped):
            self.skipped += skipped - bool(self._current)
            self.full += not skipped
            self._current = skipped

    def as_dict(self) -> dict[str, Any]:
        """The contract's entry."""
        names = ("model", "entry", "prompt", "workflow", "depth", "full", "skipped", "bytes")
        return {name: getattr(self, name) for name in names} | {
            "resets": {bounded(reason): count for reason, count in list(self.resets.items())},
            "seconds": round(self.seconds, 3),
            "share": round(self.share, 4),
        }
