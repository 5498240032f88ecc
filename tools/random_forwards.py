"""Random forwards over tokens, pictures, videos or sounds, and how far their programs are from eager.

    python -m tools.random_forwards [--kind tokens|pictures|videos|sounds] [--first 0] [--seconds 60]

A forward is a chain of ``idioms`` that models are made of (norms, modulation, gates, rotary embeddings, joins, writes
in place, views, attention), each on two random earlier results. Its inputs lie in memory as they were drawn to. It is
recorded at three sizes one after the other, so that plans are reused, and compared on inputs that were not recorded.
The number of a forward makes it again, until there are other idioms.
"""

import copy
import importlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tools import draws, embed
from tools.architectures.table import parts_of
from tools.idioms import CHANNELS, GROUPS, IDIOMS, VECTOR, Idiom

SIZES = {  # batch and tokens; batch, height and width; batch, frames, height and width; batch and length
    "tokens": [(2, 6), (1, 9), (3, 4), (1, 1), (2, 2), (1, 17), (4, 1)],
    "pictures": [(2, 4, 6), (1, 5, 3), (3, 2, 2), (2, 1, 2), (2, 3, 3), (1, 8, 4), (1, 1, 1), (2, 6, 1)],
    "videos": [(1, 3, 4, 6), (2, 1, 3, 5), (1, 5, 2, 2), (1, 2, 4, 3), (1, 1, 6, 4), (1, 1, 1, 3), (2, 1, 2, 1)],
    "sounds": [(2, 6), (1, 9), (3, 4), (1, 1), (2, 2), (1, 17), (4, 1)],
}
LONGEST = {"tokens": 16, "pictures": 9, "videos": 8, "sounds": 12}
FUSED = {torch.float32: 2e-3, torch.float16: 2e-2}  # relative; some operations round to 16 bits anyway
UNFUSED = {torch.float32: 1e-5, torch.float16: 1e-2}  # on a GPU, whose libraries add in another order; else exact


class Link(NamedTuple):
    """An idiom of a chain, and what it is given: of which layer, and which two earlier results.

    first, second: from 0 to 1. first: the newest result below 0.6, else from the oldest on. second: from the oldest on.
    """

    idiom: Idiom
    layer: int = 0
    first: float = 0.0
    second: float = 0.0


class Draw(NamedTuple):
    """A forward. results: how many of the newest it gives. laid: the place in ``LAID``."""

    chain: Sequence[Link]
    sizes: Sequence[tuple[int, ...]]
    results: int = 1
    laid: int = 0
    dtype: torch.dtype = torch.float32


def chain_of(kind: str, draw: random.Random, count: int) -> list[Link]:
    """So many random links."""
    return [Link(draw.choice(IDIOMS[kind]), draw.randrange(9), draw.random(), draw.random()) for _ in range(count)]


def drawn(kind: str, number: int) -> Draw:
    """The forward of this number."""
    draw = random.Random(f"{kind} {number}")
    chain = chain_of(kind, draw, draw.randint(3, LONGEST[kind]))
    sizes, laid = draw.sample(SIZES[kind], 3), draw.choice((0, draw.randrange(len(LAID))))
    return Draw(chain, sizes, draw.randint(1, 3), laid, draw.choice((torch.float32, torch.float16)))


class RandomForward(nn.Module):
    """The forward of this draw. x and y of one size, vector [batch, 24]."""

    def __init__(self, kind: str, draw: Draw, seed: int = 0) -> None:
        super().__init__()
        self.kind, self.draw = kind, draw
        torch.manual_seed(seed)
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
        self.to(draws.device(), draw.dtype)

    def forward(self, x: Tensor, y: Tensor, vector: Tensor) -> tuple[Tensor, ...]:
        made = [x, y]
        for idiom, layer, first, second in self.draw.chain:
            a = made[-1 if first < 0.6 else int((first - 0.6) / 0.4 * len(made))]
            made.append(idiom(self, layer, a, made[int(second * len(made))], vector))
        return tuple(made[-self.draw.results :])

    def inputs(self, seed: int, size: Sequence[int]) -> list[Tensor]:
        """Random ones of a size."""
        drawn, like = torch.Generator().manual_seed(seed), self.norms[0]
        shape = (*size, CHANNELS) if self.kind == "tokens" else (size[0], CHANNELS, *size[1:])
        x, y, vector = (torch.randn(each, generator=drawn).to(like) for each in (shape, shape, (size[0], VECTOR)))
        return [*LAID[self.draw.laid](x, y), vector]


# Comparing them ---------------------------------------------------------------------------------------------------


class Far(NamedTuple):
    """How far from eager, relative: the program of its operations, and that of kernels.

    own: how far eager is from itself in 32 bits, where the others are far in 16.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    unfused: float
    fused: float
    own: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether rounding alone does not explain it."""
        unfused = UNFUSED[self.dtype] if embed.has_cuda() else 0.0
        return not (self.unfused <= unfused and self.fused <= max(FUSED[self.dtype], 2 * self.own))


LAID: list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = [
    lambda x, y: (x, y),
    lambda x, y: (x.transpose(1, -1).contiguous().transpose(1, -1), y),
    lambda x, y: (torch.cat([x, y], 1)[:, : x.shape[1]], y),
    lambda x, y: (x, y[:, :1].expand(y.shape)),
    lambda x, y: (x.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([y, x], -1)[..., 0]),
    lambda x, y: (x.movedim(1, -1).contiguous().movedim(-1, 1), y),
]


def compared(kind: str, draw: Draw, number: int = 0) -> Iterator[Far]:
    """A forward at each of its sizes, but for 16 bits whose numbers are not finite. number: of its random numbers.

    Raises ``AssertionError`` where it is not recorded.
    """
    from anyshape.accel.tape import rules
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.reuse import Outlines

    from tools.architectures.taped import far
    from tools.small_forwards import taped

    model, outlines = RandomForward(kind, draw, number), Outlines()
    for size in draw.sizes:
        with torch.inference_mode():
            _, tape, refusal = taped(model, *model.inputs(number, size))
            assert tape is not None, f"{kind} {number} at {size}: {refusal}"
            given = model.inputs(number + 1_000_000, size)
            wanted, errors = parts_of(model(*model.inputs(number + 1_000_000, size))), []
            for fuse in (False, True):
                if fuse:
                    rules.apply(tape)
                program = Program(tape, fuse, outlines=outlines if fuse else None)
                program.bind(model)
                kept = model.inputs(number + 1_000_000, size)
                errors.append(far(program.run(kept), wanted))
                assert all(map(torch.equal, kept, given)), f"{kind} {number} at {size}: writes into an input"
            own = 0.0
            if draw.dtype != torch.float32 and errors[1] > FUSED[draw.dtype]:  # a chain that amplifies what is rounded
                exact = parts_of(copy.deepcopy(model).float()(*(x.float() for x in given)))
                own = far([tensor.float() for tensor in wanted], exact)
        # 16 bits do not hold every chain's numbers
        if draw.dtype == torch.float32 or all(bool(tensor.isfinite().all()) for tensor in wanted):
            yield Far(size, draw.dtype, *errors, own)


def wrong(number: int, kind: str) -> Iterator[str]:
    """What ``compared`` finds that rounding does not explain."""
    draw = drawn(kind, number)
    what = " ".join(link.idiom.__name__ for link in draw.chain)
    try:
        for far in compared(kind, draw, number):
            if far.is_wrong:
                yield f"{kind} {number} {far} {what}"
    except Exception as error:  # noqa: BLE001  a kernel that reads beside its tensors, say
        yield f"{kind} {number} {type(error).__name__}: {error} {what}"


def interpreted() -> None:
    """Has Triton's interpreter run kernels, fast, and look where they read and write."""
    from tools import interpreter  # Triton, which by then knows that it is to interpret

    interpreter.watch()
    interpreter.hasten()
    interpreter.widen(importlib.import_module("anyshape.accel.tape.kernels"))


if __name__ == "__main__":
    if not embed.has_cuda():
        os.environ["TRITON_INTERPRET"] = "1"
    draws.run(__doc__, wrong, tuple(IDIOMS), None if embed.has_cuda() else interpreted)
