"""A pool of torch's CUDA allocator, from which graphs have their memory: allocating in it, and what lies in it."""

import contextlib
import ctypes
import inspect
from collections.abc import Callable, Iterator

import torch

Pool = tuple[int, int]  # torch's handle of it
# torch's end of a capture tells the allocator nothing when the driver has refused the capture (2.15 does): no later one
# could use the pool then, nor would memory that is short make torch give its cache back. The names are newest first.
END_IN_POOL = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
SMALL = 1 << 20  # bytes; torch serves requests up to this from other segments than larger ones


def end_in_pool() -> Callable[[int, Pool], None] | None:
    """torch's own end of what a pool records; None where this torch has another name for it."""
    return next((found for name in END_IN_POOL if (found := getattr(torch._C, name, None))), None)


@contextlib.contextmanager
def allocating_in(pool: Pool) -> Iterator[None]:
    """Within, what this thread allocates lies in ``pool``, which gets one user more. As ``torch.cuda.use_mem_pool``."""
    index = torch.cuda.current_device()
    begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)
    if begin is None:
        begin = torch._C._cuda_beginAllocateCurrentStreamToPool
    begin(index, pool)
    try:
        yield
    finally:
        end_in_pool()(index, pool)


def segments_of(pool: Pool, index: int) -> list[dict]:
    """torch's account of the pool's segments on the device ``index``, as in ``torch.cuda.memory_snapshot``.

    torch 2.11 gives back a reference of each argument that it never took (pytorch PR 196366). Python keeps numbers up
    to 256 for good. A larger one, as a process's 257th pool has, would be freed while its handle is in use, and the
    process would end at that look or the next. So each argument gets a reference more, which a torch that is right
    leaves to it: then the number is never freed.
    """
    if "mempool_id" not in inspect.signature(torch.cuda.memory_snapshot).parameters:
        found = torch.cuda.memory_snapshot()
    else:
        for argument in (*pool, True):  # torch's own third argument: it wants all traces
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(argument))
        found = torch.cuda.memory_snapshot(pool)
    return [s for s in found if s.get("segment_pool_id") == pool and s["device"] == index]


def idle_sizes(segment: dict) -> list[int]:
    """The sizes in bytes of a segment's blocks that can be asked for exactly."""
    if segment["segment_type"] != "large":
        return []
    return [block["size"] for block in segment["blocks"] if block["state"] == "inactive" and block["size"] > SMALL]
