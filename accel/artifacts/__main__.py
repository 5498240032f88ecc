"""Manages the store from the command line. Run it in the pack's folder; ComfyUI need not run.

python -m accel.artifacts list
python -m accel.artifacts export FILE          all of it, in one file to carry to another machine
python -m accel.artifacts import FILE          verified, and shown; nothing else
python -m accel.artifacts import FILE --trust  put into the store; what does not fit this machine is not used
python -m accel.artifacts prune MEGABYTES      the least recently used artefacts go

FILE: a path, or any address that fsspec understands. A bundle is code that will run as you: trust it as you trust
those who made it, and the way by which it came.
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
from . import bundle, compiled_for, places
from .store import MANIFEST, Entry, Store, size_of

MIB = 1 << 20
DATE = "%Y-%m-%d %H:%M"


def list_entries(store: Store) -> None:
    """Prints one line per artefact, the most recently used first."""
    for name in reversed(store.ids()):
        try:
            entry = store.entry(name)
            used = (store.folder / name / MANIFEST).stat().st_mtime
            print(f"{_line(entry, size_of(store.folder / name))}  used {time.strftime(DATE, time.localtime(used))}")
        except ArtifactError as error:
            print(f"{name}  not usable: {error}")
    print(f"{sum(size_of(store.folder / name) for name in store.ids()) / MIB:.1f} MB in {store.folder}")


def _line(entry: Entry, size: int) -> str:
    what = next((name[: -len(".json")] for name in entry.files if name.endswith(".json")), entry.name)
    return f"{entry.kind:8} {what[:28]:28} {size / MIB:6.2f} MB  {_mismatch(entry) or 'fits this machine'}"


def _mismatch(entry: Entry) -> str:
    here = compiled_for.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return compiled_for.mismatch(entry.kind, entry.key, here)


def export_to(store: Store, file: str) -> None:
    """Writes the whole store into a bundle."""
    with tempfile.TemporaryFile() as local:  # so that a failure leaves no half of a bundle
        count = bundle.write(store, local)
        local.seek(0)
        with fsspec.open(file, "wb") as remote:
            shutil.copyfileobj(local, remote)
    print(f"{count} artefacts from {store.folder} exported to {file}")


def import_from(store: Store, file: str, trust: bool) -> None:
    """Puts a bundle into the store, or only shows what it contains. Raises ``ArtifactError``."""
    with tempfile.TemporaryFile() as local:
        with fsspec.open(file, "rb") as remote:
            shutil.copyfileobj(remote, local)
        local.seek(0)
        entries = bundle.verified(local)
        fit = sum(not _mismatch(entry) for entry, _ in entries)
        for entry, size in () if trust else entries:
            print(_line(entry, size))
        print(f"{len(entries)} artefacts verified, {fit} fit this machine")
        if not trust:
            raise ArtifactError(
                "nothing was imported, because these files are code that will run as you. If you trust whoever made "
                "them, and the way by which they came, give --trust"
            )
        print(f"{bundle.add(local, store)} of them new in {store.folder}")


def prune_to(store: Store, megabytes: str) -> None:
    """Shrinks the store to this size."""
    if not megabytes.isdecimal():
        raise ArtifactError(f"{megabytes!r} is not a number of megabytes")
    print(f"{store.prune(int(megabytes) * MIB)} artefacts removed from {store.folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1, with a sentence on stderr, if it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m accel.artifacts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("export", "import", "list", "prune"))
    parser.add_argument("what", nargs="?", metavar="FILE", help="for prune: megabytes")
    parser.add_argument("--dir", type=Path, help="the store; by default the one that ComfyUI uses for this user")
    parser.add_argument("--trust", action="store_true", help="import: whoever made the bundle may run code as you")
    chosen = parser.parse_args(arguments)
    if (chosen.what is None) != (chosen.command == "list"):
        parser.error("list takes no FILE" if chosen.what else f"{chosen.command} needs a FILE or a size")
    try:
        store = Store(chosen.dir or places.store(), places.secret())
        if chosen.command == "list":
            list_entries(store)
        elif chosen.command == "import":
            import_from(store, chosen.what, chosen.trust)
        else:
            {"export": export_to, "prune": prune_to}[chosen.command](store, chosen.what)
    except (AnyShapeError, OSError, ImportError, ValueError) as error:  # ImportError, ValueError: fsspec's
        print(f"{chosen.command} did not work: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
