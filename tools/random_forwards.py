"""Random forwards over tokens, pictures or videos, and how far their programs are from eager.

    python -m tools.random_forwards [--kind tokens|pictures|videos] [--first 0] [--seconds 60]

A forward is a chain of ``idioms`` that models are made of (norms, modulation, gates, rotary embeddings, joins, writes
in place, views, attention), each on two random earlier results. Its inputs lie in memory as they were drawn to. It is
recorded at three sizes one after the other, so that plans are reused, and compared on inputs that were not recorded.
The number of a forward makes it again.
"""

import argparse
import importlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tools import embed
from tools.architectures.table import parts_of
from tools.idioms import CHANNELS, GROUPS, IDIOMS, VECTOR

SIZES = {  # batch and tokens; batch, height and width; batch, frames, height and width
    "tokens": [(2, 6), (1, 9), (3, 4), (1, 1), (2, 2), (1, 17), (4, 1)],
    "pictures": [(2, 4, 6), (1, 5, 3), (3, 2, 2), (2, 1, 2), (2, 3, 3), (1, 8, 4), (1, 1, 1), (2, 6, 1)],
    "videos": [(1, 3, 4, 6), (2, 1, 3, 5), (1, 5, 2, 2), (1, 2, 4, 3), (1, 1, 6, 4), (1, 1, 1, 3), (2, 1, 2, 1)],
}
LONGEST = {"tokens": 16, "pictures": 9, "videos": 8}
FUSED = 2e-3  # relative, where some operations round to 16 bits


class RandomForward(nn.Module):
    """The forward of this number. x and y of one size, vector [batch, 24]."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        drawn = random.Random(f"{kind} {number}")
        torch.manual_seed(number)
        self.lins = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(4))
        self.wide = nn.ModuleList(nn.Linear(CHANNELS, 2 * CHANNELS) for _ in range(2))
        self.norms = nn.ParameterList(nn.Parameter(torch.rand(CHANNELS) + 0.5) for _ in range(3))
        self.groups = nn.ModuleList(nn.GroupNorm(GROUPS, CHANNELS) for _ in range(2))
        self.joined = nn.GroupNorm(GROUPS, 2 * CHANNELS)
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3))
        self.join = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1)
        self.down = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.videos = nn.ModuleList(nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.embed, self.modulate = nn.Linear(VECTOR, CHANNELS), nn.Linear(VECTOR, 2 * CHANNELS)
        self.requires_grad_(False)
        idioms, count = IDIOMS[kind], drawn.randint(3, LONGEST[kind])
        self.chain = [(drawn.choice(idioms), drawn.randrange(9), drawn.random(), drawn.random()) for _ in range(count)]
        self.results = drawn.randint(1, 3)
        self.sizes = drawn.sample(SIZES[kind], 3)
        self.laid = drawn.choice((0, drawn.randrange(len(LAID))))

    def forward(self, x: Tensor, y: Tensor, vector: Tensor) -> tuple[Tensor, ...]:
        made = [x, y]
        for idiom, number, first, second in self.chain:
            a = made[-1 if first < 0.6 else int((first - 0.6) / 0.4 * len(made))]
            made.append(idiom(self, number, a, made[int(second * len(made))], vector))
        return tuple(made[-self.results :])

    def __str__(self) -> str:
        return " ".join(idiom.__name__ for idiom, *_ in self.chain)


# Comparing them ---------------------------------------------------------------------------------------------------


class Far(NamedTuple):
    """How far from eager, relative: the program of its operations, and that of kernels."""

    size: tuple[int, ...]
    unfused: float
    fused: float


def inputs(kind: str, seed: int, size: Sequence[int], laid: int = 0) -> list[Tensor]:
    """For a forward; random. laid: how they lie in memory, one of ``LAID``."""
    drawn = torch.Generator().manual_seed(seed)
    shape = (*size, CHANNELS) if kind == "tokens" else (size[0], CHANNELS, *size[1:])
    x, y, vector = (torch.randn(each, generator=drawn) for each in (shape, shape, (size[0], VECTOR)))
    return [*LAID[laid](x, y), vector]


LAID: list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = [
    lambda x, y: (x, y),
    lambda x, y: (x.transpose(1, -1).contiguous().transpose(1, -1), y),
    lambda x, y: (torch.cat([x, y], 1)[:, : x.shape[1]], y),
    lambda x, y: (x, y[:, :1].expand(y.shape)),
    lambda x, y: (x.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([y, x], -1)[..., 0]),
    lambda x, y: (x.movedim(1, -1).contiguous().movedim(-1, 1), y),
]


def compared(kind: str, number: int) -> Iterator[Far]:
    """The forward of this number at each of its sizes. Raises ``AssertionError`` where it is not recorded."""
    from anyshape.accel.tape import rules
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.reuse import Outlines

    from tools.architectures.taped import far
    from tools.small_forwards import taped

    model, outlines = RandomForward(kind, number), Outlines()
    for size in model.sizes:
        with torch.inference_mode():
            _, tape, refusal = taped(model, *inputs(kind, number, size, model.laid))
            assert tape is not None, f"{kind} {number} at {size}: {refusal} ({model})"
            given = inputs(kind, number + 1_000_000, size, model.laid)
            wanted, errors = parts_of(model(*inputs(kind, number + 1_000_000, size, model.laid))), []
            for fuse in (False, True):
                if fuse:
                    rules.apply(tape)
                program = Program(tape, fuse, outlines=outlines if fuse else None)
                program.bind(model)
                kept = inputs(kind, number + 1_000_000, size, model.laid)
                errors.append(far(program.run(kept), wanted))
                assert all(map(torch.equal, kept, given)), f"{kind} {number} at {size}: writes into an input ({model})"
        yield Far(size, *errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=tuple(IDIOMS), default="tokens")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    embed.use_comfyui()
    embed.load_pack(store=False)
    if os.environ["TRITON_INTERPRET"] == "1":
        from tools import interpreter  # not before it is chosen

        interpreter.watch()
        interpreter.hasten()
        interpreter.widen(importlib.import_module("anyshape.accel.tape.kernels"))
    end, number = time.monotonic() + options.seconds, options.first
    while time.monotonic() < end:
        try:
            for found in compared(options.kind, number):
                if found.unfused > 0 or found.fused > FUSED:
                    print(options.kind, number, found, RandomForward(options.kind, number), flush=True)
        except BaseException:  # a kernel that reads beside its tensors, say
            print(options.kind, number, RandomForward(options.kind, number), flush=True)
            raise
        number += 1
    print(f"{number - options.first} forwards compared")


if __name__ == "__main__":
    main()
