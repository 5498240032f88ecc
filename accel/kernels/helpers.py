"""Compiles kernels in processes beside this one, where many are new.

Triton's compiler holds Python's lock for much of its work, so threads help little. A helper puts its kernel into
Triton's cache, and this process finds it there, as after a restart. So a helper decides nothing: what one cannot
compile, and everything where none can run, this process compiles itself.
"""

import contextlib
import functools
import itertools
import linecache
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, PriorityQueue
from types import FunctionType, SimpleNamespace
from typing import Any

from triton import JITFunction
from triton.compiler import compiler
from triton.runtime import cache

from ..artifacts.triton_cache import without_steps

PROGRAM = Path(__file__).with_name("compile_helper.py")
HERE = 2  # kernels that this process compiles itself at one time: so few are not worth a helper
MOST = 12  # helpers; each is ready after a quarter of a second
CORES_LEFT = 2  # that are not the helpers'
LIMIT = 120.0  # seconds for one kernel
BEGUN, OURS, UNBEGUN = range(3)  # the order in which seats are taken
_BROKEN = (OSError, EOFError, ValueError, TypeError, AttributeError, pickle.PickleError)  # a helper, or what it is sent


class _NotCached(Exception):
    """Triton would have to compile."""


class _Helper:
    """One process, started when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def compile(self, request: tuple) -> bool:
        """Whether it is done. Raises one of ``_BROKEN`` if the helper is of no more use."""
        sent = pickle.dumps(request)
        if self._process is None:
            self._process = _started()
            pickle.dump((sys.path, _hash()), self._process.stdin)
        limit = threading.Timer(LIMIT, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            self._process.stdin.write(sent)
            self._process.stdin.flush()
            answer = self._process.stdout.read(1)
        finally:
            limit.cancel()
        if not answer:
            raise EOFError("the helper has ended")
        return answer == b"1"

    def end(self) -> None:
        """Ends it, after what it does now; nobody waits for that."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            threading.Thread(target=process.wait, name="AnyShape's helper ends", daemon=True).start()


def _started() -> subprocess.Popen:
    apart = {"creationflags": subprocess.CREATE_NO_WINDOW} if os.name == "nt" else {"start_new_session": True}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, str(PROGRAM)], **pipes, **apart)


class _Seats:
    """Where kernels are compiled at one time: in helpers that run, in this process, in helpers not yet started.

    The seat of a helper that has ended is this process's.
    """

    def __init__(self, helpers: int) -> None:
        self._numbers, self._free, self._closed = itertools.count(), PriorityQueue(), False
        for _ in range(HERE):
            self._put(OURS, None)
        for _ in range(helpers):
            self._put(UNBEGUN, _Helper())

    def _put(self, rank: int, helper: _Helper | None) -> None:
        self._free.put((rank, next(self._numbers), helper))

    @contextmanager
    def taken(self) -> Iterator[_Helper | None]:
        """Gives the first free seat for the body, None for this process. A helper that breaks there ends."""
        _, _, helper = self._free.get()
        works = True
        try:
            yield helper
        except _BROKEN:
            if helper is None:
                raise
            works = False
        finally:
            self._back(helper, works and not self._closed)

    def _back(self, helper: _Helper | None, works: bool) -> None:
        if helper is not None and works:
            self._put(BEGUN, helper)
            return
        if helper is not None:
            helper.end()
        self._put(OURS, None)

    def close(self) -> None:
        """Ends the helpers, those at work when they return. What is asked for from here on, this process compiles."""
        self._closed, free = True, []
        with contextlib.suppress(Empty):
            while True:
                free.append(self._free.get_nowait())
        for _, _, helper in free:  # somebody may be about to take one
            self._back(helper, works=False)


class Helpers:
    """The helpers of this process: they run while kernels are being compiled, and end with that."""

    def __init__(self) -> None:
        self.compiled = 0
        self._useless = False  # what a helper compiles is not found here
        self._lock, self._users = threading.Lock(), 0
        self._seats: _Seats | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Helpers may start within the body; the last of several bodies ends them."""
        with self._lock:
            self._users += 1
            if self._seats is None and (count := self._count()):
                self._seats = _Seats(count)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._seats is not None:
                    self._seats.close()
                    self._seats = None

    def _count(self) -> int:
        """How many there may be."""
        if self._useless or not sys.executable or getattr(sys, "frozen", False) or _cached() is None:
            return 0
        return max(0, min(MOST, _cores() - CORES_LEFT))

    def may_compile(self, kernel: Any, device: int) -> None:
        """Lets helpers compile this kernel's variants for the device of this number."""
        if self._seats is not None and hasattr(kernel, "device_caches"):
            _ = kernel.device_caches[device]  # with these Triton sets what compiles
            if getattr(kernel, "compile", None) is compiler.compile:
                kernel.compile = self.compile

    def compile(self, src: Any, target: Any = None, options: dict[str, Any] | None = None, **rest: Any) -> Any:
        """``triton.compile``: by a helper, if the kernel is new and more are than this process compiles itself."""
        ours = functools.partial(compiler.compile, src, target=target, options=options, **rest)
        seats, done = self._seats, False
        if seats is None:
            return ours()
        from_cache = functools.partial(_cached(), src, target=target, options=options, **rest)
        with contextlib.suppress(_NotCached):
            return from_cache()
        with seats.taken() as helper:
            if helper is None:
                return ours()
            done = helper.compile(_request(src, target, options))
        try:
            found = from_cache()
        except _NotCached:
            if done:
                self._useless = True
                seats.close()
            return ours()
        with self._lock:
            self.compiled += 1
        return found


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _request(src: Any, target: Any, options: dict[str, Any] | None) -> tuple:
    """What ``compile_helper`` takes."""
    file = src.fn.fn.__code__.co_filename
    imported = {
        name: (_text(each.fn.__code__.co_filename), each.__name__)
        for name, each in src.fn.fn.__globals__.items()
        if isinstance(each, JITFunction) and each.fn.__code__.co_filename != file
    }
    return _text(file), src.fn.__name__, imported, (src.signature, src.constants, src.attrs), target, options


def _text(file: str) -> str:
    return "".join(linecache.getlines(file))


@functools.cache
def _cached() -> Callable[..., Any] | None:
    """``triton.compile``, but it raises ``_NotCached`` where it would begin; None where Triton does otherwise."""
    if not isinstance(compiler.compile, FunctionType) or "ir" not in compiler.compile.__code__.co_names:
        return None

    def begin() -> None:
        raise _NotCached

    def read(src: Any, files: dict[str, str], name: str) -> Any:
        return compiler.CompiledKernel(src, without_steps(files), name)

    return among(compiler.compile, ir=SimpleNamespace(context=begin), CompiledKernel=read)


def _hash() -> str:
    """Triton's, over its own sources."""
    return (cache if hasattr(cache, "triton_key") else compiler).triton_key()


def among(function: FunctionType, **names: Any) -> FunctionType:
    """A copy of ``function`` for which these global names mean something else."""
    return FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )


HELPERS = Helpers()
