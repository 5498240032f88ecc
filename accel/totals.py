"""Counts for monitoring: everything since the process began, whatever was cleared or forgotten since.

These counters never fall. Their labels have few values: kinds of models, states, keys of reasons.
"""

import threading
from collections import Counter

from . import reasons

OTHER = "other"  # a reason that has no key: the text of another library's error, say


class Totals:
    """Of all models together, also those that are long gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # models run in several threads, and the server reads in its own
        self._calls: Counter[tuple[str, str, str]] = Counter()  # by kind, state and step
        self._first: Counter[str] = Counter()  # seconds of first calls, by kind
        self._firsts: Counter[str] = Counter()  # how many there were
        self._kernels: Counter[str] = Counter()
        self._recompiles: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()  # of compiling
        self._fallbacks: Counter[str] = Counter()  # by the reason's key

    def called(self, kind: str, state: str, step: str) -> None:
        """Counts a call that has ended; step: "" without Skip Blocks."""
        with self._lock:
            self._calls[kind, state, step] += 1

    def first_call(self, kind: str, seconds: float) -> None:
        """Counts the first call at a size."""
        with self._lock:
            self._firsts[kind] += 1
            self._first[kind] += seconds

    def compiled(self, kind: str, kernels: int, recompiles: int, seconds: float) -> None:
        """Counts what one program needed."""
        with self._lock:
            self._kernels[kind] += kernels
            self._recompiles[kind] += recompiles
            self._seconds[kind] += seconds

    def fell_back(self, reason: str) -> None:
        """Counts a fallback to something slower, by the first reason in its text."""
        found = reasons.found_in(reason)
        with self._lock:
            self._fallbacks[found[0].reason.key if found else OTHER] += 1

    def calls(self) -> dict[tuple[str, str, str], int]:
        """(kind, state, step) -> calls."""
        with self._lock:
            return dict(self._calls)

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Name of a counter -> kind -> its value."""
        with self._lock:
            return {
                "first_calls": dict(self._firsts),
                "first_call_seconds": dict(self._first),
                "kernels": dict(self._kernels),
                "recompiles": dict(self._recompiles),
                "compile_seconds": dict(self._seconds),
            }

    def fallbacks(self) -> dict[str, int]:
        """Key of a reason -> how often something ran slower because of it."""
        with self._lock:
            return dict(self._fallbacks)
