"""Keeps CUDA graphs: one per shape and program, all in one memory pool, under a byte budget.

A graph removes the Python and launch cost of a forward (about 40 ms for SDXL on a fast host). Capturing takes 0.05 s
and about 10 MB, because all graphs share one pool: nothing in the pool is live between two replays, so each graph may
reuse the memory of every other. That is also the contract of a replay: its output is copied out at once, and one replay
runs at a time. Between two pieces of one (``tape.pieces``) no other replay begins, and no graph goes.

*Some libraries keep memory for each stream*, and free it for more when they need more (comfy-kitchen's int8 products).
Earlier graphs would use what is no longer there. So where a program calls others than torch's libraries and ours, its
first run drops the graphs of all that do; each is captured again when its size comes.

What counts against the budget: of each graph its static inputs and output, and what the driver keeps for it; besides,
once, constants and the pool. A dropped graph frees its own bytes. The pool frees its own with its last graph.
"""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .capture import CapturedGraph, Capturer, Recording
from .errors import CaptureFailed, NoRoom, memory_was_short
from .key import ShapeKey
from .outputs import Output, bytes_of, each, tensors_of
from .reasons import say
from .stats import STATS

MIB = 1 << 20
LITTLE = 1 << 30  # bytes of the device; where fewer are free, a capture fails in several guises
MORE = 512 << 20  # bytes that must be free beyond those that were too few for a capture, before it is tried again
MULTIPLIED = (torch.float16, torch.bfloat16, torch.float32)  # dtypes of plain products


class Name(NamedTuple):
    """Of a graph. Programs of one model at one shape have a graph each."""

    owner: int  # any number that stands for a model
    key: ShapeKey
    program: Hashable  # what ran when the graph was captured: a graph never stands for another program


class Refusal(NamedTuple):
    """Why a graph was refused. free: bytes of the device then; None if that is not why."""

    why: str
    free: int | None = None


@dataclass
class Pins:
    """Graphs that must stay, whatever is captured later."""

    names: set[Name] = field(default_factory=set)
    full: bool = False  # a graph was refused because it would have needed their room
    lost: bool = False  # graphs were dropped for another one's first run; there is room to capture them again
    refused: dict[Name, str] = field(default_factory=dict)  # for as long as they stay, and why


class _Thread(threading.local):
    """What each thread has called on the captures' stream: libraries have handles and workspaces of each."""

    called: frozenset[Hashable] = frozenset()


class GraphCache:
    """The graphs of one device, least recently used first."""

    def __init__(self, device: torch.device, capturer: Capturer | None = None) -> None:
        self.device = device
        self._capturer = capturer or Capturer(device)
        self._entries: OrderedDict[Name, CapturedGraph] = OrderedDict()
        self._refused: dict[Name, Refusal] = {}
        self._budget = 0  # bytes; refusals are for this budget
        self._warmed: set[tuple[int, Hashable]] = set()  # (owner, program) that have run on the captures' stream
        self._here = _Thread()
        self._abandoned: deque[int] = deque()  # owners that are gone, whose graphs nobody has dropped yet
        self._pins: Pins | None = None
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        """The device memory of all graphs."""
        own = sum(one.own_bytes for one in self._entries.values())
        return bool(self._entries) * self._capturer.pool_bytes + own + bytes_of(*self._constants())

    def _constants(self) -> Iterator[Tensor | None]:
        return (tensor for one in self._entries.values() for tensor in one.constants)

    def replay(self, name: Name, weights: int, inputs: dict[str, Tensor]) -> Output | None:
        """Returns the output, or None if there is no valid graph. A graph whose weights have moved is dropped."""
        with self._lock:
            self._drop_abandoned()
            entry = None if self._capturer.busy else self._entries.get(name)
            if entry is None:
                return None
            if entry.weights != weights:
                self._drop(name)
                return None
            self._entries.move_to_end(name)
            self._pin(name)
            with self._capturer.replaying():
                return entry.replay(inputs)

    def capture(self, name: Name, recording: Recording, budget: int) -> int:
        """Captures a forward and returns the bytes it took; evicts others to stay within ``budget`` bytes.

        Raises ``CaptureFailed`` with what the user can do.
        """
        with self._lock:
            self._drop_abandoned()
            self._set_budget(budget)
            if self._capturer.busy:
                raise CaptureFailed(say("capture_nested"))
            if why := self._why_not(name) or (self._pins and self._pins.refused.get(name)):
                raise CaptureFailed(why)
            try:
                return self._keep(name, lambda: self._record_or_make_room(name, recording))
            except CaptureFailed as error:
                no_room = isinstance(error, NoRoom)
                if no_room and self._pinned():  # pins end, and then there may be room
                    self._pins.refused[name] = str(error)
                else:
                    self._refused[name] = Refusal(str(error), self._capturer.free_bytes() if no_room else None)
                raise

    def _why_not(self, name: Name) -> str:
        """Why this graph was refused, and would be again; "" if it may be captured."""
        refusal = self._refused.get(name, Refusal(""))
        if refusal.free is None or self._capturer.free_bytes() < refusal.free + MORE:
            return refusal.why
        del self._refused[name]
        return ""

    def result(self, name: Name) -> Output:
        """What the first run of a graph's forward gave, if it was ``wanted`` and no replay came since."""
        with self._lock:
            return each(Tensor.clone, self._entries[name].output)

    def drop(self, name: Name) -> None:
        """Forgets one graph, if it exists, because what it captured is wrong."""
        with self._lock:
            if name in self._entries:
                self._drop(name)

    @contextmanager
    def pinning(self) -> Iterator[Pins]:
        """What is captured or replayed in the body stays: a graph that needs its room is refused, for that one time."""
        self._pins = pins = Pins()
        try:
            yield pins
        finally:
            self._pins = None

    def held(self) -> dict[tuple[str, str], int]:
        """The graphs that are there, by their model's name and their key as the stats show them: bytes at capture."""
        with self._lock:
            self._drop_abandoned()
            found: Counter[tuple[str, str]] = Counter()
            for name, entry in self._entries.items():
                found[entry.label, str(name.key)] += entry.bytes
            return found

    def drop_owner(self, owner: int) -> None:
        """Forgets every graph of ``owner`` (its model was unloaded or freed, or a program of it was wrong)."""
        with self._lock:
            self.abandon(owner)
            self._drop_abandoned()

    def abandon(self, owner: int) -> None:
        """``drop_owner`` at the next call. For an object's end, which may come at any place, within a capture too."""
        self._abandoned.append(owner)

    def clear(self) -> None:
        """Forgets every graph; the pool's memory goes back to the driver."""
        with self._lock:
            if self._capturer.busy:
                return self._abandoned.extend({name.owner for name in self._entries})
            self._drop_abandoned()
            self._evict_down_to(-1)
            self._refused.clear()
            self._here = _Thread()

    def _drop_abandoned(self) -> None:
        while self._abandoned and not self._capturer.busy:  # maybe with one of these
            owner = self._abandoned.popleft()
            for name in [name for name in self._entries if name.owner == owner]:
                self._drop(name)
            self._refused = {name: refusal for name, refusal in self._refused.items() if name.owner != owner}
            self._warmed = {(other, program) for other, program in self._warmed if other != owner}

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
        self._entries[name] = record()
        if self._entries[name].own_bytes > self._budget:  # as another program may have taken memory meanwhile
            self._again(name, record)
        crowded = len(self._entries) > 1
        self._evict_down_to(self._budget, keep=self._pinned() | {name})
        if self.used_bytes > self._budget and self._pinned() - {name}:
            self._pins.full = True
            self._drop(name)
            raise NoRoom(budget_is_full(self._budget))
        if self.used_bytes > self._budget and crowded:  # the pool shrinks only when empty: this graph begins a new one
            self._again(name, record)
        if self.used_bytes > self._budget:
            need = self.used_bytes // MIB
            self._drop(name)
            raise CaptureFailed(say("budget_small", need=need, budget=self._budget // MIB, wanted=need + 64))
        self._pin(name)
        self._report()
        return self._entries[name].bytes

    def _again(self, name: Name, record: Callable[[], CapturedGraph]) -> None:
        self._drop(name)
        self._entries[name] = record()

    def _record_or_make_room(self, name: Name, recording: Recording) -> CapturedGraph:
        if self._capturer.broken:
            raise CaptureFailed(say("capture_broken", error=self._capturer.broken))
        program = name.owner, name.program
        has_run = program in self._warmed or bool(self._here.called)  # before, or what it calls: not just now
        try:
            return self._record(name, recording)
        except RuntimeError as error:
            # Where memory was short, DynamicVRAM may have taken pages away for the capture, which ends it.
            short, self._here.called = memory_was_short(error), frozenset()
            self._warmed.discard(program)
            if self._capturer.broken or not (short or has_run):
                raise self._failure(error) from error
        if short:
            self._evict_down_to(-1, keep=self._pinned())
            torch.cuda.empty_cache()
        try:
            return self._record(name, recording)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> CaptureFailed:
        """What the user reads of a capture that failed."""
        if self._capturer.broken:
            return CaptureFailed(say("capture_broken", error=self._capturer.broken))
        first = ". ".join((str(error).splitlines() or [type(error).__name__])[0].split(". ")[:2])  # without its details
        if memory_was_short(error) or self._capturer.free_bytes() < LITTLE:
            return NoRoom(say("capture_no_memory", error=first))
        return CaptureFailed(say("capture_failed", error=first))

    def _record(self, name: Name, recording: Recording) -> CapturedGraph:
        # Normal tensors, not inference tensors: a later call may replay outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            static = recording.static()
            output = each(torch.empty_like, recording.output)

        def run() -> None:
            each(Tensor.copy_, output, recording.forward(static))

        program, calls = (name.owner, name.program), recording.calls
        dtype = next((value.dtype for value in static.values() if value.dtype in MULTIPLIED), torch.float32)
        at_once = bool(calls) and calls <= self._here.called and self._capturer.may_fail and not recording.is_long
        if not at_once and (recording.wanted or program not in self._warmed):
            if not calls and program not in self._warmed:
                self._drop_all_that_call_others()  # whose memory may now be freed
            self._capturer.warm(run, dtype)
            self._warmed.add(program)
            self._here.called |= calls
        before = self._capturer.pool_bytes if self._entries else 0
        graph, own = self._capturer.capture(run, dtype, replayed=at_once and recording.wanted)
        own += bytes_of(*static.values(), *tensors_of(output))
        growth = max(0, self._capturer.pool_bytes - before) - bytes_of(*self._constants())
        growth += bytes_of(*self._constants(), *recording.constants)
        return CapturedGraph(
            graph, static, output, recording.weights, recording.constants, own, growth, recording.label, not calls
        )

    def _drop_all_that_call_others(self) -> None:
        for name in [name for name, entry in self._entries.items() if entry.calls_others]:
            self._drop(name)
            if self._pins:
                self._pins.lost = True

    def _evict_down_to(self, budget: int, keep: Collection[Name] = ()) -> None:
        """Drops the least recently used graphs, none of ``keep``, until ``budget`` bytes are left."""
        for name in [name for name in self._entries if name not in keep]:
            if self.used_bytes > budget:
                self._drop(name)
                STATS.graphs.evictions += 1
        self._report()

    def _drop(self, name: Name) -> None:
        graph = self._entries.pop(name).graph  # nothing else holds its tensors: they go before the pool is emptied
        self._capturer.free(graph)
        self._report()

    def _report(self) -> None:
        STATS.graphs.budget_bytes = self._budget
        STATS.graphs.used_bytes = sum(cache.used_bytes for cache in list(_CACHES.values()))

    def __len__(self) -> int:
        return len(self._entries)


_CACHES: dict[torch.device, GraphCache] = {}


def cache(device: torch.device) -> GraphCache:
    """The one cache of ``device``."""
    return _CACHES.setdefault(device, GraphCache(device))


def held(device: torch.device) -> dict[tuple[str, str], int]:
    """The graphs of ``device``, by model and key, and the bytes that each took."""
    return _CACHES[device].held() if device in _CACHES else {}


def drop_owner(owner: int) -> None:
    """Forgets every graph of ``owner`` on every device."""
    for device_cache in list(_CACHES.values()):
        device_cache.drop_owner(owner)


def abandon(owner: int) -> None:
    """``drop_owner``, as soon as a call on the device has begun that is not an object's end."""
    for device_cache in list(_CACHES.values()):
        device_cache.abandon(owner)


def clear() -> None:
    """Gives every graph's memory back, once no replay or capture runs. The next call of a shape captures it again."""
    for device_cache in list(_CACHES.values()):
        device_cache.clear()


def budget_is_full(budget: int) -> str:
    """Why a size has no graph yet. ``budget``: bytes."""
    return say("budget_full", budget=budget // MIB)
