"""Compares the kernels of a program with torch's operations, each kernel by itself, on random numbers.

For a size whose forward is not compared whole (``trust``). Of kernels that are launched with the same numbers one is
compared: a model of sixty blocks has some twenty different ones. The host does it while the GPU runs the forward.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .diagnose import TOLERANCE, error
from .group import CALL
from .kernels import Launch
from .program import Program
from .values import Constant, Operation, Tape, Value

MOST = 1 << 29  # bytes that a kernel reads and writes: to compare a larger one would take memory that eager leaves
SEED = 0
WIDE = 100  # random integers of 8 bits are numbers up to this; larger ones are places, which may have to be small


class NotAlone(Exception):
    """Raised where the tape does not show a kernel's results as made of what it reads."""


def are_right(tape: Tape, program: Program, inputs: Sequence[Tensor], out: Sequence[Tensor]) -> bool:
    """Whether each kernel agrees with torch, and ``out``, what the program gave, is finite.

    Waits for the GPU once, and gives back what memory it took.
    """
    reserved = _reserved(tape.device)
    errors = [found for _, found in compared(tape, program, inputs)]
    errors += [torch.where(torch.isfinite(tensor).all(), 0.0, math.inf) for tensor in out]
    right = bool((torch.stack(errors) <= TOLERANCE).all())
    if _reserved(tape.device) > reserved:
        torch.cuda.empty_cache()
    return right


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def compared(tape: Tape, program: Program, inputs: Sequence[Tensor]) -> Iterator[tuple[Launch, Tensor]]:
    """The relative error (L2) of each result of each kernel that can be compared, on the device."""
    made_by = {value: (place, each) for place, each in enumerate(tape.operations) for value in each.outputs}
    generator = torch.Generator(tape.device).manual_seed(SEED)
    for launch in {(launch.source.text, launch.numbers): launch for launch in program.launches}.values():
        if sum(_span(value) * value.dtype.itemsize for value in (*launch.operands, *launch.outputs)) > MOST:
            continue
        try:
            operands = [
                _random(value, generator) if value.leaf is None or program.fetches_its(value)
                else program.leaf(value, inputs)
                for value in launch.operands
            ]  # fmt: skip
            expected = _by_torch(program, made_by, launch, operands, inputs)
            outputs = [value.empty(tape.device) for value in launch.outputs]
            launch(operands, outputs)
            errors = [error(*pair) for pair in zip(outputs, expected, strict=True)]
        except (NotAlone, torch.OutOfMemoryError):
            continue
        yield from ((launch, found) for found in errors)


def _by_torch(
    program: Program, made_by: Mapping[Value | None, tuple[int, Operation]], launch: Launch,
    operands: Sequence[Tensor], inputs: Sequence[Tensor],
) -> Sequence[Tensor]:  # fmt: skip
    """What torch's operations make of a kernel's operands. Raises ``NotAlone``."""
    own = program.parts
    known = {own.get(value, value): tensor for value, tensor in zip(launch.operands, operands, strict=True)}
    wanted = [own.get(value, value) for value in launch.outputs]
    found: dict[int, Operation] = {}
    left = [*wanted]
    while left:
        value = left.pop()
        if value in known or type(value.leaf) is Constant:
            continue
        place, operation = made_by.get(value, (-1, None))
        if operation is None or operation.writes is not None or operation.kind == CALL:
            raise NotAlone
        if place not in found:
            found[place] = operation
            left += operation.inputs
    plain = Program(Tape([found[place] for place in sorted(found)], [], tuple(wanted), program.device), fuse=False)
    return plain.run(inputs, plain.bound_with(known))


def _span(value: Value) -> int:
    """Elements of memory from its first to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True)) if value.numel else 0


def _random(value: Value, generator: torch.Generator) -> Tensor:
    """A tensor of random numbers that lies as ``value`` does."""
    span, how = _span(value), {"generator": generator, "device": generator.device}
    if value.dtype.is_floating_point or value.dtype.is_complex:
        kind = value.dtype if value.dtype.itemsize > 1 else torch.float32
        numbers = torch.randn(span, dtype=kind, **how).to(value.dtype)
    else:
        least, most = (-WIDE, WIDE) if value.dtype == torch.int8 else (0, 2)
        numbers = torch.randint(least, most, (span,), **how).to(value.dtype)
    return numbers.as_strided(value.shape, value.stride)
