"""The one place that turns a failure of ours into a fallback.

Eager is always right, so whatever of ours raises must cost speed and nothing else. Every boundary between ComfyUI and
us, and every tier of the engine, goes through ``attempt``; no other code here catches what it does not know.
"""

import logging
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .reasons import say
from .stats import STATS

log = logging.getLogger(__name__)

# An absolute path in quotes, which may have spaces, and the folders of one without.
_QUOTED = re.compile(r"(['\"])(?:[A-Za-z]:)?[\\/][^'\"]*?([^\\/'\"]+)[\\/]*\1")
_FOLDERS = re.compile(r"(?<![\w.:/\\])(?:[A-Za-z]:)?[\\/]+(?:[^\s\\/'\"]+[\\/]+)+")

T = TypeVar("T")
Passthrough = tuple[type[BaseException], ...]
Judge = Callable[[Exception], "str | None"]  # names a failure and counts it; None: it is not ours to handle


def attempt(ours: Callable[[], T], judge: Judge, passthrough: Passthrough = ()) -> tuple[T | None, str]:
    """(what ``ours`` gives, "") or (None, why it failed, in the words of ``judge``).

    The caller goes on after a failure when the error and the tensors of its frames are gone. passthrough: exceptions
    that are messages (the user's interrupt).
    """
    try:
        return ours(), ""
    except passthrough:
        raise
    except Exception as error:  # noqa: BLE001  see the module
        reason = judge(error)
        if reason is None:
            raise
        return None, reason or type(error).__name__


@dataclass
class Fallback(Generic[T]):
    """ComfyUI's own way of running one call. Its errors must reach the user, so they are remembered."""

    run: Callable[[], T]  # may be replaced by one that can be called repeatedly
    error: BaseException | None = field(default=None, init=False)

    def __call__(self) -> T:
        """``run``'s result."""
        try:
            return self.run()
        except BaseException as error:
            self.error = error
            raise

    def rescue(self, ours: Callable[[], T], judge: Judge, passthrough: Passthrough = ()) -> T:
        """Runs ``ours``, which may call this fallback. If it fails by a fault of ours, the fallback runs instead."""
        try:
            out, reason = attempt(ours, lambda error: None if error is self.error else judge(error), passthrough)
        finally:
            self.error = None  # or it would keep its frames, with this among them, until garbage is collected
        return self() if reason else out


def failed(where: str, what: str) -> Judge:
    """Returns a judge for failures outside the tiers. It counts a failure, and logs it the first time."""

    def judge(error: Exception) -> str:
        reason = say("failed", what=what, error=named(error))
        if STATS.fallback(where, reason) == 1:
            log.warning("AnyShape: %s: %s\n%s", where, reason, "".join(traceback.format_exception(error)))
        return reason

    return judge


def named(error: Any) -> str:
    """Describes an error in one line, for reasons. Files lose their folders, as a browser elsewhere may show it."""
    first = without_folders(next(iter(str(error).strip().splitlines()), ""))
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def without_folders(text: str) -> str:
    """Returns ``text`` with each absolute path cut down to its last part."""
    return _FOLDERS.sub("", _QUOTED.sub(r"\1\2\1", text))
