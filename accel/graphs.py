"""CUDA graphs, one a shape, all in one memory pool, under a byte budget.

A graph removes the Python and launch cost of a forward (about 40 ms for SDXL on a fast host). Capturing takes 0.05 s
and about 10 MB, because all graphs share one pool: nothing in the pool is live between two replays, so each graph may
reuse the memory of every other. That is also the contract of a replay: its output is copied out at once, and one replay
runs at a time.

A shared pool returns its memory when its last graph is gone. Evicting the least recently used graphs therefore frees
their own few megabytes first, and the pool as a whole only when nothing else is left; what was freed is measured.
"""

import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import verify
from .allocator import addresses_are_promised
from .errors import CaptureFailed, WrongResult
from .key import ShapeKey
from .outputs import Output, each
from .stats import STATS

MIB = 1 << 20
Forward = Callable[[dict[str, Tensor]], Output]


@dataclass(frozen=True)
class Recording:
    """What a capture needs: a forward that has run once on these inputs."""

    forward: Forward
    inputs: dict[str, Tensor]
    weights: int  # weights.WeightWatch.fingerprint, now
    constants: tuple[Tensor | None, ...]  # device memory besides weights and inputs that the forward reads
    output: Output  # of that run: what the graph's will look like
    verify: bool = False  # replay once and compare with ``output``


@dataclass
class CapturedGraph:
    """One captured forward: valid for one shape and for weights at the addresses of ``weights``."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]  # static; a replay reads them
    output: Output  # static; valid until this graph's next replay
    weights: int  # weights.WeightWatch.fingerprint at capture
    constants: tuple[Tensor | None, ...]  # read by the graph, so kept as long as it
    bytes: int

    def replay(self, inputs: dict[str, Tensor]) -> Output:
        """The forward of ``inputs``; the result is the caller's to keep."""
        for name, static in self.inputs.items():
            static.copy_(inputs[name])
        self.graph.replay()
        return each(Tensor.clone, self.output)


Name = tuple[int, ShapeKey]  # of a graph: its owner, any number that stands for a model, and its shape


@dataclass
class Pins:
    """Graphs that stay, whatever is captured later."""

    names: set[Name] = field(default_factory=set)
    full: bool = False  # a graph was refused because it would have needed their room


@dataclass
class GraphCache:
    """The graphs of one device, least recently used first."""

    device: torch.device
    used_bytes: int = 0
    _entries: OrderedDict[Name, CapturedGraph] = field(default_factory=OrderedDict)
    _refused: dict[Name, str] = field(default_factory=dict)  # and why
    _budget: int = 0  # bytes; refusals are for this budget
    _broken: str = ""  # why no capture can begin any more
    _pool: tuple[int, int] | None = None
    _pins: Pins | None = None
    _stream: torch.cuda.Stream | None = None  # one for all captures: the pool's blocks belong to a stream
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def replay(self, owner: int, key: ShapeKey, weights: int, inputs: dict[str, Tensor]) -> Output | None:
        """The output, or None where no valid graph exists. A graph of weights that have moved is dropped."""
        with self._lock:
            entry = self._entries.get((owner, key))
            if entry is None:
                return None
            if entry.weights != weights:
                self._drop((owner, key))
                return None
            self._entries.move_to_end((owner, key))
            self._pin((owner, key))
            return entry.replay(inputs)

    def capture(self, owner: int, key: ShapeKey, recording: Recording, budget: int) -> int:
        """Captures a forward and returns the bytes it took; evicts others to stay within ``budget`` bytes.

        Raises ``CaptureFailed`` with what the user can do.
        """
        with self._lock:
            self._set_budget(budget)
            if (owner, key) in self._refused:
                raise CaptureFailed(self._refused[owner, key])
            try:
                return self._keep((owner, key), lambda: self._record_or_make_room(recording))
            except CaptureFailed as error:
                if not self._pinned():  # pins end, and then there may be room
                    self._refused[owner, key] = str(error)
                raise

    @contextmanager
    def pinning(self) -> Iterator[Pins]:
        """What is captured or replayed in the body stays: a graph that needs its room is refused, for that one time."""
        self._pins = pins = Pins()
        try:
            yield pins
        finally:
            self._pins = None

    def held(self) -> dict[str, int]:
        """The keys of the graphs that are there, as the stats name them, and the bytes that each took."""
        with self._lock:
            return {str(key): entry.bytes for (_, key), entry in self._entries.items()}

    def drop_owner(self, owner: int) -> None:
        """Forgets every graph of ``owner`` (its model was unloaded or freed)."""
        with self._lock:
            for name in [name for name in self._entries if name[0] == owner]:
                self._drop(name)
            self._refused = {name: why for name, why in self._refused.items() if name[0] != owner}

    def clear(self) -> None:
        """Forgets every graph; the pool's memory goes back to the driver."""
        with self._lock:
            self._evict_down_to(-1)
            self._refused.clear()

    def _set_budget(self, budget: int) -> None:
        if budget != self._budget:
            self._budget = budget
            self._refused.clear()

    def _pinned(self) -> set[Name]:
        return self._pins.names & self._entries.keys() if self._pins else set()

    def _pin(self, name: Name) -> None:
        if self._pins:
            self._pins.names.add(name)

    def _keep(self, name: Name, record: Callable[[], CapturedGraph]) -> int:
        """Records and files a graph; the least recently used give way, and one that is too large alone is refused."""
        self._file(name, record())
        crowded = len(self._entries) > 1
        self._evict_down_to(self._budget, keep=self._pinned() | {name})
        if self.used_bytes > self._budget and self._pinned() - {name}:
            self._pins.full = True
            self._drop(name)
            raise CaptureFailed(budget_is_full(self._budget))
        if self.used_bytes > self._budget and crowded:  # the pool shrinks only when empty: begin anew with this graph
            self._drop(name)
            self._file(name, record())
        if self.used_bytes > self._budget:
            need = self.used_bytes
            self._drop(name)
            raise CaptureFailed(
                f"this size needs {need // MIB} MB for its graph, graph_budget_mb is {self._budget // MIB}: it runs "
                f"without a graph. Raise graph_budget_mb to {need // MIB + 64} for more speed at this size"
            )
        self._pin(name)
        return self._entries[name].bytes

    def _file(self, name: Name, entry: CapturedGraph) -> None:
        self._entries[name] = entry
        self.used_bytes += entry.bytes

    def _record_or_make_room(self, recording: Recording) -> CapturedGraph:
        if self._broken:
            raise CaptureFailed(self._broken)
        try:
            return self._record(recording)
        except WrongResult as error:
            raise CaptureFailed(str(error)) from error
        except RuntimeError as error:  # out of memory comes in several guises while a stream is captured
            self._make_room(error)
        try:
            return self._record(recording)
        except RuntimeError as error:
            raise CaptureFailed(
                f"no graph could be captured for this size ({error}): it runs without one. If memory is short, lower "
                f"graph_budget_mb or the image size, or close other programs that use the GPU"
            ) from error

    def _make_room(self, error: RuntimeError) -> None:
        if addresses_are_promised():  # torch's allocator keeps traces of the broken capture
            self._broken = (
                f"a capture failed ({error}), and under cudaMallocAsync none can begin after that: no new graphs "
                f"until ComfyUI is restarted. If memory is short, lower graph_budget_mb or the image size"
            )
            raise CaptureFailed(self._broken) from error
        self._evict_down_to(-1, keep=self._pinned())
        torch.cuda.empty_cache()

    def _record(self, recording: Recording) -> CapturedGraph:
        # Normal tensors, not inference tensors: a later call may replay outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            static = {name: torch.empty_like(value).copy_(value) for name, value in recording.inputs.items()}
            output = each(torch.empty_like, recording.output)
        before = _free(self.device)
        graph = self._recorded(lambda: each(Tensor.copy_, output, recording.forward(static)))
        if recording.verify or addresses_are_promised():
            graph.replay()  # that allocator gives a graph its memory at its first run
            torch.cuda.synchronize(self.device)
        size = max(0, before - _free(self.device))
        if recording.verify:
            verify.compare("the graph of this size", output, recording.output)
        return CapturedGraph(graph, static, output, recording.weights, recording.constants, size)

    def _recorded(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """As ``torch.cuda.graph``, which also collects garbage and empties the allocator's cache: 20 ms a size.

        No tensor that ``run`` makes may outlive the capture, not even in a traceback: under ``cudaMallocAsync`` its
        memory may never come to exist, and freeing it later would end the process.
        """
        graph = torch.cuda.CUDAGraph()
        if not self._entries:  # a pool ends with its last graph, one whose capture failed included
            self._pool = torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream(self.device)
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._stream):
            # thread_local: another thread may allocate or copy meanwhile (previews, another model's loading)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                graph.capture_end()
        return graph

    def _evict_down_to(self, budget: int, keep: Collection[Name] = ()) -> None:
        """Drops the least recently used graphs, none of ``keep``, until ``budget`` bytes are left."""
        for name in [name for name in self._entries if name not in keep]:
            if self.used_bytes > budget:
                self._drop(name)
                STATS.graphs.evictions += 1
        self._report()

    def _drop(self, name: Name) -> None:
        entry = self._entries.pop(name)
        torch.cuda.synchronize(self.device)  # a replay of it may still be running
        torch.cuda.empty_cache()  # what others have freed is not the graph's
        before = _free(self.device)
        entry.graph.reset()
        del entry
        torch.cuda.empty_cache()
        self.used_bytes = max(0, self.used_bytes - max(0, _free(self.device) - before)) if self._entries else 0
        self._report()

    def _report(self) -> None:
        STATS.graphs.budget_bytes = self._budget
        STATS.graphs.used_bytes = sum(cache.used_bytes for cache in _CACHES.values())

    def __len__(self) -> int:
        return len(self._entries)


_CACHES: dict[torch.device, GraphCache] = {}


def cache(device: torch.device) -> GraphCache:
    """The one cache of ``device``."""
    return _CACHES.setdefault(device, GraphCache(device))


def held(device: torch.device) -> dict[str, int]:
    """The graphs of ``device``, by key, and the bytes that each took."""
    return _CACHES[device].held() if device in _CACHES else {}


def drop_owner(owner: int) -> None:
    """Forgets every graph of ``owner`` on every device."""
    for device_cache in _CACHES.values():
        device_cache.drop_owner(owner)


def clear() -> None:
    """Gives the memory of every graph back. Any thread may ask, also while models run: a replay or a capture is waited
    for, and the next call of a shape captures it again.
    """
    for device_cache in list(_CACHES.values()):
        device_cache.clear()


def budget_is_full(budget: int) -> str:
    """Why a size has no graph yet. ``budget``: bytes."""
    return (
        f"graph_budget_mb ({budget // MIB}) is full: raise it in Compile Model to keep this size too. Without that it "
        f"is captured at its first prompt, and the least recently used size gives way"
    )


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]
