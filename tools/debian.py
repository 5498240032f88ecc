"""Debian packages that some tests need, installed where that is possible. Standard library only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tools.paths import CACHE

LOCK = CACHE / "installing"  # held while packages are installed


def wait() -> None:
    """Until no process of this project installs packages."""
    if LOCK.exists():
        with LOCK.open() as file, _locked(file, "LOCK_SH"):
            pass


@contextmanager
def _locked(file: Any, how: str) -> Iterator[None]:
    """The system gives the lock up when the process ends, however it does."""
    with suppress(ImportError):  # not on Windows, where nothing is installed, either
        import fcntl

        fcntl.flock(file, getattr(fcntl, how))
    yield


def install(*packages: str) -> str:
    """Installs with apt-get, without starting services; "" or why it could not."""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return "It is not installed by itself: that takes apt-get, as root."
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # services are not started
    install = ["install", "-y", "-q", "--no-install-recommends", *packages]
    CACHE.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as file, _locked(file, "LOCK_EX"):
        for command in (install, ["update", "-q"], install):  # the lists may be there, and of today
            done = subprocess.run(["apt-get", *command], capture_output=True, text=True, env=env)
            if command is install and not done.returncode:
                return ""
    return f"apt-get install failed: {done.stderr.strip()[-500:]}"
