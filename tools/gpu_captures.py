"""Graphs of small forwards in plain torch, and what the driver says of their memory: for tests of graphs on a GPU."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from anyshape.accel.capture import Recording
from anyshape.accel.graphs import GraphCache, Name
from anyshape.accel.key import shape_key
from torch import Tensor

Device = torch.device | str | None
MIB = 1 << 20
FLOATS = MIB // 4  # of a MiB


def in_use(device: Device = None) -> int:
    """Bytes of the device that the driver has given out, when torch's cache is empty."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def forward(inputs: dict[str, Tensor], blow_up: int = 1) -> Tensor:
    """x [N] -> [N], through ``blow_up`` copies of it."""
    x = inputs["x"]
    return (x.expand(blow_up, -1) * 2.0 + 1.0).sum(0)


def capture(
    cache: GraphCache, x: Tensor, budget: int = 1 << 40, owner: int = 0, blow_up: int = 1,
    run: Callable[[dict[str, Tensor], int], Tensor] = forward, program: Any = 0,
) -> Name:  # fmt: skip
    """Runs and captures; the name of the graph."""
    inputs = {"x": x}
    name = Name(owner, shape_key(inputs), (program, blow_up))
    out = run(inputs, blow_up).cpu()
    torch.cuda.empty_cache()  # or static tensors would lie in what the run has left, and keep it from going
    out = out.to(x.device)
    calls = frozenset({name.program})
    cache.capture(name, Recording(lambda t: run(t, blow_up), inputs, 0, (), out, calls=calls), budget)
    return name


def comfy_free(device: Device = None) -> int:
    """What ComfyUI's get_free_memory says of a CUDA device."""
    counted = torch.cuda.memory_stats(device)
    reserved, active = counted["reserved_bytes.all.current"], counted["active_bytes.all.current"]
    return torch.cuda.mem_get_info(device)[0] + reserved - active


def fits(size: int) -> bool:
    """Whether a model of so many bytes does, in pieces as weights are."""
    pieces, piece = [], 64 * MIB
    try:
        for _ in range(size // piece):
            pieces.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        return False
    finally:
        pieces.clear()
        torch.cuda.empty_cache()
    return True
