"""Launching Triton kernels: as usual, inside a capture under ``cudaMallocAsync``, and not at all, to compile ahead.

``cudaMallocAsync``: ComfyUI switches that allocator on for most NVIDIA cards. What it hands out during a capture are
addresses that exist only once the graph runs. Triton asks the driver about the address of every tensor, is told that it
is invalid, and refuses. It asks nothing about plain integers, so there the compiled kernel is given the addresses
themselves.

Compiling ahead: a model's first forward needs a dozen kernel variants, and each costs a third of a second of compilers
(Triton's, ptxas, the C compiler for its launcher) on one core. A dry run of the forward finds out which; they are then
compiled side by side.
"""

import functools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MAX_WORKERS = 16


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``; the kernel's parameters by position, options such as num_warps by name."""
    ahead = getattr(_dry_run, "ahead", None)
    if ahead is not None:
        ahead.add(kernel, grid, args, options)
    elif addresses_are_promised() and torch.cuda.is_current_stream_capturing():
        compiled = kernel.warmup(*args, grid=grid, **options)  # from Triton's cache: the shape has run before
        compiled[(*grid, 1, 1)[:3]](*(a.data_ptr() if isinstance(a, Tensor) else a for a in args))
    else:
        kernel[grid](*args, **options)


@functools.cache
def addresses_are_promised() -> bool:
    """Whether tensors made during a capture have addresses that exist only while the graph runs."""
    return torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "cudaMallocAsync"


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Within the body nothing is launched: kernels are compiled, all of them by its end. What it computes is void."""
    workers = min(MAX_WORKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        _dry_run.ahead = _Ahead(pool)
        try:
            yield
        finally:
            jobs, _dry_run.ahead = _dry_run.ahead.jobs, None
    for job in jobs.values():
        job.result()


_dry_run = threading.local()  # ``ahead``: the _Ahead of the dry run that this thread is in


class _Ahead:
    """The compilations of a dry run, each variant once."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.jobs: dict[tuple, Future] = {}

    def add(self, kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        """Compiles the variant that this launch needs, unless it is under way."""
        traits = tuple(_trait(parameter, value) for parameter, value in zip(kernel.params, args, strict=True))
        name = (id(kernel), traits, tuple(sorted(options.items())))
        if name not in self.jobs:
            self.jobs[name] = self._pool.submit(_compile, kernel, grid, args, options)


def _trait(parameter: Any, value: Any) -> Any:
    """What Triton compiles a variant for; finer than its own key costs a look into its cache, coarser a compilation."""
    if parameter.is_constexpr:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return "int" if parameter.do_not_specialize else (value == 1, value % 16 == 0)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return type(value), tuple(getattr(value, "block_shape", ()))  # a number, or a tensor's descriptor


def _compile(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
    compiled = kernel.warmup(*args, grid=grid, **options)
    _ = compiled.run  # builds and loads the launcher, else left to the first launch
