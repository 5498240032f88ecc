"""Redis, asked in such a way that its troubles cost next to no time: limits, and when it is left alone."""

import hmac
import logging
import os
import platform
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import triton

from .values import Rejected, seal, unseal

try:
    import redis
except ImportError:  # told as an outage
    redis = None

log = logging.getLogger(__name__)

DEADLINE = 0.4  # seconds that a caller waits for one answer, names and handshakes included
BUDGET = 0.5  # seconds of waiting for nothing in a row, all answers together, until Redis counts as slow
WORTH = 0.15  # seconds that a hit spares at least: a launcher's C compiler
PAUSE, MAX_PAUSE = 30.0, 600.0  # seconds until Redis is tried again (in the background), doubled each time
SOCKET_TIMEOUT = 2.0  # seconds; of background work, no caller waits for it
FLUSH = 0.5  # seconds at the end of the process for what is still being stored
MAX_BYTES = 32 << 20  # of one value; kernels take tens to hundreds of kilobytes
FAILURES = (OSError, ValueError, *((redis.RedisError,) if redis else ()))


@dataclass
class Counts:
    """What happened since the process began; ``rejected`` and ``outages`` by reason."""

    hits: int = 0
    misses: int = 0
    skipped: int = 0  # not asked for, because Redis was given up for a while
    stored: int = 0
    bytes_read: int = 0
    bytes_stored: int = 0
    waited_seconds: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    outages: Counter[str] = field(default_factory=Counter)


class Remote:
    """Values in Redis by name. Never raises, and never holds a caller up for longer than the module promises."""

    def __init__(self, environ: Any = os.environ) -> None:
        self.counts = Counts()
        self.address = ""
        self.refuses_writes = False  # this user may only read, or Redis is a replica, or full
        self._key = environ.get("ANYSHAPE_FLEET_KEY", "").encode()
        self.prefix = f"anyshape:{_surroundings()}:{_key_id(self._key)}"
        self._lock = threading.Lock()
        self._down = ""  # why Redis is left alone at the moment
        self._retry_at, self._pause = 0.0, PAUSE
        self._waiting, self._since, self._wasted = 0, 0.0, 0.0  # callers, and seconds that brought nothing
        self._storing: set[threading.Thread] = set()
        self._client = self._connect(environ)

    def _connect(self, environ: Any) -> Any:
        """A client, which connects at its first command; None if there can be none."""
        if redis is None:
            self._give_up("the shared kernel cache needs Redis's client for Python: pip install redis")
            return None
        options = {"socket_timeout": SOCKET_TIMEOUT, "socket_connect_timeout": SOCKET_TIMEOUT, "retry": _no_retry()}
        try:
            if url := environ.get("ANYSHAPE_REDIS_URL"):
                client = redis.Redis.from_url(url, **options)
            else:
                host, port = environ.get("TRITON_REDIS_HOST", "localhost"), int(environ.get("TRITON_REDIS_PORT", 6379))
                client = redis.Redis(host=host, port=port, **options)
        except ValueError:  # its text may quote a password
            self._give_up("ANYSHAPE_REDIS_URL or TRITON_REDIS_PORT is not what Redis's client understands")
            return None
        where = client.connection_pool.connection_kwargs
        self.address = where.get("path") or f"{where.get('host')}:{where.get('port')}"
        return client

    def get(self, name: str) -> bytes | None:
        """The value, or None: not there, not right, or Redis is in trouble."""
        if not self._is_up():
            self.counts.skipped += 1
            return None
        with self._patience() as outcome:
            value = self._ask(lambda: self._client.getrange(name, 0, MAX_BYTES))
            data = outcome["data"] = self._checked(name, value)
        return data

    def _checked(self, name: str, value: bytes | None) -> bytes | None:
        try:
            data = unseal(name, value, self._key) if value else None
        except Rejected as reason:
            self.reject(str(reason))
            data = None
        with self._lock:
            self.counts.hits += data is not None
            self.counts.misses += data is None
            self.counts.bytes_read += len(data or b"")
        return data

    def reject(self, what: str) -> None:
        """Counts a value that was not used."""
        reason = f"in the shared kernel cache at {self.address} {what}; the kernel is compiled here and stored anew"
        with self._lock:
            self.counts.rejected[reason] += 1
            first = self.counts.rejected[reason] == 1
        if first:
            log.warning("AnyShape: %s", reason)

    def put(self, name: str, data: bytes) -> None:
        """Stores the value, behind the caller's back."""
        if self.refuses_writes or len(data) > MAX_BYTES // 2 or not self._is_up():
            return
        thread = _start(self._store, name, seal(name, data, self._key))
        with self._lock:
            self._storing = {other for other in self._storing if other.is_alive()} | {thread}

    def _store(self, name: str, value: bytes) -> None:
        try:
            self._client.set(name, value)
        except (redis.exceptions.NoPermissionError, redis.exceptions.ReadOnlyError):
            self.refuses_writes = True  # meant so by the operator
        except redis.exceptions.OutOfMemoryError:
            self.refuses_writes = True
            self._count(f"the shared kernel cache at {self.address} is full, new kernels are not stored. {FULL}")
        except FAILURES as error:
            self._give_up(self._why(error))
        else:
            with self._lock:
                self.counts.stored += 1
                self.counts.bytes_stored += len(value)

    def flush(self) -> None:
        """Waits a moment for what is still being stored."""
        end = time.monotonic() + FLUSH
        for thread in list(self._storing):
            thread.join(max(0.0, end - time.monotonic()))

    # When to leave Redis alone

    def _ask(self, command: Callable[[], Any]) -> Any:
        """The command's result, or None; in a thread, because a resolver or a trickle of bytes obeys no timeout."""
        answers: queue.SimpleQueue = queue.SimpleQueue()
        _start(_answer, command, answers)
        try:
            value, error = answers.get(timeout=DEADLINE)
        except queue.Empty:
            value, error = None, TimeoutError()
        if error is not None:
            self._give_up(self._why(error))
        return value

    @contextmanager
    def _patience(self) -> Iterator[dict[str, Any]]:
        """Counts the seconds in which somebody waits, however many do, less what a hit is worth."""
        begun, outcome = time.monotonic(), {}
        with self._lock:
            self._wasted = 0.0 if not self._waiting and begun - self._since > PAUSE else self._wasted
            self._since = self._since if self._waiting else begun
            self._waiting += 1
        yield outcome
        now = time.monotonic()
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._wasted += now - self._since
                self.counts.waited_seconds += now - self._since
            if outcome.get("data") is not None:
                self._wasted = max(0.0, self._wasted - min(WORTH, now - begun))
            slow = self._wasted > BUDGET
        if slow:
            self._give_up(f"the shared kernel cache at {self.address} answers too slowly; {ADVICE}")

    def _is_up(self) -> bool:
        """Whether to ask Redis. If its pause is over, somebody else than the caller finds out."""
        with self._lock:
            if not self._down:
                return True
            if self._client is None or time.monotonic() < self._retry_at:
                return False
            self._retry_at = time.monotonic() + self._pause
        _start(self._probe)
        return False

    def _probe(self) -> None:
        begun = time.monotonic()
        try:
            self._client.ping()
        except FAILURES as error:
            return self._give_up(self._why(error), again=True)
        with self._lock:
            if time.monotonic() - begun < DEADLINE:
                self._down, self._wasted = "", 0.0

    def _give_up(self, reason: str, again: bool = False) -> None:
        """Leaves Redis alone for a while; many callers that fail at once count once."""
        with self._lock:
            if self._down and not again:
                return
            self._down, self._retry_at = reason, time.monotonic() + self._pause
            self._pause = min(MAX_PAUSE, 2 * self._pause)
        self._count(reason)

    def _count(self, reason: str) -> None:
        with self._lock:
            self.counts.outages[reason] += 1
            first = self.counts.outages[reason] == 1
        if first:
            log.warning("AnyShape: %s", reason)

    def _why(self, error: Exception) -> str:
        where = f"the shared kernel cache at {self.address}"
        if isinstance(error, TimeoutError | redis.exceptions.TimeoutError):
            return f"{where} does not answer; {ADVICE}"
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        refused = (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError)
        if isinstance(error, refused) or line.startswith("NOAUTH"):
            return (
                f"{where} refuses this worker ({line}); kernels are compiled here. Check ANYSHAPE_REDIS_URL and the ACL"
            )
        return f"{where} cannot be used ({line}); {ADVICE}"

    def snapshot(self) -> dict[str, Any]:
        """The counters, JSON-ready; ``state`` is up, down or read-only."""
        with self._lock:
            counts = vars(self.counts) | {name: dict(vars(self.counts)[name]) for name in ("rejected", "outages")}
            state = "down" if self._down else "read-only" if self.refuses_writes else "up"
        return {"address": self.address, "state": state, "signed": bool(self._key), **counts} | {
            "waited_seconds": round(self.counts.waited_seconds, 3)
        }

    def forget(self) -> None:
        """Drops what was counted as rejected or as an outage."""
        with self._lock:
            self.counts.rejected.clear()
            self.counts.outages.clear()


FULL = "Raise its maxmemory, or let it drop what is old (maxmemory-policy allkeys-lru)"
ADVICE = "kernels are compiled here. Check that Redis runs there, has memory and time, and the network in between"


def _no_retry() -> Any:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Retry(NoBackoff(), 0)


def _surroundings() -> str:
    """What Triton's keys leave out for its launchers, which are C extensions of this Python, Triton and C library."""
    libc = "".join(platform.libc_ver())
    return ":".join(("1", triton.__version__, sys.implementation.cache_tag, platform.machine(), libc))


def _key_id(key: bytes) -> str:
    """Workers with different keys keep apart, so that a change of the key is no storm of rejections."""
    return hmac.digest(key, b"name", "sha256")[:4].hex() if key else "unsigned"


def _start(work: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, name="AnyShape's shared kernel cache", daemon=True)
    thread.start()
    return thread


def _answer(command: Callable[[], Any], answers: queue.SimpleQueue) -> None:
    try:
        answers.put((command(), None))
    except FAILURES as error:
        answers.put((None, error))
