"""What the tests of the shared kernel cache drive: a worker process, and TCP servers that are trouble."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.paths import ROOT

FLEET = ROOT / "fleet"
KEY = "a long secret of the fleet's"
KERNELS = ["geglu_kernel", "upsample_kernel", "launcher"]
PAUSES = {"PAUSE": 30.0}


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
