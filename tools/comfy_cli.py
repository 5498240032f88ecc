"""comfy-cli, the registry's own program, in a virtual environment of its own: its packages are not those of `.venv`.

    python3 -m tools.comfy_cli              # make package: checks the pack and packs it, as the registry would
    python3 -m tools.comfy_cli publish      # and gives it to the registry; the key is in REGISTRY_ACCESS_TOKEN

Standard library only. It asks nothing, reports nothing to its makers and writes nothing outside the project folder.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools import installer, release
from tools.paths import CACHE, ROOT, ProjectError, project_env
from tools.setup_env import make_venv

FOLDER = CACHE / "comfy-cli"
PYTHON = FOLDER / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = FOLDER / "anyshape.stamp"
REQUIREMENTS = ROOT / "requirements-publish.txt"

PACKED = ROOT / "node.zip"  # where comfy-cli puts it, whatever it is told
ARCHIVE = CACHE / "package" / "anyshape.zip"
TOKEN = "REGISTRY_ACCESS_TOKEN"
MISSING = "comfy-cli is not set up here: make package"

# comfy-cli ends with 0 all the same when it says one of these.
COMPLAINTS = ("Warning", "Security warnings", "File not found")


def ready() -> bool:
    """Whether comfy-cli is installed as requirements-publish.txt asks."""
    return PYTHON.exists() and STAMP.is_file() and STAMP.read_text() == REQUIREMENTS.read_text()


def prepare() -> None:
    """Install comfy-cli where that is not done yet; the stamp is written last."""
    if ready():
        return
    make_venv(FOLDER)
    installer.install(PYTHON, "--requirement", str(REQUIREMENTS))
    installer.drop_downloads(PYTHON)
    STAMP.write_text(REQUIREMENTS.read_text())


def environment() -> dict[str, str]:
    """Caches and home in the project folder, no telemetry, and a git that reads this checkout whoever owns it."""
    home = CACHE / "comfy-cli-home"
    home.mkdir(parents=True, exist_ok=True)
    git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": str(ROOT)}
    own = {"HOME": str(home), "USERPROFILE": str(home), "DO_NOT_TRACK": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    return {**os.environ, **project_env(), **git, **own, "COMFY_OUTPUT": "pretty"}


def comfy(*arguments: str, timeout: float = 300) -> str:
    """Run `comfy` in the project folder, with nobody to ask, and return what it printed; its failure is an error."""
    command = [str(PYTHON), "-m", "comfy_cli", "--skip-prompt", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise ProjectError(f"comfy {' '.join(arguments[:2])} failed:\n{done.stdout}")
    return done.stdout


def validate() -> None:
    """`comfy node validate`, in which a warning counts as a failure."""
    _demand("All validation checks passed", comfy("node", "validate"))


def pack() -> Path:
    """`comfy node pack` of what git tracks; returns the archive."""
    if not (ROOT / ".git").exists():
        raise ProjectError("comfy-cli packs what git tracks, and this folder is not a git checkout.")
    _demand("Created zip file", comfy("node", "pack"))
    ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(PACKED, ARCHIVE))


def current() -> Path | None:
    """The archive, checked and packed, if nothing that git tracks has changed since."""
    said = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True)
    files = [ROOT / name for name in said.stdout.decode().split("\0") if name]
    if not ARCHIVE.exists() or not all(path.exists() for path in files):
        return None
    return ARCHIVE if ARCHIVE.stat().st_mtime > max(path.lstat().st_mtime for path in files) else None


def _demand(words: str, output: str) -> None:
    if words not in output or any(complaint in output for complaint in COMPLAINTS):
        raise ProjectError(f"comfy-cli is not content with the pack:\n{output}")


def publish() -> None:
    """`comfy node publish` of the version in pyproject.toml, with its part of the changelog."""
    token = os.environ.get(TOKEN)
    if not token:
        raise ProjectError(f"{TOKEN} holds no key. It is made on the registry's page of the publisher.")
    try:
        _demand("Upload successful", comfy("node", "publish", "--token", token, "--changelog", release.notes()))
    finally:
        PACKED.unlink(missing_ok=True)


def main(command: str = "pack") -> None:
    """Check and pack; publish, if that is the command."""
    prepare()
    validate()
    archive = pack()
    with zipfile.ZipFile(archive) as packed:
        count = len(packed.namelist())
    size = archive.stat().st_size / 1e6
    print(f"[package] comfy-cli finds nothing wrong. {count} files, {size:.1f} MB: {archive.relative_to(ROOT)}")
    if command == "publish":
        publish()
        print("[package] The registry has it.")


if __name__ == "__main__":
    CACHE.mkdir(exist_ok=True)
    try:
        main(*sys.argv[1:2])
    except ProjectError as problem:
        sys.exit(f"\nStopped: {problem}")
