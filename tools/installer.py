"""How packages get into a virtual environment: by uv where that can be had, else by pip.

uv fetches and unpacks on all cores at once, in half the time. It reads nothing of pip's configuration, which says where
this machine's packages come from, so it is told; what it could not be told is left to pip, and so is whatever uv fails
at. Standard library only.
"""

import ast
import os
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from tools.paths import CACHE, ROOT, VENV, ProjectError, project_env

UV = "uv==0.13.9"
LOG = CACHE / "setup.log"

# The sections that count when pip installs; the later one of two has the word.
PLACES = ("global", "install", ":env:")

# pip's settings, and uv's variables for them.
TOLD = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "find-links": ("UV_FIND_LINKS",),
    "constraint": ("UV_CONSTRAINT",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTPS_PROXY", "HTTP_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
}
# With what uv parts several of them; pip does it with white space.
SEVERAL = {"extra-index-url": " ", "find-links": ",", "constraint": " ", "trusted-host": " "}
# These change neither what is installed nor where it comes from.
NEEDLESS = {
    "break-system-packages", "cache-dir", "compile", "config-file", "disable-pip-version-check", "no-cache-dir",
    "no-color", "no-compile", "no-input", "no-python-version-warning", "no-warn-script-location", "prefer-binary",
    "progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action", "verbose",
}  # fmt: skip


def say(text: str) -> None:
    """A line for the person who waits."""
    print(f"[setup] {text}", flush=True)


def install(python: Path, *arguments: str) -> None:
    """Install into the environment of ``python`` what ``arguments``, in pip's words, name."""
    try:
        _run_uv(python, *arguments)
    except ProjectError as problem:
        with LOG.open("a") as log:
            log.write(f"{problem}\nSo pip installs.\n")
        run_pip(python, "install", "--no-compile", *arguments)  # most of it is never imported


def drop_downloads(python: Path) -> None:
    """Downloads are kept until all is installed, so that a repaired run need not fetch them again; then they go.

    pip's with `.venv`, beside which another environment may be made.
    """
    shutil.rmtree(_uv_cache(python), ignore_errors=True)
    if "PIP_CACHE_DIR" not in os.environ and python.is_relative_to(VENV):
        shutil.rmtree(CACHE / "pip", ignore_errors=True)


def run_pip(python: Path, *arguments: str) -> None:
    """Run the pip of ``python``'s environment. Raises ``ProjectError`` with its last words."""
    _run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments], project_env())


# uv -----------------------------------------------------------------------------------------------------------------


def _run_uv(python: Path, *arguments: str) -> None:
    """Raises ``ProjectError`` if there is no uv, if pip's settings say what it cannot be told, or if it fails."""
    if "PIP_CACHE_DIR" in os.environ:
        raise ProjectError("pip's cache was named on purpose; uv does not read it.")
    environment = {**project_env(), **_uv_environment(python)}
    program = python.with_name("uv.exe" if os.name == "nt" else "uv")
    run_pip(python, "install", "--only-binary=:all:", UV)
    _run([str(program), "pip", "install", "--python", str(python), *arguments], environment)


def _uv_environment(python: Path) -> dict[str, str]:
    listed = subprocess.run([str(python), "-m", "pip", "config", "list"], capture_output=True, text=True)
    if listed.returncode:
        raise ProjectError(f"pip config list failed:\n{listed.stderr}")
    # As pip looks for packages: the newest of all indexes; with the machine's certificates; in its own Python.
    fixed = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    # Beside the environment, so that its files are linked there and not copied.
    return fixed | {"UV_CACHE_DIR": str(_uv_cache(python))} | uv_variables(listed.stdout)


def _uv_cache(python: Path) -> Path:
    return python.parents[1] / "uv-cache"


def uv_variables(listed: str) -> dict[str, str]:
    """uv's environment for what `pip config list` said; ``ProjectError`` names a setting that uv cannot be told."""
    settings: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        name, found, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if not found or section not in PLACES:
            continue
        if key not in TOLD and key not in NEEDLESS:
            raise ProjectError(f"uv is not told pip's setting {key!r}.")
        rank = PLACES.index(section)
        if key in TOLD and (key not in settings or settings[key][0] <= rank):
            settings[key] = rank, str(ast.literal_eval(value))
    values = {key: SEVERAL.get(key, " ").join(value.split()) for key, (_, value) in settings.items()}
    return {name: value for key, value in values.items() for name in TOLD[key]}


# Running them -------------------------------------------------------------------------------------------------------


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Its whole output goes to the log, its large downloads and the time to the screen."""
    said: deque[str] = deque(maxlen=12)
    with LOG.open("a") as log, Heartbeat() as heart:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in process.stdout:
            log.write(line)
            said.append(line.rstrip())
            heart.note(line.strip())
    if process.wait():
        raise ProjectError(_failure(command, said))


def _failure(command: list[str], said: Iterable[str]) -> str:
    lines = [line for line in said if line]
    what = " ".join(part for part in command[:6] if part in ("pip", "install", "download"))
    return (
        f"{what} failed. Its last words:\n  " + "\n  ".join(lines) + "\n"
        "If the package registry could not be reached, run the same command again: it goes on from here. "
        f"The whole log is {LOG.relative_to(ROOT)}."
    )


class Heartbeat:
    """Tells every 15 seconds that pip or uv is still at work, and at what."""

    def __enter__(self) -> "Heartbeat":
        self.start, self.doing, self.done = time.monotonic(), "starting", threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()

    def note(self, line: str) -> None:
        """Remember what a line of their output says they are doing."""
        first = line.split(" ")[0]
        if first in ("Downloading", "Collecting", "Building"):
            self.doing = " ".join(line.split()[:2]).lower()
        elif line.startswith(("Installing collected", "Prepared")):
            self.doing = "unpacking what was downloaded (nothing more to fetch)"

    def _beat(self) -> None:
        while not self.done.wait(15):
            say(f"  {time.monotonic() - self.start:4.0f} s: {self.doing}")
