"""Captures without a GPU: graphs that run again what was captured, and a cache of them, for the tests of graphs."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from anyshape.accel import graphs, stats
from anyshape.accel.capture import Recording
from anyshape.accel.errors import CaptureFailed
from anyshape.accel.first_call import FirstCalls
from anyshape.accel.graphs import GraphCache, Name
from anyshape.accel.take import Take
from anyshape.accel.tape.pieces import Pieces
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BUDGET = 100
CPU = torch.device("cpu")


class Graph:
    """Runs again what was captured, into the same tensors."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.replay = run


class CpuGraph(TorchDispatchMode):
    """In place of ``torch.cuda.CUDAGraph``: notes what torch does, and does it again, into the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Callable[..., Any], tuple, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **kwargs or {})
        self._done.append((func, args, kwargs or {}, out))
        return out

    def capture_begin(self) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, out in self._done:
            new = func(*args, **kwargs)
            for old, now in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != now.data_ptr():
                    old.copy_(now)

    def reset(self) -> None:
        self._done.clear()


class Capturer:
    """In place of CUDA's. A capture makes the pool as large as ``needs`` says, and takes ``driver`` bytes besides."""

    def __init__(self) -> None:
        self.busy = False
        self.broken, self.pool_bytes, self.needs, self.driver, self.may_fail = "", 0, 0, 0, True
        self.live, self.captures, self.warmed, self.replayed, self.errors = 0, 0, 0, 0, []
        self.dtypes: set[torch.dtype] = set()  # of the products that make the libraries' workspaces
        self.room = 8 * graphs.LITTLE  # bytes that are free

    def free_bytes(self) -> int:
        return self.room

    def warm(self, run: Callable[[], Any], dtype: torch.dtype) -> None:
        self.warmed += 1
        self.dtypes.add(dtype)
        run()

    def capture(self, run: Callable[[], Any], dtype: torch.dtype, replayed: bool = False) -> tuple[Graph, int]:
        self.captures, self.replayed = self.captures + 1, self.replayed + replayed
        self.dtypes.add(dtype)
        if self.errors:
            raise self.errors.pop(0)
        run()
        self.live += 1
        self.pool_bytes = max(self.pool_bytes, self.needs)
        return Graph(run), self.driver

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def free(self, graph: Graph) -> None:
        self.live -= 1
        if not self.live:
            self.pool_bytes = 0


class InPieces(Capturer):
    """Its graphs do again what torch did, and are cut where other packs' code is called."""

    def capture(self, run: Callable[[], Any], dtype: torch.dtype, replayed: bool = False) -> tuple[Pieces, int]:
        graph = Pieces(CpuGraph)
        graph.capture_begin()
        run()
        graph.capture_end()
        self.captures, self.live = self.captures + 1, self.live + 1
        return graph, self.driver


def as_on_a_gpu(monkeypatch: Any) -> InPieces:
    """From the second call of a size on, models run on graphs, in pieces around the code of others; what makes them."""
    own, capturer = FirstCalls._programmed, InPieces()

    def programmed(self: FirstCalls, call: Any, settings: Any, shape: Any, take: Take, *others: Any) -> Any:
        out = own(self, call, settings, shape, take, *others)
        able = take.program is not None and not take.program.fetches
        take.graph = self._uses_graphs and call.taped.stream is None and able
        return out

    monkeypatch.setattr(FirstCalls, "_programmed", programmed)
    only_cache(monkeypatch, capturer)
    return capturer


def only_cache(monkeypatch: Any, capturer: Capturer) -> GraphCache:
    """A new cache of the CPU; until the test ends, the only one."""
    monkeypatch.setattr(graphs, "_CACHES", {})
    monkeypatch.setattr(graphs, "STATS", stats.Stats())
    graphs._CACHES[CPU] = found = GraphCache(CPU, capturer)
    return found


def recording(
    size: int = 0, output: int = 0, weights: int = 0, constants: tuple[Tensor | None, ...] = (), scale: int = 2,
    label: str = "UNet",
) -> Recording:  # fmt: skip
    """Of a forward that takes and gives so many bytes, and calls one of torch's operations."""
    x = torch.ones(size, dtype=torch.uint8)
    out = torch.full((output,), scale, dtype=torch.uint8)
    return Recording(lambda inputs: out.clone(), {"x": x}, weights, constants, out, label, calls=frozenset({"clone"}))


def name(key: Hashable, owner: int = 0, program: int = 1) -> Name:
    """Of a graph of the first model's first program, unless it is said."""
    return Name(owner, key, program)


def capture(cache: GraphCache, budget: int = BUDGET, **sizes: int) -> dict[str, str]:
    """Captures graphs of these bytes; their reasons where they were refused."""
    refused = {}
    for key, size in sizes.items():
        try:
            cache.capture(name(key), recording(size), budget)
        except CaptureFailed as error:
            refused[key] = str(error)
    return refused


def held(cache: GraphCache) -> set:
    """The keys of the graphs there are."""
    return {key for _, key in cache.held()}
