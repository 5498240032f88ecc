"""Captures a forward as a CUDA graph. All graphs of a device share one stream and one memory pool.

Nothing in the pool is live between two replays, so every graph may reuse the memory of every other. Two things follow.

- *Replays must not overlap.* A replay waits for the one before it, whichever stream that ran on.
- *The pool looks free, and is not.* ComfyUI counts as free what torch has reserved and no tensor lives in. That is
  right for torch's cache and wrong for this pool, which only our graphs may use. So between captures tensors lie in
  its idle blocks (the ballast). Nobody reads them and graphs write over them, but torch counts them as used.
"""

import contextlib
import gc
import traceback
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .allocator import addresses_are_promised
from .errors import is_out_of_memory, let_go
from .outputs import Output, each
from .pools import Pool, allocating_in, end_in_pool, idle_sizes, segments_of
from .tape.layout import copied, fill
from .tape.pieces import Pieces

Forward = Callable[[dict[str, Tensor]], Output]


@dataclass(frozen=True)
class Recording:
    """What a capture needs to know."""

    forward: Forward
    inputs: dict[str, Tensor]
    weights: int  # weights.WeightWatch.fingerprint, now
    constants: tuple[Tensor | None, ...]  # device memory besides weights and inputs that the forward reads
    output: Output  # what the graph's will look like
    label: str = ""  # the model's name in the stats
    wanted: bool = False  # its result is asked for
    # What it calls, if all of it is known: a library makes what it needs at its first call, which must not be in a
    # capture. Where another forward has called all of it on the captures' stream, this one is captured before it runs.
    calls: frozenset[Hashable] = frozenset()
    # Its first run keeps the GPU busy for longer than the host needs for the capture, which then costs no time.
    is_long: bool = False

    def static(self) -> dict[str, Tensor]:
        """Memory with its inputs in it, and with their strides, gaps included: by these the program reads it."""
        return {name: copied(tensor, tensor.stride()) for name, tensor in self.inputs.items()}


@dataclass
class CapturedGraph:
    """One captured forward: valid for one shape and for weights at the addresses of ``weights``."""

    graph: Pieces
    inputs: dict[str, Tensor]  # static; a replay reads them
    output: Output  # static; valid until this graph's next replay
    weights: int  # weights.WeightWatch.fingerprint at capture
    constants: tuple[Tensor | None, ...]  # read by the graph, so kept as long as it
    own_bytes: int  # all that goes when it is dropped
    growth: int  # and what the pool and all constants grew by when it was captured: they may stay for others
    label: str = ""
    calls_others: bool = False  # libraries of which nothing is known

    @property
    def bytes(self) -> int:
        """What it took to capture it."""
        return self.own_bytes + self.growth

    def replay(self, inputs: dict[str, Tensor]) -> Output:
        """Replays the forward on ``inputs``. The caller owns the result."""
        for name, static in self.inputs.items():
            fill(static, inputs[name])
        self.graph.replay()
        return each(Tensor.clone, self.output)


class Capturer:
    """The stream, the pool and the memory of one device's graphs. Its owner must make one call at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.broken = ""  # why no capture can begin any more
        self.busy = False  # a graph is being replayed: between two pieces of it anything may be called
        self.pool_bytes = 0  # that the pool holds, whichever graph made it grow
        self._graphs: dict[Pieces, Pool | None] = {}  # and the pool of each
        self._pool: Pool | None = None  # that new graphs share
        self._stream: torch.cuda.Stream | None = None  # one for all captures: the pools' blocks belong to a stream
        self._workspaces: Pool | None = None  # of products on that stream
        self._multiplied: torch.dtype | None = None  # of the product that makes them
        self._reserved: Pool | None = None  # the pool that a run has begun, until its capture
        self._ballast: list[Tensor] = []
        self._replayed: torch.cuda.Event | None = None

    @property
    def may_fail(self) -> bool:
        """Whether other captures can begin after one has failed."""
        return not addresses_are_promised()

    def free_bytes(self) -> int:
        """Of the device."""
        return torch.cuda.mem_get_info(self.device)[0]

    def warm(self, run: Callable[[], object], dtype: torch.dtype) -> None:
        """Runs once on the captures' stream what will be captured next, in the memory that its graph will have.

        So a capture finds the pool as large as it needs it, and whatever libraries do at their first call is done.
        Nothing that ``run`` makes may outlive it. dtype: one in which the model multiplies.
        """
        with torch.cuda.device(self.device):
            stream, current = self._own_stream(), torch.cuda.current_stream()
            self._ballast.clear()
            stream.wait_stream(current)
            with torch.cuda.stream(stream), self.replaying():
                self._make_workspaces(dtype)
                if addresses_are_promised() or end_in_pool() is None:
                    run()
                else:
                    self._run_in_pool(run)
            current.wait_stream(stream)
            if not self._reserved:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # cached blocks belong to a stream, and no other forward runs on this one

    def _run_in_pool(self, run: Callable[[], object]) -> None:
        """The pool stays reserved for the capture that follows."""
        pool, done = self._for_new_graphs(), False
        try:
            with allocating_in(pool):
                run()
            done = True
        except BaseException as error:
            let_go(error)  # it would lie in the pool until a collection
            raise
        finally:
            self._reserved = pool
            if not done:
                self._release()

    def _for_new_graphs(self) -> Pool:
        """The pool that they share. torch takes up none whose last user has gone, and is broken if it is asked to."""
        if self._pool is None or self._pool not in (self._reserved, *self._graphs.values()):
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _release(self) -> None:
        """The pool is no longer reserved; without graphs it is gone."""
        pool, self._reserved = self._reserved, None
        if pool is not None:
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)

    def capture(self, run: Callable[[], object], dtype: torch.dtype, replayed: bool = False) -> tuple[Pieces, int]:
        """(the graph of ``run``, the bytes of the device that it alone took); the pool's are in ``pool_bytes``.

        dtype: see ``warm``. replayed: the current stream runs the graph once.
        No tensor that ``run`` makes may outlive the capture, not even in a traceback: under ``cudaMallocAsync`` its
        memory may never come to exist, and freeing it later would end the process.
        """
        with torch.cuda.device(self.device):
            self._ballast.clear()
            before = self._outside()
            try:
                graph = self._captured(run, dtype)
                if replayed or addresses_are_promised():  # that allocator gives a graph its memory at its first run
                    with self.replaying():
                        graph.replay()
                if addresses_are_promised():
                    torch.cuda.synchronize()
            except BaseException:
                self._release()
                self._settle()
                raise
            self._graphs[graph] = self._pool
            self._release()
            own = max(0, self._outside() - before)
            if addresses_are_promised():  # the graphs' memory is the driver's: what one gives back, another may take
                self.pool_bytes += own
                return graph, 0
            self._settle()
            return graph, own

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Within, the current stream may replay a graph and read its output: nothing else of the pool runs."""
        stream = torch.cuda.current_stream(self.device)
        if self._replayed is None:
            self._replayed = torch.cuda.Event()
        stream.wait_event(self._replayed)  # returns at once where nothing was recorded
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
            self._replayed.record(stream)

    def free(self, graph: Pieces) -> None:
        """Frees a graph's memory, and with the last graph of a pool the pool's."""
        pool = self._graphs.pop(graph)
        is_last = pool not in self._graphs.values()
        if is_last:
            self._ballast.clear()
        if not self._graphs:
            self.pool_bytes = 0
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # a replay of it may still be running
            graph.reset()
            torch.cuda.empty_cache()
            if is_last and self._graphs:
                self._settle()

    def _captured(self, run: Callable[[], object], dtype: torch.dtype) -> Pieces:
        """As ``torch.cuda.graph``, which also waits for the GPU, collects garbage and empties the allocator's cache."""
        graph, has_run = Pieces(), False
        with torch.cuda.stream(self._own_stream()), collector_off():
            self._make_workspaces(dtype)
            try:
                # thread_local: another thread may allocate or copy meanwhile (previews, another model's loading)
                graph.capture_begin(pool=self._for_new_graphs(), capture_error_mode="thread_local")
                run()
                has_run = True
                graph.capture_end()
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)
                is_ended = has_run and is_out_of_memory(error)  # and only the graph could not be made of it
                if addresses_are_promised() and not is_ended:  # torch's allocator keeps traces of one that broke off
                    self.broken = str(error) or type(error).__name__
                self._break_off(graph)
                raise
        return graph

    def _break_off(self, graph: Pieces) -> None:
        """Ends a capture that failed, maybe in its end. What that has to say is that it failed, and not why."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        end = end_in_pool()
        if addresses_are_promised() or end is None:
            graph.reset()
            return
        index, pool = torch.cuda.current_device(), self._pool
        with contextlib.suppress(RuntimeError):  # where the allocator's part had ended
            end(index, pool)
            torch._C._cuda_releasePool(index, pool)
        graph.reset()  # the pieces before it
        self._pool = None  # torch takes it for in use by a capture, whatever it is told; the graphs in it go on

    def _own_stream(self) -> torch.cuda.Stream:
        """The captures' stream."""
        self._stream = self._stream or torch.cuda.Stream(self.device)
        return self._stream

    def _make_workspaces(self, dtype: torch.dtype) -> None:
        """Those of products on the current stream, for this thread, if there are none. Graphs go on using them.

        torch makes one with the library's handle, and another at the first product with a bias. That is made in a dtype
        in which a model has multiplied: loading another one's kernels takes a new process a tenth of a second.

        They have a pool for themselves, for good. In the graphs' they would keep it from ever being empty. In torch's
        cache their memory would become someone else's once they are cleared, as torch's own graphs do it
        (``torch.compile`` with ``mode="reduce-overhead"``).
        """
        can = not addresses_are_promised() and end_in_pool() is not None
        self._workspaces = self._workspaces or torch.cuda.graph_pool_handle()
        self._multiplied = self._multiplied or dtype
        with torch.inference_mode():
            x = torch.zeros(16, 16, dtype=self._multiplied, device=self.device)
            with allocating_in(self._workspaces) if can else contextlib.nullcontext():
                torch.cuda.current_blas_handle()
                torch.addmm(x[0], x, x, out=torch.empty_like(x))

    def _outside(self) -> int:
        """Bytes of the device in use that are not torch's: graphs themselves and, with one allocator, their memory.

        Unlike free memory it stays the same where torch gives cached blocks back to make room.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def _settle(self) -> None:
        """Measures the pool, and lays tensors into its idle blocks."""
        if addresses_are_promised():  # its graph memory is no part of what torch has reserved
            return
        self.pool_bytes, reserved = 0, torch.cuda.memory_reserved(self.device)
        for pool in set(self._graphs.values()):
            segments = segments_of(pool, torch.cuda.current_device())
            self.pool_bytes += sum(segment["total_size"] for segment in segments)
            if sizes := [size for segment in segments for size in idle_sizes(segment)]:
                with contextlib.suppress(RuntimeError, AttributeError):  # what lies there is then taken for free
                    self._fill(pool, sizes)
        if torch.cuda.memory_reserved(self.device) > reserved:  # not in idle blocks: it would take memory, not mark it
            self._ballast.clear()

    def _fill(self, pool: Pool, sizes: list[int]) -> None:
        """Each size is one of the pool's idle blocks, so the best fit is it. As ``torch.cuda.use_mem_pool``."""
        if end_in_pool() is None:
            return
        with torch.cuda.stream(self._own_stream()):
            try:
                with allocating_in(pool):
                    for size in sizes:
                        self._ballast.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            finally:  # torch counts its user before it may refuse it
                torch._C._cuda_releasePool(torch.cuda.current_device(), pool)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keeps the garbage collector off. Freed objects may own graphs, and dropping a graph would end the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
