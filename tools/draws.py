"""What random draws share: where they run, how far a picture may be off, and their command.

Where there is a GPU they run on it, on real kernels and graphs, in float32; else on a CPU, where the program of a tape
is that of torch's operations, and half of the draws have graphs that do these again (``tools.captures``).
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tools import embed


def device() -> str:
    """Where models and what packs hold lie."""
    return "cuda" if embed.has_cuda() else "cpu"


def rounding() -> float:
    """How far a picture may be off: copies lie in memory otherwise, and kernels and libraries add in other orders."""
    return 1e-3 if embed.has_cuda() else 1e-5


def skipped() -> float:
    """The same where steps are skipped: what is forecast goes on from numbers that were rounded otherwise."""
    return 5e-2 if embed.has_cuda() else 1e-3


def generators() -> list[Tensor]:
    """Where all generators of random numbers are."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if embed.has_cuda() else ())]


def stand_in(patch: Any, draw: str, fused: bool) -> None:
    """What a CPU has in place of kernels, if they are wanted, and of graphs, for half of all draws. patch: pytest's."""
    from tools import captures
    from tools.recording import plan_kernels

    if embed.has_cuda():
        return
    if fused:
        plan_kernels(patch)
    if has_graphs(draw):
        captures.as_on_a_gpu(patch)


def has_graphs(draw: str) -> bool:
    """Whether this draw has graphs on a CPU."""
    return random.Random(f"{draw} on graphs").random() < 0.5


def run(
    what: str,
    compared: Callable[..., Iterable[Any]],
    kinds: Sequence[str] = (),
    ready: Callable[[], None] | None = None,
) -> None:
    """The command of a module of draws: what ``compared`` finds wrong with each. what: the module's docstring.

    kinds: of draws; ``compared`` is given one of them. ready: called once the pack is loaded.
    """
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    if kinds:
        parser.add_argument("--kind", choices=kinds, default=kinds[0])
    chosen = parser.parse_args()
    embed.use_comfyui()
    embed.load_pack(store=False)
    if ready is not None:
        ready()
    torch.backends.cudnn.allow_tf32 = False
    until, number, wrong = time.monotonic() + chosen.seconds, chosen.first, 0
    while number == chosen.first or time.monotonic() < until:
        for far in compared(number, chosen.kind) if kinds else compared(number):
            wrong += 1
            print(far, flush=True)
        number += 1
    print(f"draws {chosen.first} to {number - 1}: {wrong or 'no'} pictures are wrong")
    os._exit(bool(wrong))  # whatever threads are left
