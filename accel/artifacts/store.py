"""The store: a folder with one folder an artefact, each with a manifest of its files and their checksums.

An entry is written elsewhere and renamed into place whole, and never changed after that, so several processes may use
one store. The manifest's time of change says when the entry was last used. It is signed, and says what the files are,
so nothing is read that was not put there by an install with the same secret.
"""

import hashlib
import hmac
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArtifactError, Damaged
from . import folder
from .compiled_for import KINDS

FORMAT = 2
MANIFEST = "manifest.json"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")  # no separators, no leading dot
ID = re.compile(r"[0-9a-f]{32}")
TEMPORARY = ".tmp-"
UNSIGNED = (
    "was not signed by this install of AnyShape, so it is not used: what another one compiled comes in as a file, with "
    "python -m accel.artifacts import FILE --trust"
)
ABANDONED = 3600.0  # seconds after which an unfinished entry is taken for one whose process has ended


@dataclass(frozen=True)
class Entry:
    """What a manifest says. ``name`` tells the artefacts of a kind apart."""

    kind: str
    name: str
    key: dict[str, str]  # of machine.KINDS
    files: dict[str, str]  # name -> sha256

    @property
    def id(self) -> str:
        """The entry's folder."""
        return hashlib.sha256(json.dumps([self.kind, self.name, self.key], sort_keys=True).encode()).hexdigest()[:32]

    def manifest(self, secret: bytes) -> bytes:
        """As JSON, signed; with no secret unsigned, as in a bundle."""
        signature = {"signature": self.signature(secret)} if secret else {}
        return (json.dumps({"format": FORMAT, **vars(self), **signature}, indent=1, sort_keys=True) + "\n").encode()

    def signature(self, secret: bytes) -> str:
        """Of all that the manifest says, and by the checksums in it of the files."""
        said = json.dumps({"format": FORMAT, **vars(self)}, sort_keys=True)
        return hmac.digest(secret, said.encode(), "sha256").hex()


def parse(text: bytes, secret: bytes) -> Entry:
    """The entry of a manifest, which must be signed with ``secret`` unless that is empty. Raises ``ArtifactError``."""
    try:
        read = json.loads(text)
        entry = Entry(read["kind"], read["name"], read["key"], read["files"])
        known = read["format"] == FORMAT and _is_sound(entry)
        signature = str(read.get("signature")).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is damaged") from error
    if not known:
        raise ArtifactError(f"{MANIFEST} is not one that this version of AnyShape writes")
    if secret and not hmac.compare_digest(entry.signature(secret).encode(), signature):
        raise ArtifactError(UNSIGNED)
    return entry


def _is_sound(entry: Entry) -> bool:
    texts = [entry.name, *entry.key.values(), *entry.files.values()]
    return (
        set(entry.key) == set(KINDS.get(entry.kind, ())) and bool(entry.files)
        and all(isinstance(text, str) for text in texts)
        and all(NAME.fullmatch(name) and name != MANIFEST for name in entry.files)
    )  # fmt: skip


def checked(entry: Entry, contents: dict[str, bytes]) -> dict[str, bytes]:
    """``contents`` if they are what the manifest says. Raises ``ArtifactError``."""
    if contents.keys() != entry.files.keys():
        odd = sorted(contents.keys() ^ entry.files.keys())
        raise Damaged(f"{odd[0]} is missing or not of this artefact")
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != entry.files[name]:
            raise Damaged(f"{name} is damaged: its checksum does not match")
    return contents


class Store:
    """The artefacts in one folder. Raises ``ArtifactError`` if the folder is not safe.

    secret: what signs entries, and must have signed them to be read.
    """

    def __init__(self, path: Path, secret: bytes) -> None:
        self.folder = folder.secure(path)
        self._secret = secret

    def ids(self) -> list[str]:
        """The folders of entries, sound or not, least recently used first."""
        found = [path for path in self.folder.iterdir() if not path.name.startswith(TEMPORARY)]
        return [path.name for path in sorted(found, key=lambda path: (_used(path), path.name))]

    def entry(self, name: str) -> Entry:
        """The entry in the folder ``name``; its files are not looked at. Raises ``ArtifactError``."""
        if not ID.fullmatch(name):
            raise ArtifactError("not an artefact of AnyShape")
        if (self.folder / name).is_symlink():
            raise ArtifactError(f"{name} is a link")
        found = parse(folder.read(self.folder / name / MANIFEST), self._secret)
        if found.id != name:
            raise Damaged(f"{MANIFEST} belongs to another artefact")
        return found

    def read(self, entry: Entry) -> dict[str, bytes]:
        """The entry's files, verified. Raises ``ArtifactError``."""
        path = self.folder / entry.id
        names = [found.name for found in path.iterdir() if found.name != MANIFEST]
        return checked(entry, {name: folder.read(path / name) for name in names})

    def put(self, entry: Entry, contents: dict[str, bytes]) -> bool:
        """Adds an entry, or replaces a damaged one. Returns False if it is there already; it is then marked as used."""
        place = self.folder / entry.id
        if place.exists() and self._holds(entry) and self.touch(entry):
            return False
        temporary = self.folder / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"
        temporary.mkdir(mode=0o700)
        try:
            for name, content in {**contents, MANIFEST: entry.manifest(self._secret)}.items():
                folder.write(temporary / name, content)
            os.rename(temporary, place)
        except OSError:
            if not (place / MANIFEST).is_file():  # else another process was faster
                raise
            return False
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return True

    def _holds(self, entry: Entry) -> bool:
        """Whether an entry that could be read is there; another is taken away."""
        try:
            self.entry(entry.id)
        except ArtifactError:
            self.remove(entry.id)
            return False
        return True

    def touch(self, entry: Entry) -> bool:
        """Marks the entry as used now; False if it is not there."""
        try:
            os.utime(self.folder / entry.id / MANIFEST)
        except OSError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Removes an entry as a whole, because others may be reading it."""
        doomed = self.folder / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"
        try:
            os.rename(self.folder / name, doomed)
        except OSError:  # another process did
            return
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed, ignore_errors=True)
        else:
            doomed.unlink()

    def prune(self, limit: int) -> int:
        """Removes the least recently used entries beyond ``limit`` bytes. Returns how many."""
        self._sweep()
        sizes = {name: size_of(self.folder / name) for name in self.ids() if ID.fullmatch(name)}
        total, removed = sum(sizes.values()), 0
        for name, size in sizes.items():
            if total <= limit:
                break
            self.remove(name)
            total, removed = total - size, removed + 1
        return removed

    def _sweep(self) -> None:
        for path in self.folder.glob(TEMPORARY + "*"):
            if time.time() - _used(path) > ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


def _used(path: Path) -> float:
    for marked in (path / MANIFEST, path):
        try:
            return os.lstat(marked).st_mtime
        except OSError:
            continue
    return 0.0


def size_of(path: Path) -> int:
    """Bytes of the files in a folder; 0 if it is gone."""
    return sum(_size(found) for found in _files(path))


def _files(path: Path) -> Iterator[Path]:
    try:
        yield from path.iterdir()
    except OSError:
        return


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
