"""The store from the command line, in the pack's folder, without ComfyUI.

python -m accel.artifacts list
python -m accel.artifacts export FILE      all of it, in one file to carry to another machine
python -m accel.artifacts import FILE      verified first; what does not fit this machine is kept and not used
python -m accel.artifacts prune MEGABYTES  the least recently used artefacts go

FILE: a path, or any address that fsspec understands. A bundle is code that will run: import only what you trust.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import fsspec
import torch

from ..errors import AnyShapeError, ArtifactError
from . import bundle, machine
from .store import MANIFEST, Entry, Store, size_of

MIB = 1 << 20


def default_folder() -> Path:
    """Where the pack keeps its store by convention: it lies in ComfyUI/custom_nodes. Raises ``ArtifactError``."""
    comfyui = machine.PACK.parent.parent
    for folder in (comfyui / "models" / "anyshape", comfyui / "user" / "anyshape"):
        if folder.is_dir():
            return folder
    if (comfyui / "models").is_dir():
        return comfyui / "models" / "anyshape"
    raise ArtifactError("this folder is not in ComfyUI/custom_nodes; name the store with --dir")


def list_entries(store: Store) -> None:
    """A line for each artefact, the most recently used first."""
    here = _here()
    for name in reversed(store.ids()):
        try:
            entry = store.entry(name)
            fits = machine.mismatch(entry.kind, entry.key, here) or "fits this machine"
            print(f"{name}  {_told(store, entry)}  {fits}")
        except ArtifactError as error:
            print(f"{name}  not usable: {error}")
    print(f"{sum(size_of(store.folder / name) for name in store.ids()) / MIB:.1f} MB in {store.folder}")


def _told(store: Store, entry: Entry) -> str:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime((store.folder / entry.id / MANIFEST).stat().st_mtime))
    what = next((name[: -len(".json")] for name in entry.files if name.endswith(".json")), entry.kind)
    return f"{entry.kind:8} {what:28} {size_of(store.folder / entry.id) / MIB:6.2f} MB  used {used}"


def _here() -> dict[str, str]:
    return machine.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def export_to(store: Store, file: str) -> None:
    """The whole store as a bundle."""
    with tempfile.TemporaryFile() as local:  # so that a failure leaves no half of a bundle
        count = bundle.write(store, local)
        local.seek(0)
        with fsspec.open(file, "wb") as remote:
            shutil.copyfileobj(local, remote)
    print(f"{count} artefacts from {store.folder} exported to {file}")


def import_from(store: Store, file: str) -> None:
    """A bundle into the store."""
    with tempfile.TemporaryFile() as local:
        with fsspec.open(file, "rb") as remote:
            shutil.copyfileobj(remote, local)
        local.seek(0)
        entries = bundle.read(local, store)
    new, here = sum(is_new for _, is_new in entries), _here()
    fit = sum(not machine.mismatch(entry.kind, entry.key, here) for entry, _ in entries)
    print(f"{len(entries)} artefacts verified, {new} of them new in {store.folder}; {fit} fit this machine")


def prune_to(store: Store, megabytes: str) -> None:
    """The store, made as small as that."""
    if not megabytes.isdecimal():
        raise ArtifactError(f"{megabytes!r} is no number of megabytes")
    print(f"{store.prune(int(megabytes) * MIB)} artefacts removed from {store.folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 with a sentence on stderr if it could not be done."""
    parser = argparse.ArgumentParser(
        prog="python -m accel.artifacts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("export", "import", "list", "prune"))
    parser.add_argument("what", nargs="?", metavar="FILE", help="for prune: megabytes")
    parser.add_argument("--dir", type=Path, help="the store; by default models/anyshape of the ComfyUI around")
    chosen = parser.parse_args(arguments)
    if (chosen.what is None) != (chosen.command == "list"):
        parser.error("list takes no FILE" if chosen.what else f"{chosen.command} needs a FILE or a size")
    try:
        store = Store(chosen.dir or default_folder())
        if chosen.command == "list":
            list_entries(store)
        else:
            {"export": export_to, "import": import_from, "prune": prune_to}[chosen.command](store, chosen.what)
    except (AnyShapeError, OSError, ImportError, ValueError) as error:  # ImportError, ValueError: fsspec's
        print(f"{chosen.command} did not work: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
