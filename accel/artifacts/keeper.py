"""Between the store and the compilers' caches, in a running ComfyUI. Whatever fails here is counted, never raised."""

import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..attempt import Judge, attempt, named
from ..errors import AnyShapeError, ArtifactError, Damaged
from ..stats import STATS
from . import machine, torch_cache
from .store import Entry, Store

log = logging.getLogger(__name__)

MEGABYTES = "ANYSHAPE_ARTIFACTS_MB"  # environment variable: how large the store may become; 0 for none
DEFAULT_MB = 2048
MIB = 1 << 20


def limit() -> int:
    """Bytes that the user allows the store. Raises ``ArtifactError``."""
    text = os.environ.get(MEGABYTES, str(DEFAULT_MB))
    if not text.isdecimal():
        raise ArtifactError(f"{MEGABYTES} is {text!r}; give megabytes, or 0 to keep nothing on disk")
    return int(text) * MIB


class Keeper:
    """Loads before the first compilation of a process, saves after each. Does nothing until ``use``."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._limit = 0
        self._loading = threading.RLock()
        self._loaded: set[tuple[tuple[str, ...], torch.device]] = set()
        self._kernels: dict[torch.device, Sequence[Any]] = {}
        self._regions: list[tuple[torch.device, list[torch_cache.Artifact]]] = []
        self._kept: set[str] = set()  # hashes of Triton's entries that need no second look
        self._saving = threading.Lock()
        self._due = False
        self._thread: threading.Thread | None = None

    def use(self, folders: Iterable[Path]) -> None:
        """Keeps the store in the first of these folders that is safe."""
        attempt(partial(self._use, folders), _judge("settings"))

    def _use(self, folders: Iterable[Path]) -> None:
        self._store, self._loaded, self._kept, STATS.artifacts.dir = None, set(), set(), ""
        self._limit = limit()
        for folder in folders if self._limit else ():
            self._store, _ = attempt(partial(Store, folder), _judge(str(folder)))
            if self._store is not None:
                STATS.artifacts.dir = str(self._store.folder)
                return

    def load_kernels(self, device: torch.device, kernels: Sequence[Any]) -> None:
        """Before the first of ``kernels`` is compiled: what the store has of them goes into Triton's cache."""
        self._kernels[device] = kernels
        self._load(("kernel", "launcher"), device)

    def load_regions(self, device: torch.device) -> None:
        """Before the first region is compiled: what the store has goes into PyTorch's caches."""
        self._load(("region",), device)

    def _load(self, kinds: tuple[str, ...], device: torch.device) -> None:
        if self._store is None:
            return
        with self._loading:  # another thread that compiles for this device waits
            if (kinds, device) not in self._loaded:
                self._loaded.add((kinds, device))
                attempt(partial(self._load_all, kinds, device), _judge("store"))

    def _load_all(self, kinds: tuple[str, ...], device: torch.device) -> None:
        here = machine.describe(device)
        for name in self._store.ids():
            loaded, _ = attempt(partial(self._load_one, name, kinds, here), self._judge_entry(name))
            STATS.artifacts.loaded += bool(loaded)

    def _load_one(self, name: str, kinds: tuple[str, ...], here: dict[str, str]) -> bool:
        entry = self._store.entry(name)
        if entry.kind not in kinds:
            return False
        if reason := machine.mismatch(entry.kind, entry.key, here):
            raise ArtifactError(reason)
        return place(self._store, entry) and self._store.touch(entry)

    def _judge_entry(self, name: str) -> Judge:
        """A damaged entry goes, so that what is compiled in its place can be kept."""

        def judge(error: Exception) -> str:
            if isinstance(error, Damaged):
                self._store.remove(name)
            return _judge(name)(error)

        return judge

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        """The body compiles a region: what that adds to PyTorch's caches will be saved."""
        if self._store is None:
            yield
            return
        before, _ = attempt(torch_cache.recorded, _judge("regions"))
        yield
        if before is not None:
            attempt(partial(self._record, device, before), _judge("regions"))

    def _record(self, device: torch.device, before: frozenset[Any]) -> None:
        if new := torch_cache.recorded_since(before):
            self._regions.append((device, new))

    def save_soon(self) -> None:
        """Copies what is new in the compilers' caches into the store, in the background."""
        if self._store is None:
            return
        with self._saving:
            self._due = True
            if self._thread is None:
                # no daemon: a process that ends finishes its copies, a fraction of a second
                thread = threading.Thread(target=self._run, name="AnyShape saves artefacts")
                _, failure = attempt(thread.start, _judge("store"))
                self._thread = None if failure else thread

    def _run(self) -> None:
        while True:
            with self._saving:
                if not self._due:
                    self._thread = None
                    return
                self._due = False
            attempt(self._save, _judge("store"))

    def wait(self) -> None:
        """Returns when everything is saved."""
        while (thread := self._thread) is not None:
            thread.join()

    def _save(self) -> None:
        saved = self._save_kernels() + self._save_regions()
        STATS.artifacts.saved += saved
        if saved:
            self._store.prune(self._limit)

    def _save_kernels(self) -> int:
        saved = 0
        for device, kernels in list(self._kernels.items()):
            from . import triton_cache

            here = machine.describe(device)
            for found in (found for kernel in triton_cache.compiled(kernels) for found in triton_cache.found(kernel)):
                if found.hash not in self._kept:
                    self._kept.add(found.hash)
                    saved += bool(attempt(partial(keep_found, self._store, found, here), _judge(found.hash))[0])
        return saved

    def _save_regions(self) -> int:
        saved = 0
        while self._regions:
            device, artifacts = self._regions.pop(0)
            here = machine.describe(device)
            saved += bool(attempt(partial(keep_region, self._store, artifacts, here), _judge("regions"))[0])
        return saved


def place(store: Store, entry: Entry) -> bool:
    """Puts an entry into its compiler's cache; False if it is there. Raises ``ArtifactError``."""
    if entry.kind == "region":
        if torch_cache.has(entry.notes):
            return False
        torch_cache.place(torch_cache.unpack(store.read(entry), entry.notes))
        return True
    from . import triton_cache

    if triton_cache.has(entry.kind, entry.name, entry.files):
        return False
    triton_cache.place(entry.kind, entry.name, store.read(entry))
    return True


def keep(
    store: Store, kind: str, name: str, here: dict[str, str], files: dict[str, bytes], notes: dict[str, Any]
) -> bool:
    """Adds an artefact of the machine ``here`` to the store; False if it is there."""
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    return store.put(Entry(kind, name, machine.key_of(kind, here), sums, notes), files)


def keep_found(store: Store, found: Any, here: dict[str, str]) -> bool:
    """Adds an entry of Triton's cache, a ``triton_cache.Found``, to the store; False if it is there."""
    here = here | ({"arch": found.arch} if found.arch else {})
    return keep(
        store, found.kind, found.hash, here, {name: path.read_bytes() for name, path in found.files.items()}, {}
    )


def keep_region(store: Store, artifacts: list[torch_cache.Artifact], here: dict[str, str]) -> bool:
    """Adds what a region's compilation put into PyTorch's caches; False if it is there."""
    name, files, notes = torch_cache.pack(artifacts)
    return keep(store, "region", name, here, files, notes)


def _judge(file: str) -> Judge:
    def judge(error: Exception) -> str:
        reason = str(error) if isinstance(error, AnyShapeError) else f"{named(error)}: compiled anew at the next start"
        if STATS.artifacts.reject(file, reason):
            log.info("AnyShape: artefact %s: %s", file, reason, exc_info=not isinstance(error, AnyShapeError))
        return reason

    return judge


KEEPER = Keeper()
