"""Between the store and Triton's cache, in a running ComfyUI. Whatever fails here is counted, never raised."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..attempt import Judge, attempt, named
from ..errors import AnyShapeError, ArtifactError, Damaged
from ..stats import STATS
from . import compiled_for, places
from .store import Entry, Store

log = logging.getLogger(__name__)

MEGABYTES = "ANYSHAPE_ARTIFACTS_MB"  # environment variable: how large the store may become; 0 for none
DEFAULT_MB = 2048
MIB = 1 << 20
TIMES = "times.json"
Kernels = Callable[[], Iterable[Any]]


def limit() -> int:
    """Bytes that the user allows the store. Raises ``ArtifactError``."""
    text = os.environ.get(MEGABYTES, str(DEFAULT_MB))
    if not text.isdecimal():
        raise ArtifactError(f"{MEGABYTES} is {text!r}; give megabytes, or 0 to keep nothing on disk")
    return int(text) * MIB


class Keeper:
    """Loads artefacts before a process first compiles, and saves new ones afterwards. Does nothing until ``use``."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._limit = 0
        self._loading = threading.RLock()
        self._loaded: set[torch.device] = set()
        self._watched: dict[torch.device, list[Kernels]] = {}
        self._kept: set[str] = set()  # hashes of variants that were saved
        self._saving = threading.Lock()
        self._due = False
        self._thread: threading.Thread | None = None

    def use(self, folder: Path) -> None:
        """Keeps the store in this folder, if it is safe."""
        self._store, self._loaded, self._kept = None, set(), set()
        STATS.artifacts.dir = ""
        attempt(partial(self._use, folder), _judge(folder.name))

    def _use(self, folder: Path) -> None:
        self._limit = limit()
        if self._limit:
            self._store = Store(folder, places.secret())
            STATS.artifacts.dir = self._store.folder.name  # the stats leave this machine: no paths
            log.info("AnyShape: compiled kernels are kept in %s", self._store.folder)

    # Kernels

    def watch(self, device: torch.device, kernels: Kernels) -> None:
        """``kernels`` gives Triton kernels of ours that run on ``device``; to be called before the first is compiled.

        What the store has for the device goes into Triton's cache, once per process. At each ``save_soon`` what
        ``kernels`` gives by then is looked through for variants that are new. It is called from another thread, so it
        gives a copy of what may grow. What it gives are ``JITFunction``s, or variants as ``triton.compile`` makes them.

        Triton finds a kernel that was generated again after a restart if its cache's key is the same. Into that go

        - the text from ``def`` on, comments included, of the kernel and of each ``@triton.jit`` function it calls,
        - the number of the line where its decorator stands (of each of them too): so a kernel is alone in its module,
          or the order in which a module's kernels were generated decides,
        - names and values of the ``constexpr`` globals that it reads,
        - types, specialisations and values of its arguments, the options (``num_warps``, ...), card, Triton, ptxas.

        The names of file, folder and module are not in it. Order nothing in the text by ``set``, ``hash`` or ``id``.
        """
        watched = self._watched.setdefault(device, [])
        if kernels not in watched:
            watched.append(kernels)
        if self._store is None:
            return
        with self._loading:  # another thread that compiles for this device waits
            if device not in self._loaded:
                self._loaded.add(device)
                attempt(partial(self._load, device), _judge("store"))

    def _load(self, device: torch.device) -> None:
        here = compiled_for.describe(device)
        for name in self._store.ids():
            loaded, _ = attempt(partial(self._load_one, name, here), self._judge_entry(name))
            STATS.artifacts.loaded += bool(loaded)

    def _load_one(self, name: str, here: dict[str, str]) -> bool:
        entry = self._store.entry(name)
        if entry.kind != "kernel":
            return False
        if reason := compiled_for.mismatch(entry.kind, entry.key, here):
            raise ArtifactError(reason)
        return place(self._store, entry) and self._store.touch(entry)

    def _judge_entry(self, name: str) -> Judge:
        """A damaged entry goes, so that what is compiled in its place can be kept."""

        def judge(error: Exception) -> str:
            if isinstance(error, Damaged):
                self._store.remove(name)
            return _judge(name)(error)

        return judge

    # What was measured

    def measured(self, name: str, device: torch.device) -> str | None:
        """What ``keep_measured`` was given under this name for such a card; None if that is not there."""
        if self._store is None:
            return None
        folder = Entry("times", name, compiled_for.key_of("times", compiled_for.describe(device)), {}).id
        text, _ = attempt(partial(self._text, folder), self._judge_entry(folder))
        STATS.artifacts.loaded += text is not None
        return text

    def _text(self, folder: str) -> str | None:
        if not (self._store.folder / folder).exists():
            return None
        entry = self._store.entry(folder)
        text = self._store.read(entry)[TIMES].decode()
        self._store.touch(entry)
        return text

    def keep_measured(self, name: str, device: torch.device, text: str) -> str:
        """Saves it now, and gives what all processes take from here on: another one may have been faster."""
        if self._store is None:
            return text
        put = partial(keep, self._store, "times", name, compiled_for.describe(device), {TIMES: text.encode()})
        new, failure = attempt(put, _judge("store"))
        attempt(partial(self._count, bool(new)), _judge("store"))
        return text if new or failure else self.measured(name, device) or text

    # Saving

    def save_soon(self) -> None:
        """Copies what is new into the store, in the background."""
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
        """Waits until everything is saved."""
        while (thread := self._thread) is not None:
            thread.join()

    def _save(self) -> None:
        self._count(sum(self._save_watched(device) for device in list(self._watched)))

    def _count(self, saved: int) -> None:
        STATS.artifacts.saved += saved
        if saved:
            self._store.prune(self._limit)

    def _save_watched(self, device: torch.device) -> int:
        from . import triton_cache

        saved, here = 0, compiled_for.describe(device)
        for kernels in list(self._watched[device]):
            given, _ = attempt(lambda kernels=kernels: list(kernels()), _judge("store"))
            for variant in triton_cache.variants(given or ()):
                if getattr(variant, "hash", "") not in self._kept and (found := triton_cache.found(variant)):
                    self._kept.add(found.hash)
                    saved += bool(attempt(partial(keep_found, self._store, found, here), _judge(found.hash))[0])
        return saved


def place(store: Store, entry: Entry) -> bool:
    """Puts an entry into Triton's cache; False if it is there. Raises ``ArtifactError``."""
    from . import triton_cache

    if triton_cache.has(entry.name, entry.files):
        return False
    triton_cache.place(entry.name, store.read(entry))
    return True


def keep(store: Store, kind: str, name: str, here: dict[str, str], files: dict[str, bytes]) -> bool:
    """Adds an artefact of the machine ``here`` to the store; False if it is there."""
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    return store.put(Entry(kind, name, compiled_for.key_of(kind, here), sums), files)


def keep_found(store: Store, found: Any, here: dict[str, str]) -> bool:
    """Adds an entry of Triton's cache, a ``triton_cache.Found``, to the store; False if it is there."""
    here = here | {"arch": found.arch}
    return keep(store, "kernel", found.hash, here, {name: path.read_bytes() for name, path in found.files.items()})


def _judge(file: str) -> Judge:
    def judge(error: Exception) -> str:
        reason = str(error) if isinstance(error, AnyShapeError) else f"{named(error)}: compiled again at the next start"
        if STATS.artifacts.reject(file, reason):
            log.info("AnyShape: artefact %s: %s", file, reason, exc_info=not isinstance(error, AnyShapeError))
        return reason

    return judge


KEEPER = Keeper()
