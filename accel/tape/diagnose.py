"""Finds the wrong kernels of a program: each gets eager's own inputs and is compared with eager's own results."""

import math

import torch
from torch import Tensor, nn

from ..preparing import look
from .kernels import Launch
from .layout import laid_out
from .program import Program
from .values import Tape, Value

TOLERANCE = 0.02  # relative L2 of one kernel's result: several roundings in bfloat16 make 0.004


def wrong_kernels(tape: Tape, program: Program, inputs: list[Tensor], module: nn.Module) -> frozenset[str]:
    """Returns the sources of those kernels of ``program`` whose results differ from the tape's operations."""
    wrong: set[str] = set()
    for launch, operands, expected in eager_values(tape, program, inputs, module):
        look()
        outputs = [value.empty(tape.device) for value in launch.outputs]
        launch([laid_out(tensor, v.stride) for tensor, v in zip(operands, launch.operands, strict=True)], outputs)
        if any(bool(error(*pair) > TOLERANCE) for pair in zip(outputs, expected, strict=True)):
            wrong.add(launch.source.text)
    return frozenset(wrong)


def eager_values(
    tape: Tape, program: Program, inputs: list[Tensor], module: nn.Module
) -> list[tuple[Launch, list[Tensor], list[Tensor]]]:
    """(a kernel, eager's values of what it reads, eager's values of what it writes), for each kernel of ``program``."""
    launches = program.launches
    parts = program.parts
    wanted = {parts.get(v, v) for launch in launches for v in (*launch.operands, *launch.outputs)}
    plain = Program(tape, fuse=False)
    plain.bind(module)
    values: dict[Value, Tensor] = plain.values(inputs, wanted)
    return [
        (launch, [values[v] for v in launch.operands], [values[parts.get(v, v)] for v in launch.outputs])
        for launch in launches
    ]


def error(out: Tensor, reference: Tensor) -> Tensor:
    """The relative error (L2) of a kernel's result where ``reference`` is finite; infinite where ``out`` is not.

    [], on the tensors' device.
    """
    out, reference = out.float(), reference.float()
    finite = torch.isfinite(reference)
    difference, own = torch.where(finite, out - reference, 0).norm(), torch.where(finite, reference, 0).norm()
    return (difference / own.clamp_min(1e-12)).nan_to_num(math.inf, math.inf)
