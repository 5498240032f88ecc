"""Captures without a GPU: graphs that run again what was captured, and a cache of them, for the tests of graphs."""

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from anyshape.accel import graphs, stats
from anyshape.accel.capture import Recording
from anyshape.accel.errors import CaptureFailed
from anyshape.accel.graphs import GraphCache, Name
from torch import Tensor

BUDGET = 100
CPU = torch.device("cpu")


class Graph:
    """Runs again what was captured, into the same tensors."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.replay = run


class Capturer:
    """In place of CUDA's. A capture makes the pool as large as ``needs`` says, and takes ``driver`` bytes besides."""

    def __init__(self) -> None:
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

    def replaying(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def free(self, graph: Graph) -> None:
        self.live -= 1
        if not self.live:
            self.pool_bytes = 0


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
