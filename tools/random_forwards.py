"""Random forwards over tokens or pictures, and how far their programs are from eager.

    python -m tools.random_forwards [--kind tokens|pictures] [--first 0] [--seconds 60]

A forward is a chain of idioms that models are made of (norms, modulation, gates, rotary embeddings, joins, writes in
place, views, attention), each on two random earlier results. It is recorded at three sizes one after the other, so that
plans are reused, and compared on inputs that were not recorded. The number of a forward makes it again.
"""

import argparse
import importlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools import embed
from tools.architectures.table import parts_of

CHANNELS, HEADS, GROUPS, VECTOR = 32, 2, 8, 24
HALF = CHANNELS // 2
SIZES = {  # batch and tokens; batch, height and width
    "tokens": [(2, 6), (1, 9), (3, 4), (1, 1), (2, 2), (1, 17)],
    "pictures": [(2, 4, 6), (1, 5, 3), (3, 2, 2), (2, 1, 2), (2, 3, 3), (1, 8, 4)],
}
FUSED = 2e-3  # relative, where some operations round to 16 bits
Idiom = Callable[["RandomForward", int, Tensor, Tensor, Tensor], Tensor]
IDIOMS: dict[str, list[Idiom]] = {"tokens": [], "pictures": []}


def over(*kinds: str) -> Callable[[Idiom], Idiom]:
    """Of [batch, tokens, channels], of [batch, channels, height, width], or of either."""

    def known(idiom: Idiom) -> Idiom:
        for kind in kinds:
            IDIOMS[kind].append(idiom)
        return idiom

    return known


tokens, pictures, both = over("tokens"), over("pictures"), over("tokens", "pictures")


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
        self.embed, self.modulate = nn.Linear(VECTOR, CHANNELS), nn.Linear(VECTOR, 2 * CHANNELS)
        self.requires_grad_(False)
        idioms, count = IDIOMS[kind], drawn.randint(4, 16 if kind == "tokens" else 9)
        self.chain = [(drawn.choice(idioms), drawn.randrange(9), drawn.random(), drawn.random()) for _ in range(count)]
        self.results = drawn.randint(1, 3)
        self.sizes = drawn.sample(SIZES[kind], 3)

    def forward(self, x: Tensor, y: Tensor, vector: Tensor) -> tuple[Tensor, ...]:
        made = [x, y]
        for idiom, number, first, second in self.chain:
            a = made[-1 if first < 0.6 else int((first - 0.6) / 0.4 * len(made))]
            made.append(idiom(self, number, a, made[int(second * len(made))], vector))
        return tuple(made[-self.results :])

    def __str__(self) -> str:
        return " ".join(idiom.__name__ for idiom, *_ in self.chain)


# Idioms -----------------------------------------------------------------------------------------------------------


@both
def add(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a + b


@both
def gated(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * torch.sigmoid(b)


@both
def chosen(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return torch.where(a > b, a.clamp(-1, 1), b * 0.5)


@both
def in_16_bits(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return (F.silu(a.bfloat16()) * b.bfloat16()).float()


@both
def in_place(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y.add_(b)
    return y.mul_(1.5)


@both
def first_row(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y[:, 0] = b[:, 0]
    y[:, 0].add_(1)
    return y + y[:, -1:]


@both
def view_before_a_write(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a + 1
    view = y[..., :1]
    return y.mul_(2) + view


@both
def written_view(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = (a + 1).contiguous()
    y.view(len(a), -1).mul_(2)
    return y + b


@tokens
def modulated(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    scale, shift = model.modulate(vector).chunk(2, -1)
    return a * (1 + scale[:, None]) + shift[:, None]


@tokens
def gated_residual(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return torch.addcmul(a, model.embed(vector).unsqueeze(1).tanh(), b)


@tokens
def swiglu(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x, gate = model.wide[number % 2](a).chunk(2, -1)
    return x * F.silu(gate)


@tokens
def rms_norm(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.rms_norm(a, (CHANNELS,), model.norms[number % 3], 1e-6)


@tokens
def rms_norm_by_hand(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1e-6)


@tokens
def layer_norm(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    weights = (model.norms[number % 3], model.norms[0]) if number % 2 else (None, None)
    return F.layer_norm(a, (CHANNELS,), *weights, 1e-6)


@tokens
def norm_of_heads(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = a.reshape(*a.shape[:2], HEADS, -1).transpose(1, 2)
    return (F.rms_norm(x, x.shape[-1:]) * 2 + 1).transpose(1, 2).reshape(a.shape)


@tokens
def rotary(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x, cos, sin = a.reshape(*a.shape[:2], HALF, 2), torch.cos(b[..., :HALF]), torch.sin(b[..., :HALF])
    return torch.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], -1).flatten(-2)


@tokens
def rotary_of_halves(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x, y = a.chunk(2, dim=-1)
    return a * torch.cos(b) + torch.cat([-y, x], -1) * torch.sin(b)


@tokens
def attention(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in (a, b, a))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(a.shape)


@tokens
def stream_apart(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = F.silu(torch.cat([a, b], 1)) + 1
    return x[:, a.shape[1] :] + x[:, : a.shape[1]]


@tokens
def some_tokens(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    middle = a.shape[1] // 2
    return torch.cat([a[:, :middle] * 2, b[:, middle:]], 1)


@tokens
def written_tokens(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y, middle = torch.zeros_like(a), a.shape[1] // 2
    y[:, : middle + 1] = a[:, : middle + 1]
    y[..., 3:5] += b[..., 3:5]
    return y


@tokens
def written_channels(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = torch.empty_like(a)
    y[..., :HALF], y[..., HALF:] = a[..., HALF:], b[..., :HALF]
    y[..., :HALF].mul_(b[..., HALF:])
    return y


@tokens
def turned_around(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return (a.transpose(1, 2).contiguous() * 1.5).transpose(1, 2) + torch.roll(b, 1, 1)


@tokens
def repeated(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return a[:, :1].repeat_interleave(a.shape[1], 1) + b - b.mean(1, keepdim=True)


@pictures
def res_block(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = model.convs[number % 3](F.silu(model.groups[0](a))) + model.embed(F.silu(vector))[:, :, None, None]
    return a + model.convs[(number + 1) % 3](F.silu(model.groups[1](x)))


@pictures
def scaled_and_shifted(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    scale, shift = model.modulate(vector)[:, :, None, None].chunk(2, dim=1)
    return F.silu(model.groups[number % 2](a) * (1 + scale) + shift)


@pictures
def skip_connection(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return model.join(F.silu(model.joined(torch.cat([a, b], 1))))


@pictures
def up_and_down(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return model.down(F.interpolate(a, scale_factor=2.0, mode="nearest"))


@pictures
def geglu_of_pixels(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    x = a.flatten(2).transpose(1, 2)
    y, gate = model.wide[number % 2](F.layer_norm(x, (CHANNELS,))).chunk(2, -1)
    return (model.lins[number % 4](y * F.gelu(gate)) + x).transpose(1, 2).reshape(a.shape)


@pictures
def cropped(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.silu(F.pad(a, (1, 1, 1, 1)))[:, :, 1:-1, 1:-1]


@pictures
def channels_to_pixels(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    return F.pixel_unshuffle(F.pixel_shuffle(a, 2) + 0.5, 2)


@pictures
def some_channels(model: RandomForward, number: int, a: Tensor, b: Tensor, vector: Tensor) -> Tensor:
    y = a.clone()
    y[:, :HALF] = y[:, :HALF] * 1.2
    return (y.permute(0, 2, 3, 1) * 2 + b.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


# Comparing them ---------------------------------------------------------------------------------------------------


class Far(NamedTuple):
    """How far from eager, relative: the program of its operations, and that of kernels."""

    size: tuple[int, ...]
    unfused: float
    fused: float


def inputs(kind: str, seed: int, size: Sequence[int]) -> list[Tensor]:
    """For a forward; random."""
    drawn = torch.Generator().manual_seed(seed)
    shape = (*size, CHANNELS) if kind == "tokens" else (size[0], CHANNELS, *size[1:])
    return [torch.randn(each, generator=drawn) for each in (shape, shape, (size[0], VECTOR))]


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
            _, tape, refusal = taped(model, *inputs(kind, number, size))
            assert tape is not None, f"{kind} {number} at {size}: {refusal} ({model})"
            given = inputs(kind, number + 1_000_000, size)
            wanted, errors = parts_of(model(*(x.clone() for x in given))), []
            for fuse in (False, True):
                if fuse:
                    rules.apply(tape)
                program = Program(tape, fuse, outlines=outlines if fuse else None)
                program.bind(model)
                kept = [x.clone() for x in given]
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
