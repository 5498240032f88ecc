"""Has all Python frames of a sampling run lie in one piece of memory.

CPython keeps frames in pieces of 16 KB, and gives a piece back when the frame that began it returns. Where the calls
of a forward's layers happen to begin one, the system maps and unmaps memory at each of them. A few frames more or less
around a forward decide it, nodes of other packs for example, and the host takes up to 1.7 times as long
(python/cpython issue 142183; 3.11 and 3.12 stay so). A frame that is large itself begins a piece that has as much
room again, so the calls below it begin none.
"""

import threading
import types
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SLOT = 8  # bytes
_SPARE = 1000  # slots that CPython asks for beyond a frame, and rounds up to the next power of two then
_ROOM = 1 << 18  # bytes for frames: some 1,000, which is Python's limit of recursion
_INSIDE = threading.local()  # a second large frame would take the room that the first one has made


def _call(work: Callable[[], T]) -> T:
    return work()


def _large() -> Callable[[Callable[[], T]], T]:
    try:
        return types.FunctionType(_call.__code__.replace(co_stacksize=_ROOM // _SLOT - _SPARE + 1), globals())
    except (ValueError, OverflowError):  # a later Python may allow no such frame, and needs none
        return _call


_LARGE = _large()


def together(work: Callable[[], T]) -> T:
    """What ``work`` gives. All frames below this one lie in one piece of memory."""
    if getattr(_INSIDE, "now", False):
        return work()
    _INSIDE.now = True
    try:
        return _LARGE(work)
    finally:
        _INSIDE.now = False
