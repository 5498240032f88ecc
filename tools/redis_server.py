"""A Redis for the tests of the shared kernel cache: where it is, how to get one, and one that runs for a while.

    python3 -m tools.redis_server    # on a machine of its own (CI): installs one if there is none; never fails

Standard library only. What is started listens on this machine alone, keeps nothing and is gone afterwards.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tools import debian

PACKAGE = "redis-server"
STARTING = 10.0  # seconds
MISSING = (
    "no redis-server was found. Install one (apt-get install redis-server), "
    "or name one: REDIS_SERVER=/path/to/redis-server make test"
)


def find() -> Path | None:
    """The server's program: REDIS_SERVER if that is set, else what is installed."""
    found = shutil.which(os.environ.get("REDIS_SERVER") or "redis-server")
    return Path(found) if found else None


def install() -> str:
    """Installs a server with apt-get where that is possible; "" or why there is still none."""
    if find():
        return ""
    problem = debian.install(PACKAGE)
    return "" if find() else f"{MISSING}. {problem}"


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """A server on a free port of 127.0.0.1, for the body of a ``with``. ``options`` as on its command line."""

    def __init__(self, *options: str) -> None:
        self.port, self._options = free_port(), options
        self._folder: tempfile.TemporaryDirectory | None = None
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "RedisServer":
        self._folder = tempfile.TemporaryDirectory()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self) -> None:
        """Starts it, empty, and waits until it answers."""
        common = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", self._folder.name)
        command = [str(find()), "--port", str(self.port), *common, *self._options]
        with open(Path(self._folder.name) / "log", "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + STARTING
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"redis-server did not start: {(Path(self._folder.name) / 'log').read_text()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
                link.sendall(b"PING\r\n")
                return bool(link.recv(64))  # or an error that asks for a password: it listens
        except OSError:
            return False

    def kill(self) -> None:
        """Ends it at once; clients see their connections break."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def freeze(self, frozen: bool = True) -> None:
        """Stops it where it is, with its connections open, or lets it go on."""
        self.process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)


def certificate(folder: Path) -> list[str]:
    """Makes cert.pem, for this machine alone, and its key.pem with openssl; the server's options for them."""
    paths = {"--tls-cert-file": folder / "cert.pem", "--tls-key-file": folder / "key.pem"}
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    make += ["-out", str(paths["--tls-cert-file"]), "-keyout", str(paths["--tls-key-file"])]
    subprocess.run(make, check=True, capture_output=True)
    return [str(part) for item in paths.items() for part in item]


if __name__ == "__main__":
    problem = install()
    print(
        f"[redis] {find()}" if not problem else f"[redis] Tests of the shared kernel cache will be skipped: {problem}"
    )
