"""What a program asks of libraries, and how to ask those of others beforehand.

A library makes what it needs at its first call, which must not be in a capture. With torch's and ours that is the first
call of a function. Another one's may need more for each form of a call: comfy-kitchen's int8 products keep memory for
each stream, as much as the largest of them needed. One call of each form does what a run of the whole program would do,
in a fiftieth of the host's time where blocks are alike.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.operations import is_ours
from .kernels import Launch
from .values import Constant, Derived, Operation, Value, Weight, replaced

BOUND = (Weight, Constant, Derived)  # leaves that a program holds
NUMBERS = (torch.int8, torch.uint8)  # of quantised tensors. Other integers may be indices, or lengths


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor of zeros in the place of what the program computes. slot: where the step reads it."""

    slot: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> Tensor:
        """The tensor, in memory of its own."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        memory = torch.zeros(last + 1 if all(self.shape) else 0, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.stride)


def of(steps: Sequence[Operation | Launch]) -> tuple[frozenset[Hashable], dict[Hashable, Operation]]:
    """(what the steps ask of torch's libraries and of ours, a call of each form that they make of others).

    Both are empty where such a call cannot be made by itself: it might do anything.
    """
    operations = [step for step in steps if not isinstance(step, Launch)]
    known, others = [], {}
    for operation in {id(step.func): step for step in operations}.values():  # some have no hash
        if _is_known(operation):
            known.append(operation)
        elif not _may_be_alone(operation):
            return frozenset(), {}
    names = {id(operation.func) for operation in known}
    for operation in operations:
        if id(operation.func) not in names:
            if not _takes_numbers(operation):
                return frozenset(), {}
            others.setdefault(_form(operation), operation)
    return frozenset((_called(each.func), getattr(each.func, "backend", "")) for each in known), others


def blanks(operation: Operation, slots: Mapping[Value, int]) -> list[Blank]:
    """What it reads and the program does not hold."""
    values: Iterable[Value] = dict.fromkeys(operation.inputs)
    return [
        Blank(slots[value], tuple(value.shape), tuple(value.stride), value.dtype, value.device)
        for value in values
        if not isinstance(value.leaf, BOUND)
    ]


def _form(operation: Operation) -> Hashable:
    """All that decides what a call of it needs."""
    places = {value: f"v{number}" for number, value in enumerate(dict.fromkeys(operation.inputs))}
    given = replaced((operation.args, operation.kwargs), Value, places.__getitem__)
    lie = tuple((tuple(value.shape), tuple(value.stride), value.dtype) for value in places)
    return _called(operation.func), repr(given), lie


def _may_be_alone(operation: Operation) -> bool:
    """Whether it is an operation of some library's, or a function that says so of itself."""
    return getattr(operation.func, "alone", isinstance(operation.func, torch._ops.OpOverload))


def _takes_numbers(operation: Operation) -> bool:
    """Whether zeros will do, and nothing is written that the program holds."""
    if operation.writes is not None and isinstance(operation.writes.root.leaf, BOUND):
        return False
    computed = (value for value in operation.inputs if not isinstance(value.leaf, BOUND))
    return all(value.dtype.is_floating_point or value.dtype in NUMBERS for value in computed)


def _called(func: Any) -> Hashable:
    """A function without what it is for: attention's backend, or sizes."""
    return getattr(func, "likeness", getattr(func, "func", func))


def _is_known(operation: Operation) -> bool:
    own = getattr(operation.func, "own", _called(operation.func))
    schema = getattr(own, "_schema", None)
    return own is torch.empty_strided or (schema is not None and (schema.name.startswith("aten::") or is_ours(own)))
