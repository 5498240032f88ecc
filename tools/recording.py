"""Tapes and programs for tests, made of a diffusion model's call as the engine makes them, but without an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from anyshape.accel import maker, tape_tier
from anyshape.accel.comfy import recorded_attention, taping
from anyshape.accel.tape import hand_kernels, program, rules
from anyshape.accel.tape.diagnose import eager_values
from anyshape.accel.tape.guards import Guards
from anyshape.accel.tape.kernels import Launch
from anyshape.accel.tape.layout import laid_out
from anyshape.accel.tape.options import NotedOptions, Reads
from anyshape.accel.tape.program import Program
from anyshape.accel.tape.record import Recorder, record
from anyshape.accel.tape.rules.attention import Attention
from anyshape.accel.tape.values import Tape
from torch import Tensor, nn

STEPS = {torch.float16: torch.int16, torch.bfloat16: torch.int16}  # integers of a dtype's size
CLOSE = 1e-5  # of a number in float32, relative to itself or to the tensor's mean
ONE_STEP = 2.0**-7  # of bfloat16: what one rounding within a kernel may do to its result in float32


@dataclass
class Recorded:
    """A call that was recorded, and its program on kernels."""

    out: Tensor  # the recorded forward's own result
    tape: Tape
    inputs: list[Tensor]
    program: Program
    module: nn.Module

    def run(self) -> Tensor:
        """The program's result for the same inputs."""
        with torch.inference_mode():
            return self.program.run(self.inputs)


def recorded(module: nn.Module, args: tuple, named: dict[str, Any], fuse: bool = True) -> Recorded:
    """``module(*args, **named)``; fails where it is not recorded."""
    given = taping.take(module.forward, args, named)
    first = next(iter(given.tensors.values()))
    recorder = Recorder(list(given.tensors.values()), module, first.device)
    reads = Reads(recorder.add_input)
    options = NotedOptions(given.options, reads)
    recorded_attention.prepare(options, recorder)
    out, tape = record(lambda: given.call(module.forward, options), recorder)
    assert tape is not None, recorder.refusal
    if fuse:
        rules.apply(tape)
    inputs = [*given.tensors.values(), *(given.options[key] for key in Guards(reads).tensors)]
    with torch.inference_mode():
        program = Program(tape, fuse=fuse)
        program.bind(module)
    return Recorded(out, tape, inputs, program, module)


class Rounding:
    """How the results of kernels differ from eager's, on eager's own inputs: counts by source, on the device."""

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}  # [elements, not equal, off by more than a step]
        self._names: dict[str, str] = {}

    def add(self, call: Recorded) -> None:
        """Runs each kernel of a program by itself."""
        with torch.inference_mode():
            for launch, operands, expected in eager_values(call.tape, call.program, call.inputs, call.module):
                outputs = _run(launch, operands, call.tape.device)
                for out, reference in zip(outputs, expected, strict=True):
                    self._count(launch, out, reference)

    def _count(self, launch: Launch, out: Tensor, reference: Tensor) -> None:
        text = launch.source.text
        self._names[text] = launch.source.name
        counts = torch.stack(
            [torch.tensor(out.numel(), device=out.device), *(n.sum() for n in _differ(out, reference))]
        )
        self._counts[text] = self._counts.get(text, 0) + counts

    def by_source(self) -> list[tuple[str, int, int, int, str]]:
        """(a kernel's name, elements, how many are not equal, how many are off by more than a step, its source)."""
        counted = torch.stack(list(self._counts.values())).tolist()
        return [(self._names[text], *counts, text) for text, counts in zip(self._counts, counted, strict=True)]


def _run(launch: Launch, operands: list[Tensor], device: torch.device) -> list[Tensor]:
    outputs = [value.empty(device) for value in launch.outputs]
    launch([laid_out(tensor, value.stride) for tensor, value in zip(operands, launch.operands, strict=True)], outputs)
    return outputs


def _differ(out: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """(which elements are not equal, which are off by more than one step of the dtype)."""
    both_nan = out.isnan() & reference.isnan()
    if out.dtype in STEPS:
        steps = (_ordered(out) - _ordered(reference)).abs().masked_fill(both_nan, 0)
        return steps > 0, steps > 1
    off = (out.double() - reference.double()).abs()
    scale = reference.double().abs()
    scale = scale.clamp_min(scale.nan_to_num(0, 0, 0).mean())
    off = off.masked_fill(both_nan | (out == reference), 0)
    return off > CLOSE * scale, off > ONE_STEP * scale


def _ordered(x: Tensor) -> Tensor:
    """Integers in the order of the numbers, neighbours one apart; 0 and -0 are the same."""
    bits = x.contiguous().view(STEPS[x.dtype]).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def steps_of(program: Program) -> list[tuple]:
    """What a program does, without its tensors: two with equal steps do the same."""
    return [_kernel(step) if type(step.run) is Launch else _call(step) for step in program._steps]


def _kernel(step: Any) -> tuple:
    launch = step.run
    values = [(value.shape, _strides(value), value.dtype) for value in (*launch.operands, *launch.outputs)]
    return launch.source.text, launch.numbers, launch.grid, values, step.args, step.outputs, sorted(step.free)


def _call(step: Any) -> tuple:
    run = step.run
    if isinstance(run, Attention):
        func: tuple = *run.likeness, run.stride, run.backend
    else:  # one that was made for a join has its sizes as arguments
        func = getattr(run, "func", run), getattr(run, "args", ()), getattr(run, "keywords", {})
    return *func, repr(step.args), repr(step.kwargs), step.outputs, sorted(step.free)


def _strides(value: Any) -> tuple:
    """Those of dimensions with more than one element, the others say nothing."""
    return tuple(stride for stride, n in zip(value.stride, value.shape, strict=True) if n != 1)


def plan_kernels(patch: Any) -> None:
    """As on a GPU, but that programs run unfused: which kernels they would need is counted. patch: pytest's."""
    fused, known = maker.Maker.made, set()

    def made(self: Any, tape: Any, fuse: bool, call: Any) -> Any:
        unfused = Program(tape, fuse=False)  # first: rules rewrite the tape
        planned = fused(self, tape, fuse, call)
        unfused.report, unfused.trust = planned.report, planned.trust
        return unfused

    @contextmanager
    def by_hand(operations: Any, device: Any) -> Iterator[Any]:
        forms = {hand_kernels._form(operation) for operation in hand_kernels.distinct(operations)} - known
        known.update(forms)
        yield hand_kernels.Compiled(len(forms))

    patch.setattr(tape_tier, "can_fuse", lambda device: True)
    patch.setattr(maker.Maker, "made", made)
    patch.setattr(program, "compiling", by_hand)
