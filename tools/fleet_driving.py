"""What the tests of the shared kernel cache drive and compare: worker processes, values in Redis, servers."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.paths import ROOT

FLEET = ROOT / "fleet"
KEY = "a long secret of the fleet's"
KERNELS = ["geglu_kernel", "upsample_kernel", "launcher"]
PAUSES = {"PAUSE": 30.0}
LIMIT = 1.0  # seconds that a Redis in trouble may cost in all
COMPILED = {"compiled": KERNELS[:2], "found": []}  # the launcher is no kernel
FOUND = {"compiled": [], "found": KERNELS[:2]}
Redis = Any  # redis.Redis, a package that need not be there


class Worker:
    """A process of tools.fleet_worker."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(FLEET), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.fleet_worker"], cwd=ROOT, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __call__(self, folder: Path, port: int, kernels: list[str] = KERNELS, **more: Any) -> dict[str, Any]:
        """Compiles with the local cache in ``folder`` and the shared one at ``port``."""
        env = {"TRITON_CACHE_DIR": str(folder), "TRITON_CACHE_MANAGER": "anyshape_redis:Manager"} | {
            "TRITON_REDIS_HOST": "127.0.0.1", "TRITON_REDIS_PORT": str(port), "ANYSHAPE_FLEET_KEY": KEY,
            "ANYSHAPE_REDIS_URL": None,
        } | more.pop("env", {})  # fmt: skip
        self.process.stdin.write(json.dumps({"env": env, "kernels": kernels, "settings": PAUSES} | more) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)


@contextmanager
def started(count: int) -> Iterator[tuple[Worker, ...]]:
    """So many workers, which start side by side."""
    workers = tuple(Worker() for _ in range(count))
    yield workers
    for each in workers:
        each.end()


def exit_status(child: int, limit: float = 10.0) -> int:
    """Of a forked process; one that does not end in time is killed."""
    end = time.monotonic() + limit
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return done[1]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many threads of this process that do nothing but compute."""
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(10_000))

    for _ in range(count):
        threading.Thread(target=compute).start()
    try:
        yield
    finally:
        done.set()


class Listener:
    """A real TCP server that treats every connection as ``handle`` says."""

    def __init__(self, handle: Callable[[socket.socket], None]) -> None:
        self._socket, self._handle = socket.create_server(("127.0.0.1", 0)), handle
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link = self._socket.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            try:
                self._handle(link)
            except OSError:
                pass

    def close(self) -> None:
        self._socket.close()


def mute(link: socket.socket) -> None:
    while link.recv(1 << 16):
        pass


def trickle(link: socket.socket) -> None:
    """Never silent for as long as a timeout, and never done."""
    link.recv(1 << 16)
    link.sendall(b"$9999999\r\n")
    while True:
        link.sendall(b"x")
        time.sleep(0.05)


def not_redis(link: socket.socket) -> None:
    link.recv(1 << 16)
    link.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: another\r\n\r\n")


def relay(port: int, delay: dict[str, float], limit: int = 1 << 40) -> Callable[[socket.socket], None]:
    """The Redis at ``port``, each answer delayed; breaks off after ``limit`` bytes of answers."""

    def handle(link: socket.socket) -> None:
        left = limit
        with socket.create_connection(("127.0.0.1", port)) as upstream:
            upstream.settimeout(0.02)
            while left > 0 and (question := link.recv(1 << 16)):
                upstream.sendall(question)
                time.sleep(delay["seconds"])
                while left > 0 and (answer := _received(upstream)):
                    link.sendall(answer[:left])
                    left -= len(answer)

    return handle


def _received(upstream: socket.socket) -> bytes:
    try:
        return upstream.recv(1 << 16)
    except TimeoutError:
        return b""


@contextmanager
def listeners() -> Iterator[Callable[..., int]]:
    """Starts listeners that treat a connection as they are told; gives their ports."""
    started: list[Listener] = []

    def listen(handle: Callable[[socket.socket], None]) -> int:
        started.append(Listener(handle))
        return started[-1].port

    yield listen
    for each in started:
        each.close()


# A client in this process -----------------------------------------------------------------------------------------


@contextmanager
def package(monkeypatch: Any) -> Iterator[ModuleType]:
    """The package in this process, as an operator's PYTHONPATH makes it importable."""
    monkeypatch.syspath_prepend(str(FLEET))
    import anyshape_redis

    anyshape_redis.renew()
    yield anyshape_redis
    anyshape_redis.renew()


def remote_at(port: int, **env: str) -> Any:
    """A client of the Redis at this port."""
    from anyshape_redis.client import Remote

    return Remote({"TRITON_REDIS_HOST": "127.0.0.1", "TRITON_REDIS_PORT": str(port), "ANYSHAPE_FLEET_KEY": KEY} | env)


def outage(remote: Any) -> str:
    """Why it gives nothing."""
    assert remote.get("name") is None and remote.put("name", b"data") is None
    (reason,) = remote.snapshot()["outages"]
    return reason


def ask(remote: Any, threads: int, count: int = 60) -> tuple[float, dict[str, Any]]:
    """(seconds, counters) of asking for ``count`` names, and of storing what is not there."""
    begun = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda n: remote.get(f"name{n}") or remote.put(f"name{n}", bytes(1000)), range(count)))
    return time.monotonic() - begun, remote.snapshot()


# Values in Redis --------------------------------------------------------------------------------------------------


def fill(client: Redis, values: dict[bytes, bytes]) -> Redis:
    """Puts back what was dumped."""
    for name, value in values.items():
        client.restore(name, 0, value)
    return client


def values(store: Redis) -> list[bytes]:
    """The names of all values in Redis."""
    return sorted(name for name in store.keys() if not name.endswith(b":names"))


def forged(name: bytes, value: bytes, key: str) -> bytes:
    """The value again, with a right checksum, but signed by somebody else."""
    from anyshape_redis.signed import MAGIC, seal

    return seal(name.decode(), value[len(MAGIC) + 64 :], key.encode())


def _flipped(value: bytes) -> bytes:
    place = random.randrange(80, len(value))
    return value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]


DAMAGE = {
    "garbage": (lambda value: os.urandom(300), "not written by this cache"),
    "empty of sense": (lambda value: b"{}", "not written by this cache"),
    "truncated": (lambda value: value[:-7], "damaged"),
    "cut to nothing": (lambda value: value[:50], "cut off"),
    "one bit": (_flipped, "damaged"),
}


# A worker's answer ------------------------------------------------------------------------------------------------


def events(answer: dict[str, Any]) -> dict[str, list[str]]:
    """What was compiled, and what was found."""
    return {name: answer[name] for name in ("compiled", "found")}


def counted(answer: dict[str, Any]) -> tuple[int, ...]:
    """(hits, misses, skipped, stored)."""
    return tuple(answer["fleet"][name] for name in ("hits", "misses", "skipped", "stored"))


def check_fallback(answer: dict[str, Any], right: dict[str, str], words: str) -> None:
    """Right kernels, compiled here, soon, and a reason that says what to do."""
    assert events(answer) == COMPILED and answer["code"] == right
    (fallback,) = answer["fallbacks"]
    assert fallback["where"] == "shared kernel cache" and fallback["count"] == 1
    assert words in fallback["reason"] and "compiled here. Check" in fallback["reason"], fallback
    assert answer["fleet"]["waited_seconds"] < LIMIT and answer["fleet"]["state"] == "down"
    assert counted(answer)[0] == 0 and answer["fleet"]["skipped"] >= 2  # after the first nobody asks


def refused(answer: dict[str, Any], right: dict[str, str]) -> int:
    """How many values were; what they hold was compiled instead, and each reason is counted where users look."""
    assert events(answer) == COMPILED and answer["code"] == right and answer["fleet"]["hits"] == 0
    shown = {fallback["reason"]: fallback["count"] for fallback in answer["fallbacks"]}
    assert shown == answer["fleet"]["rejected"] and answer["fleet"]["state"] == "up"
    return sum(shown.values())
