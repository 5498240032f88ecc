"""Which of torch's two CUDA allocators this process uses. ComfyUI switches ``cudaMallocAsync`` on for most cards."""

import functools

import torch


@functools.cache
def addresses_are_promised() -> bool:
    """Whether tensors made during a capture have addresses that exist only while the graph runs."""
    return torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "cudaMallocAsync"
