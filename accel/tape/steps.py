"""The steps of a program: kernels and operations. Each takes what it reads from a list of values, and fills it in."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .group import FUSE
from .kernels import Launch
from .layout import lies_oddly, lying_so
from .values import Operation, Value, replaced


@dataclass(slots=True)
class Step:
    """One call or one launch: takes what it reads from a program's values, and puts there what it makes."""

    outputs: tuple[int, ...]  # slots; -1: nobody wants it
    free: tuple[int, ...] = field(default=(), kw_only=True)  # slots that nobody reads afterwards


@dataclass(slots=True)
class Launched(Step):
    """A kernel."""

    run: Launch
    args: tuple[int, ...]
    device: torch.device

    def __call__(self, values: list[Tensor | None]) -> None:
        """Launches it."""
        pairs = zip(self.run.outputs, self.outputs, strict=True)
        # a part of a join lies in the join's memory
        outputs = [value.empty(self.device) if value.base is None else values[slot] for value, slot in pairs]
        self.run([values[slot] for slot in self.args], outputs)
        for slot, tensor in zip(self.outputs, outputs, strict=True):
            values[slot] = tensor

    def reads(self) -> Iterator[int]:
        """The slots of what it reads."""
        yield from self.args


@dataclass(slots=True)
class Called(Step):
    """An operation.

    places: (argument, slot) of one whose slots are arguments of their own; None where they lie in lists, say.
    """

    run: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    places: tuple[tuple[int, int], ...] | None = None

    def __call__(self, values: list[Tensor | None]) -> None:
        """Calls it."""
        if self.places is None:
            args, kwargs = filled(self.args, values), filled(self.kwargs, values)
        else:
            args, kwargs = list(self.args), self.kwargs
            for place, slot in self.places:
                args[place] = values[slot]
        out = self.run(*args, **kwargs)
        if not isinstance(out, (tuple, list)):
            if self.outputs and self.outputs[0] >= 0:
                values[self.outputs[0]] = out
            return
        for slot, tensor in zip(self.outputs, out, strict=False):
            if slot >= 0:
                values[slot] = tensor

    def reads(self) -> Iterator[int]:
        """The slots of what it reads."""
        yield from [slot for _, slot in self.places or ()]
        found: list[int] = []
        replaced((self.args, self.kwargs), Slot, lambda slot: found.append(slot.number))
        yield from found


@dataclass(slots=True)
class Slot:
    """Where a value lies in the list that a run fills."""

    number: int


def run_of(operation: Operation, written: Collection[Value]) -> Callable[..., Any]:
    """What runs an operation; one of another library that works in place may give nothing back, where we want it.

    written: whose memory something is written into.
    """
    first = operation.outputs[0]
    alone = len(operation.outputs) == 1 and first is not None and first.base is None
    # what a kernel might have computed reads what kernels store: if that lies otherwise than recorded, so would this
    chosen = alone and (first.order is not None or operation.kind == FUSE or lies_oddly(first.shape, first.stride))
    if chosen and not operation.opaque and operation.writes is None:
        places = tuple(d for d, n in enumerate(first.shape) if n != 1)
        apart = operation.traits.maybe_view and (first in written or operation.inputs[0].root in written)
        return partial(lying_so, operation.func, first.stride, places, apart)
    if operation.writes is None or operation.opaque or operation.func._schema.name.startswith("aten::"):
        return operation.func
    func, place = operation.func, operation.traits.writes
    name = func._schema.arguments[place].name

    def run(*args: Any, **kwargs: Any) -> Any:
        func(*args, **kwargs)
        return args[place] if place < len(args) else kwargs[name]

    return run


def filled(structure: Any, values: list[Tensor | None]) -> Any:
    """``structure`` with tensors in place of slots."""
    kind = type(structure)
    if kind is Slot:
        return values[structure.number]
    if kind is tuple:
        return tuple([filled(item, values) for item in structure])
    if kind is list:
        return [filled(item, values) for item in structure]
    if kind is dict:
        return {name: filled(item, values) for name, item in structure.items()}
    return structure
