"""Measures how long ComfyUI's own forward takes, from the one forward that was recorded.

Recording costs the host about 15 µs an operation. So the time is eager's only where that did not matter: on a GPU if
the host was done long before the GPU, on a CPU if it is a small share of the time. Elsewhere nothing is said. Nor is
it of a process's first forward on a GPU, in which libraries and the driver make what they need once.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from .devices import wait

HOST_SHARE = 0.8  # of the time on the GPU; if launching took more, the GPU may have waited for the host
COST_MS = 0.02  # of recording one operation, at most
COST_SHARE = 0.05  # of the time on a CPU
_BEGUN: set[torch.device] = set()  # GPUs on which a forward has run


class Clock:
    """Times one forward while it is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._host = 0.0
        self._is_first = device.type == "cuda" and device not in _BEGUN
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def run(self, forward: Callable[[], Any]) -> Any:
        """What ``forward`` gives. Waits for nothing."""
        if self._events is not None:
            self._events[0].record()
        started = time.perf_counter()
        out = forward()
        self._host = (time.perf_counter() - started) * 1e3
        if self._events is not None:
            self._events[1].record()
            _BEGUN.add(self._device)
        return out

    def is_long(self, limit_ms: float) -> bool:
        """Whether the GPU worked longer than that for the forward; False if it rather waited for the host.

        Waits for the GPU.
        """
        if self._events is None:
            return False
        self._events[1].synchronize()
        elapsed = self._events[0].elapsed_time(self._events[1])
        return elapsed > limit_ms and self._host <= HOST_SHARE * elapsed

    def eager_ms(self, operations: int) -> float | None:
        """Milliseconds of eager, of a forward of so many operations; None where recording may have slowed it down."""
        if self._events is None:
            return self._host if operations * COST_MS <= COST_SHARE * self._host else None
        if self._is_first or not self._events[1].query():
            return None
        elapsed = self._events[0].elapsed_time(self._events[1])
        return elapsed if self._host <= HOST_SHARE * elapsed else None


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float, float]:
    """(the result, milliseconds of the host, milliseconds until the device was done)."""
    wait(device)
    started = time.perf_counter()
    out = run()
    host = time.perf_counter() - started
    wait(device)
    return out, host * 1e3, (time.perf_counter() - started) * 1e3
