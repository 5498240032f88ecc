"""Helpers for rules that add and drop operations."""

from collections.abc import Iterable

import torch

from .. import aliasing
from ..layout import lie_alike, outermost_first
from ..values import Operation, Readers, Tape, Value, replaced


def replace_inputs(operation: Operation, other: dict[Value, Value]) -> None:
    """Has ``operation`` read other values."""
    if not other.keys().isdisjoint(operation.inputs):
        operation.args, operation.kwargs = (
            replaced(given, Value, lambda value: other.get(value, value))
            for given in (operation.args, operation.kwargs)
        )
        operation.inputs = [other.get(value, value) for value in operation.inputs]


def rebase(operations: Iterable[Operation], other: dict[Value, Value]) -> None:
    """Views of a value in ``other`` are of the memory of what is there in its place."""
    for operation in operations if other else ():
        for value in operation.outputs:
            if value is not None and value.base in other:
                value.base = other[value.base].root


def form_of(operation: Operation) -> tuple:
    """All that decides how an operation's results lie, and which plain operations it stands for."""
    values = operation.inputs
    given = replaced((operation.args, operation.kwargs), Value, lambda value: f"v{values.index(value)}")
    return operation.func, repr(given), tuple((v.shape, v.stride, v.dtype) for v in values)


def become(operation: Operation, func: object, args: tuple, inputs: Iterable[Value | None]) -> None:
    """Makes an operation another one with the same results."""
    operation.func, operation.args, operation.kwargs = func, args, {}
    operation.inputs = [value for value in inputs if value is not None]


def own_memory(value: Value, readers: Readers) -> None:
    """``value``, which was a view, lies in memory of its own from now on, and with it what is a view of it."""
    left = [(value, None)]
    while left:
        each, base = left.pop()
        old, each.base = each.base, base
        views = [out for reader in readers.get(each, ()) for out in reader.outputs if out is not None]
        left += [(out, value) for out in views if old is not None and out.base is old]


def share_memory(value: Value, base: Value, readers: Readers) -> None:
    """``value``, which had memory of its own, is a view of ``base`` from now on, and so is what is a view of it."""
    left = [value]
    while left:
        each = left.pop()
        left += [
            out for reader in readers.get(each, ()) for out in reader.outputs if out is not None and out.base is value
        ]
        each.base = base.root


def lay(value: Value, stride: tuple[int, ...]) -> None:
    """``value`` lies with these strides, whatever its operation makes of its arguments."""
    value.stride = stride
    made = made_of(value.origin)
    if made is None or not lie_alike(value.shape, made.stride(), stride):
        value.order = outermost_first(stride)


def made_of(operation: Operation) -> torch.Tensor | None:
    """A tensor without memory that lies as the one result of an operation, if nobody sees to that; None where torch
    cannot say.
    """
    if operation.opaque or not operation.func._schema.name.startswith("aten::") or len(operation.outputs) != 1:
        return None
    return aliasing.made_by(operation.func, operation.args, operation.kwargs)


def prune(tape: Tape) -> None:
    """Drops what nobody reads, views too."""
    wanted, kept = set(tape.outputs), []
    for operation in reversed(tape.operations):
        stays = operation.writes is not None or getattr(operation.func, "lives", False)
        if stays or any(value in wanted for value in operation.outputs):
            kept.append(operation)
            wanted.update(operation.inputs)
    tape.operations[:] = aliasing.needed(kept[::-1], tape.outputs)


def settle(tape: Tape) -> None:
    """Drops what nobody needs any more, and numbers all other results in order."""
    tape.operations[:] = aliasing.needed(tape.operations, tape.outputs)
    number = 0
    for operation in tape.operations:
        for value in operation.outputs:
            if value is not None:
                value.number, number = number, number + 1
