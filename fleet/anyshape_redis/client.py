"""Asks Redis in a way that its troubles cost next to no time: there are time limits, and pauses after failures."""

import hmac
import logging
import os
import platform
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import triton

from .signed import Rejected, seal, unseal

try:
    import redis
except ImportError:  # told as an outage
    redis = None

log = logging.getLogger(__name__)

# A caller waits in short slices, and what counts is the time in which the process does nothing else: while other
# threads compile or import, Python lets everybody wait for longer, and that says nothing about Redis.
SLICE, MOST = 0.05, 18  # seconds of a slice, and slices that a caller waits at most
PATIENCE = 0.4  # idle seconds for one answer, names and handshakes included
BUDGET = 0.4  # idle seconds for more than it was worth, within PAUSE, until Redis counts as slow
WORTH = 0.15  # seconds that a hit spares at least: a launcher's C compiler
REFRESH = 5.0  # seconds until the list of what is there is read again
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
    waited_seconds: float = 0.0  # idle, of all callers together
    rejected: Counter[str] = field(default_factory=Counter)
    outages: Counter[str] = field(default_factory=Counter)


class Remote:
    """Values in Redis by name. Never raises, and never holds a caller up for longer than the module promises."""

    def __init__(self, environ: Any = os.environ) -> None:
        self.counts = Counts()
        self.address = ""  # of a socket its name: the stats leave this machine
        self._socket = ""  # its path
        self.refuses_writes = False  # this user may only read, or Redis is a replica, or full
        self._key = environ.get("ANYSHAPE_FLEET_KEY", "").encode()
        self.prefix = f"anyshape:{_surroundings()}:{_key_id(self._key)}"
        self._lock = threading.Lock()
        self._down = ""  # why Redis is left alone at the moment
        self._retry_at, self._pause = 0.0, PAUSE
        self._wasted, self._wasting_since = 0.0, 0.0  # seconds that were not worth it
        self._names: set[bytes] = set()  # what is there, as of ...
        self._names_read, self._reading = -REFRESH, threading.Lock()
        self._storing: set[threading.Thread] = set()
        self._client = self._connect(environ)

    def _connect(self, environ: Any) -> Any:
        """A client, which connects at its first command; None if there can be none."""
        if not self._key and environ.get("ANYSHAPE_FLEET_UNSIGNED") != "1":
            self._give_up(NO_KEY)
            return None
        if redis is None:
            self._give_up("the shared kernel cache needs Redis's client for Python: pip install redis")
            return None
        options = {"socket_timeout": SOCKET_TIMEOUT, "socket_connect_timeout": SOCKET_TIMEOUT, "retry": None}  # at once
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
        self._socket = where.get("path") or ""
        self.address = os.path.basename(self._socket) or f"{where.get('host')}:{where.get('port')}"
        return client

    def get(self, name: str, read: Callable[[bytes], Any] = bytes) -> Any:
        """What ``read`` makes of the value, or None: not there, not right, or Redis is in trouble."""
        there = self._is_there(name)
        if not self._is_up():
            self.counts.skipped += 1
            return None
        path = f"{self.prefix}:{name}"
        value = self._ask(lambda: self._client.getrange(path, 0, MAX_BYTES), WORTH) if there else None
        return self._checked(path, value, read)

    def _is_there(self, name: str) -> bool:
        """Whether Redis lists it. So missing values cost no question, and a worker that starts asks for many."""
        with self._reading:
            old = time.monotonic() - self._names_read > REFRESH
            if name.encode() not in self._names and old and self._is_up():
                self._names = self._ask(lambda: self._client.smembers(f"{self.prefix}:names"), 0.0) or set()
                self._names_read = time.monotonic()
        return name.encode() in self._names

    def _checked(self, name: str, value: bytes | None, read: Callable[[bytes], Any]) -> Any:
        try:
            found = read(unseal(name, value, self._key)) if value else None
        except Rejected as reason:
            self.reject(str(reason))
            found = None
        with self._lock:
            self.counts.hits += found is not None
            self.counts.misses += found is None
            self.counts.bytes_read += len(value or b"") if found is not None else 0
        return found

    def reject(self, what: str) -> None:
        """Counts a value that was not used."""
        reason = f"in the shared kernel cache at {self.address} {what}; the kernel is compiled here and stored again"
        with self._lock:
            self.counts.rejected[reason] += 1
            first = self.counts.rejected[reason] == 1
        if first:
            log.warning("AnyShape: %s", reason)

    def put(self, name: str, data: bytes) -> None:
        """Stores the value in the background."""
        if self.refuses_writes or len(data) > MAX_BYTES // 2 or not self._is_up():
            return
        thread = _start(self._store, name, data)
        with self._lock:
            self._storing = {other for other in self._storing if other.is_alive()} | {thread}

    def _store(self, name: str, data: bytes) -> None:
        path = f"{self.prefix}:{name}"
        value = seal(path, data, self._key)
        try:
            self._client.set(path, value)
            self._client.sadd(f"{self.prefix}:names", name)
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

    def _ask(self, command: Callable[[], Any], worth: float) -> Any:
        """The command's result, or None; ``worth``: seconds that an answer may take and not count as slow.

        In a thread, because a resolver or a trickle of bytes obeys no timeout.
        """
        answers: queue.SimpleQueue = queue.SimpleQueue()
        _start(_answer, command, answers)
        value, error, idle = None, TimeoutError(), 0.0
        for _ in range(MOST):
            begun, busy = time.monotonic(), time.process_time()
            with suppress(queue.Empty):
                value, error = answers.get(timeout=SLICE)
            idle += max(0.0, min(SLICE, time.monotonic() - begun) - (time.process_time() - busy))
            if idle >= PATIENCE or not isinstance(error, TimeoutError):
                break
        if error is not None:
            self._give_up(self._why(error))
        self._waited(idle, worth)
        return value

    def _waited(self, seconds: float, worth: float) -> None:
        """Counts the time, and gives up on Redis if it is slow."""
        with self._lock:
            if time.monotonic() - self._wasting_since > PAUSE:
                self._wasted, self._wasting_since = 0.0, time.monotonic()
            self._wasted += max(0.0, seconds - worth)
            self.counts.waited_seconds += seconds
            slow = self._wasted > BUDGET
        if slow:
            self._give_up(f"the shared kernel cache at {self.address} answers too slowly; {ADVICE}")

    def _is_up(self) -> bool:
        """Whether to ask Redis. If its pause is over, another thread tries it first."""
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
            if time.monotonic() - begun < PATIENCE:
                self._down, self._wasted, self._names_read = "", 0.0, -REFRESH

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
        line = line.replace(self._socket or self.address, self.address)
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
        """Drops the rejections and outages that were counted."""
        with self._lock:
            self.counts.rejected.clear()
            self.counts.outages.clear()


NO_KEY = (
    "the shared kernel cache is not used without ANYSHAPE_FLEET_KEY: its values are code, and whoever can write there "
    "could run theirs here. Give all workers the same long secret, or set ANYSHAPE_FLEET_UNSIGNED=1 if you accept that"
)
FULL = "Raise its maxmemory, or let it drop what is old (maxmemory-policy allkeys-lru)"
ADVICE = "kernels are compiled here. Check that Redis runs there, has memory and time, and the network in between"


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
