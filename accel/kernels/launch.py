"""Launching Triton kernels, also while a graph is captured under ``cudaMallocAsync``.

ComfyUI switches that allocator on for most NVIDIA cards. What it hands out during a capture are addresses that exist
only once the graph runs. Triton asks the driver about the address of every tensor, is told that it is invalid, and
refuses. It asks nothing about plain integers, so there the compiled kernel is given the addresses themselves.
"""

import functools
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``; the kernel's parameters by position, options such as num_warps by name."""
    if not (addresses_are_promised() and torch.cuda.is_current_stream_capturing()):
        kernel[grid](*args, **options)
        return
    compiled = kernel.warmup(*args, grid=grid, **options)  # from Triton's cache: the shape has run before
    compiled[(*grid, 1, 1)[:3]](*(a.data_ptr() if isinstance(a, Tensor) else a for a in args))


@functools.cache
def addresses_are_promised() -> bool:
    """Whether tensors made during a capture have addresses that exist only while the graph runs."""
    return torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "cudaMallocAsync"
