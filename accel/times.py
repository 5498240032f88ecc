"""Measures how long calls take: the latest durations, and the total compared with eager.

On CUDA by events that are read when they are done, so measuring never waits.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

TIMES_KEPT = 64
_THREAD = threading.local()  # ``rehearsing``: what this thread calls is not asked for by a prompt


def is_rehearsing() -> bool:
    """Whether calls of this thread are made ahead."""
    return getattr(_THREAD, "rehearsing", False)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Calls within are made ahead: without the pack there would be none of them, so they only cost time."""
    before, _THREAD.rehearsing = is_rehearsing(), True
    try:
        yield
    finally:
        _THREAD.rehearsing = before


@dataclass(frozen=True)
class Begun:
    """When a call began: before our looks at it, which take a small model's host as long as the call itself."""

    clock: float  # ``time.perf_counter``
    event: torch.cuda.Event | None  # on the GPU, where that runs the call


def begin(device: torch.device) -> Begun:
    """Notes that a call on ``device`` begins now."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    return Begun(time.perf_counter(), event)


@dataclass
class Timed:
    """One call that is being timed."""

    fast: bool = True  # it did not run in eager


class CallTimes:
    """The durations of recent calls. A call that ran in eager neither saves time nor costs any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the report is read by another thread than the one that samples
        self._done: deque[float] = deque(maxlen=TIMES_KEPT)
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, bool, bool]] = deque(maxlen=TIMES_KEPT)
        self._fast = True  # how those in ``_done`` ran: one median is about one way to run
        self._wanted = 0  # calls that eager would have made as well
        self._spent = 0.0  # milliseconds of all calls that did not run in eager, those made ahead included

    @contextmanager
    def measure(self, begun: Begun) -> Iterator[Timed]:
        """Times what is done since ``begun`` until the body, which may say how it ran, has ended."""
        timed, wanted = Timed(), not is_rehearsing()
        if begun.event is None:
            yield timed
            with self._lock:
                self._add((time.perf_counter() - begun.clock) * 1e3, timed.fast, wanted)
            return
        end = torch.cuda.Event(enable_timing=True)
        yield timed
        end.record()
        with self._lock:
            self._read()
            self._pending.append((begun.event, end, timed.fast, wanted))

    def first(self, seconds: float, fast: bool) -> None:
        """Counts the first call, which is no measure of later ones but took its time."""
        with self._lock:
            self._count(seconds * 1e3, fast, not is_rehearsing())

    def _add(self, milliseconds: float, fast: bool, wanted: bool) -> None:
        if fast != self._fast:
            self._done.clear()
            self._fast = fast
        self._done.append(milliseconds)
        self._count(milliseconds, fast, wanted)

    def _count(self, milliseconds: float, fast: bool, wanted: bool) -> None:
        if fast:
            self._spent += milliseconds
            self._wanted += wanted

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():
            start, end, fast, wanted = self._pending.popleft()
            self._add(start.elapsed_time(end), fast, wanted)

    def median_ms(self) -> float:
        """Median of the recent calls that have ended, milliseconds; 0.0 before the second call."""
        with self._lock:
            self._read()
            return statistics.median(self._done) if self._done else 0.0

    def saved_seconds(self, eager_ms: float) -> float:
        """What eager would have taken for the same calls, less what they took."""
        with self._lock:
            self._read()
            return (self._wanted * eager_ms - self._spent) / 1e3


class Eager:
    """What ComfyUI's own forward takes at one size, where that was measured."""

    def __init__(self) -> None:
        self.once: float | None = None  # milliseconds of one forward, the recorded or the compared one
        self._times = CallTimes()
        self._calls = 0

    def note(self, milliseconds: float | None) -> None:
        """Takes the time of one such forward; None if it could not be measured."""
        self.once = milliseconds or self.once

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """The body is such a forward. The first one only warms up."""
        self._calls += 1
        if self._calls == 1:
            yield
            return
        with self._times.measure(begin(device)):
            yield

    @property
    def ms(self) -> float | None:
        """Milliseconds; None where nobody knows. Several forwards, warmed up, say more than the one."""
        return self._times.median_ms() or self.once
