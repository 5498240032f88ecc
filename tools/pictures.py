"""A small network of pictures in plain torch, as UNets and their kin are built, and its program after some rules.

On the CPU, in Triton's interpreter.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from anyshape.accel.tape import rules
from anyshape.accel.tape.program import Program
from anyshape.accel.tape.record import Recorder, record
from anyshape.accel.tape.rules import edits
from anyshape.accel.tape.values import Operation, Tape, Value
from torch import Tensor, nn

CPU = torch.device("cpu")
WIDTH, TEXT, HEADS = 32, 24, 2
SIZES = ((2, 8, 6, 5), (1, 4, 8, 5), (3, 2, 6, 7), (1, 5, 7, 3), (2, 2, 2, 1))  # pictures, height, width, words
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3}


class Residual(nn.Module):
    """A residual block with a time step's embedding."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, wide), nn.GroupNorm(8, narrow)
        self.into, self.out = nn.Conv2d(wide, narrow, 3, padding=1), nn.Conv2d(narrow, narrow, 3, padding=1)
        self.embedding = nn.Linear(WIDTH, narrow)
        self.skip = nn.Conv2d(wide, narrow, 1) if wide != narrow else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.into(F.silu(self.first(x)))
        h = h + self.embedding(F.silu(embedding))[:, :, None, None]
        return self.skip(x) + self.out(F.silu(self.second(h)))


class Transformer(nn.Module):
    """Attention to the picture and to a prompt, and a feed-forward with GEGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.GroupNorm(8, width, eps=1e-6), nn.LayerNorm(width)
        self.own = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.text = nn.ModuleList(nn.Linear(TEXT, width, bias=False) for _ in range(2))
        self.query = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(x.shape[0], -1, HEADS, x.shape[-1] // HEADS).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(q.shape[0], -1, q.shape[-1] * HEADS)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = self.norm(x).movedim(1, 3).flatten(1, 2).contiguous()
        normed = self.inner(tokens)
        tokens = tokens + self.attend(*(layer(normed) for layer in self.own))
        keys, values = (layer(text) for layer in self.text)
        tokens = tokens + self.attend(self.query(self.inner(tokens)), keys, values)
        value, gate = self.up(self.inner(tokens)).chunk(2, dim=-1)
        tokens = tokens + self.down(value * F.gelu(gate))
        return tokens.reshape(n, h, w, c).movedim(3, 1).contiguous() + x


class Pictures(nn.Module):
    """Down, through the middle, and up again with a skip connection."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(WIDTH, WIDTH), Residual(WIDTH, 2 * WIDTH), Residual(3 * WIDTH, WIDTH)])
        self.transformers = nn.ModuleList(Transformer(width) for width in (2 * WIDTH, 2 * WIDTH, WIDTH, WIDTH))
        self.smaller = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.larger = nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1)
        self.last, self.out = nn.GroupNorm(8, WIDTH), nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.to(dtype).requires_grad_(False)

    def forward(self, x: Tensor, embedding: Tensor, text: Tensor) -> Tensor:
        h = skip = self.blocks[0](self.into(x), embedding)
        h = self.blocks[1](self.smaller(h), embedding)
        for transformer in self.transformers[:2]:
            h = transformer(h, text)
        h = self.larger(F.interpolate(h, size=skip.shape[2:], mode="nearest"))
        h = self.blocks[2](torch.cat([h, skip], dim=1), embedding)
        for transformer in self.transformers[2:]:
            h = transformer(h, text)
        return self.out(F.silu(self.last(h)))


class Stack(nn.Module):
    """Convolutions with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)).requires_grad_(False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def inputs(size: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random arguments of ``Pictures``."""
    n, h, w, words = size
    generator = torch.Generator().manual_seed(seed)
    shapes = (n, 4, h, w), (n, WIDTH), (n, words, TEXT)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def taped(model: nn.Module, given: tuple[Tensor, ...]) -> Tape:
    """As it was recorded."""
    recorder = Recorder(list(given), model, CPU)
    _, tape = record(lambda: model(*given), recorder)
    assert tape is not None, recorder.refusal
    return tape


def programmed(model: nn.Module, given: tuple[Tensor, ...], *chosen: Callable[[Tape], str]) -> tuple[Tape, Program]:
    """The tape after these rules (all, if none is named), and its program."""
    tape = taped(model, given)
    for rule in chosen:
        rule(tape)
    edits.settle(tape)
    if not chosen:
        rules.apply(tape)
    program = Program(tape, fuse=True)
    program.bind(model)
    return tape, program


def error(model: nn.Module, program: Program, given: tuple[Tensor, ...]) -> float:
    """How far the program's result is from the model's, which lies the same.

    What its calls give lies as the tape says, which is where kernels read it.
    """
    values = {slot: value for value, slot in program._slots.items()}
    seen = 0

    def look(slot: int, tensor: Tensor) -> None:
        nonlocal seen
        value: Value = values[slot]
        seen += 1
        places = zip(tensor.stride(), value.stride, value.shape, strict=True)
        assert all(n == 1 or own == said for own, said, n in places), (value, tensor.stride(), value.stride)

    with torch.inference_mode():
        out, wanted = program._execute(list(given), look), model(*given)
    assert seen and out.shape == wanted.shape and out.stride() == wanted.stride()
    return ((out - wanted).float().norm() / wanted.float().norm()).item()


def calls(tape: Tape, func: object) -> list[Operation]:
    """The operations of that function."""
    return [operation for operation in tape.operations if operation.func is func]
