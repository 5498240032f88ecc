"""Tells what is being prepared now: a size that is recorded, compiled or captured takes longer than others.

It also passes on the user's cancelling: code that takes long calls ``look`` between two parts of its work.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

SECONDS = 0.2  # between two looks while other threads work

_LOCK = threading.Lock()
_NUMBERS = itertools.count(1)
_NOW: dict[int, dict[str, Any]] = {}  # thread -> its work
_ASK: list[Callable[[], None]] = []


def follow(ask: Callable[[], None]) -> None:
    """Sets ``ask``, which raises if the user has cancelled what runs."""
    _ASK[:] = [ask]


def look() -> None:
    """Raises the interrupt if the user has cancelled. Only for the thread that runs the prompt."""
    for ask in _ASK:
        ask()


@contextmanager
def preparing(model: str, size: str) -> Iterator[None]:
    """Within the body, ``size`` of ``model`` is being prepared. Nested in another one, it is a part of that."""
    thread = threading.get_ident()
    with _LOCK:
        mine = thread not in _NOW
        if mine:
            _NOW[thread] = {"number": next(_NUMBERS), "model": model, "size": size, "since": time.monotonic()}
    try:
        yield
    finally:
        if mine:
            with _LOCK:
                del _NOW[thread]


def snapshot() -> dict[str, Any]:
    """{"number", "model", "size", "seconds"} of the work that began first; {} if there is none."""
    with _LOCK:
        work = dict(min(_NOW.values(), key=lambda work: work["number"], default={}))
    seconds = time.monotonic() - work.pop("since", 0.0)
    return work and work | {"seconds": round(seconds, 1)}


@contextmanager
def workers(count: int, begin: Callable[..., None], *args: Any) -> Iterator[ThreadPoolExecutor]:
    """Gives threads for the body, each after ``begin(*args)``. If the body is interrupted, nobody waits for them.

    What has begun ends in its thread, what has not is dropped.
    """
    pool = ThreadPoolExecutor(count, initializer=begin, initargs=args)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def finished(futures: Iterable[Future]) -> None:
    """Waits for all of them, but raises as soon as the user cancels."""
    left = set(futures)
    while left:
        look()
        _, left = wait(left, timeout=SECONDS)
