"""A store in one file, to carry to other machines: a zip with a manifest of its own, the checksum of every file in it.

Everything is verified before anything is put in place. Checksums find damage; they do not say who made a bundle, and
what it holds is code that will run. So ``add`` is for bundles that the user said to trust: it signs them as this
install's own.
"""

import hashlib
import json
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from ..errors import ArtifactError
from .folder import MAX_FILE
from .store import FORMAT, ID, MANIFEST, NAME, Entry, Store, checked, parse

MAX_BYTES = 8 << 30  # of all files, unpacked
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error)  # as JSON and zip raise them
Contents = dict[str, bytes]


def write(store: Store, to: IO[bytes]) -> int:
    """Writes the sound entries of the store into a bundle. Returns how many. Raises ``ArtifactError`` if none."""
    sums: dict[str, str] = {}
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as bundle:
        for entry, contents in _sound(store):
            for name, content in {**contents, MANIFEST: entry.manifest(b"")}.items():
                sums[f"{entry.id}/{name}"] = hashlib.sha256(content).hexdigest()
                bundle.writestr(f"{entry.id}/{name}", content)
        bundle.writestr(MANIFEST, json.dumps({"format": FORMAT, "files": sums}, indent=1))
    if not sums:
        raise ArtifactError(f"there is nothing to export in {store.folder}")
    return sum(name.endswith("/" + MANIFEST) for name in sums)


def _sound(store: Store) -> Iterator[tuple[Entry, Contents]]:
    for name in store.ids():
        try:
            entry = store.entry(name)
            contents = store.read(entry)
        except ArtifactError:  # it stays where it is: the pack says why it does not use it
            continue
        yield entry, contents


def verified(file: IO[bytes]) -> list[tuple[Entry, int]]:
    """Yields (entry, its bytes) of a bundle that is complete. Raises ``ArtifactError``."""
    with _opened(file) as entries:
        return [(entry, sum(map(len, contents.values()))) for entry, contents in entries]


def add(file: IO[bytes], store: Store) -> int:
    """Puts the entries of a bundle that ``verified`` has checked into the store. Returns how many are new there."""
    with _opened(file) as entries:
        return sum(store.put(entry, contents) for entry, contents in entries)


@contextmanager
def _opened(file: IO[bytes]) -> Iterator[Iterator[tuple[Entry, Contents]]]:
    try:
        with zipfile.ZipFile(file) as bundle:
            names = _names(bundle)
            yield (_entry(bundle, name, names[name]) for name in names)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError, *DAMAGE) as error:
        raise ArtifactError(f"this is not a bundle of AnyShape, or it is damaged ({error})") from error


def _names(bundle: zipfile.ZipFile) -> dict[str, list[str]]:
    """The files of each entry's folder, once names, kinds, sizes and checksums are as they must be."""
    sums = json.loads(_bytes(bundle, bundle.getinfo(MANIFEST)))["files"]
    infos = [info for info in bundle.infolist() if info.filename != MANIFEST]
    if sorted(sums) != sorted(info.filename for info in infos):
        raise ArtifactError("the bundle's files are not those that its manifest lists")
    if sum(info.file_size for info in infos) > MAX_BYTES:
        raise ArtifactError(f"the bundle holds more than {MAX_BYTES >> 30} GB")
    found: dict[str, list[str]] = {}
    for info in infos:
        name, file = _parts(info)
        if hashlib.sha256(_bytes(bundle, info)).hexdigest() != sums[info.filename]:
            raise ArtifactError(f"{info.filename} is damaged: its checksum does not match")
        found.setdefault(name, []).append(file)
    return found


def _parts(info: zipfile.ZipInfo) -> tuple[str, str]:
    """(the entry's folder, the file); both plain names, so that nothing leads out of the store."""
    name, _, file = info.filename.partition("/")
    if not ID.fullmatch(name) or not NAME.fullmatch(file):
        raise ArtifactError(f"{info.filename!r} is not a name that a bundle may have")
    mode = info.external_attr >> 16
    if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise ArtifactError(f"{info.filename} is a link or something else that is not a file")
    return name, file


def _entry(bundle: zipfile.ZipFile, name: str, files: list[str]) -> tuple[Entry, Contents]:
    contents = {file: _bytes(bundle, bundle.getinfo(f"{name}/{file}")) for file in files}
    entry = parse(contents.pop(MANIFEST, b""), b"")
    if entry.id != name:
        raise ArtifactError(f"{name} holds the manifest of another artefact")
    return entry, checked(entry, contents)


def _bytes(bundle: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > MAX_FILE:
        raise ArtifactError(f"{info.filename} is larger than any artefact")
    return bundle.read(info)
