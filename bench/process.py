"""A benchmark's part that runs in a process of its own, with compiler caches of its own.

Python keeps its bytecode between workers, as it does for users; some machines switch that off.

Such a worker prints JSON, one object a line; what else it prints is dropped, what it writes to stderr is shown. Its
first line says that the model is loaded: time is counted from there.
"""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tools.paths import CACHE, ROOT

LOADING_LIMIT = 300  # seconds until a worker's first line
BYTECODE = {"PYTHONPYCACHEPREFIX": str(CACHE / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}


class Ended(NamedTuple):
    """What a worker printed, and its exit code; None if it was stopped at the limit."""

    lines: list[dict[str, Any]]
    code: int | None


def caches(folder: Path) -> dict[str, str]:
    """The environment variables that put every compiler's cache into ``folder``, and nothing into them from a store."""
    compilers = {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return compilers | {"ANYSHAPE_ARTIFACTS_MB": "0"}


def follow(command: list[str], folder: Path, limit: float, more: dict[str, str] | None = None) -> Ended:
    """Runs ``command`` with its caches in ``folder``, until it ends or ``limit`` seconds after its first line.

    ``more``: further environment variables.
    """
    env = os.environ | BYTECODE | caches(folder) | (more or {})
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    lines, loaded = [], threading.Event()
    reader = threading.Thread(target=_read, args=(process.stdout, lines, loaded), daemon=True)
    reader.start()
    try:
        loaded.wait(LOADING_LIMIT)
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    reader.join(10)
    return Ended(lines, code)


def _read(output: TextIO, lines: list[dict[str, Any]], loaded: threading.Event) -> None:
    """Collects the JSON lines. ``loaded`` is set at the first, or at the end if there is none."""
    for text in output:
        if text.startswith("{"):
            lines.append(json.loads(text))
            loaded.set()
    loaded.set()


def _end(process: subprocess.Popen) -> None:
    """Ends the worker and the compilers that it started, which outlive it and hold its output open."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them have ended by themselves
    process.wait()
