"""What one forward compiled, apart from what another model's first forward compiles at the same time.

Kernels are counted for the process, but several threads may sample several models. First
forwards are expected to compile and run one at a time; any other forward that one of them overlaps counts nothing.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from .ops import FusedOps


@dataclass
class Compiled:
    """Filled in when the forward is over."""

    kernels: int = 0
    seconds: float = 0.0  # of the forward, if anything was compiled


class _FirstForwards:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = 0
        self._begun = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """The body is a first forward; another thread's waits."""
        with self._lock:
            self._begun += 1
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1

    def seen(self) -> tuple[int, int]:
        """Equal before and after a forward, and (n, 0): none ran meanwhile."""
        return self._begun, self._running


_FIRST = _FirstForwards()


@contextmanager
def compilations(ops: FusedOps, first: bool) -> Iterator[Compiled]:
    """Counts what the body compiles; ``first``: it is a model's first forward on these operations."""
    compiled = Compiled()
    with _FIRST.one() if first else nullcontext():
        before, started = _count(ops), time.perf_counter()
        seen = _FIRST.seen()
        yield compiled
        undisturbed = first or seen == _FIRST.seen() == (seen[0], 0)
        after = _count(ops) if undisturbed else before
    compiled.kernels = after - before
    compiled.seconds = time.perf_counter() - started if after != before else 0.0


def _count(ops: FusedOps) -> int:
    return ops.compiled_variants()
