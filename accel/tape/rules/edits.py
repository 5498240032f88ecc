"""Helpers for rules that add and drop operations."""

from collections.abc import Iterable

from .. import aliasing
from ..values import Operation, Readers, Tape, Value, replaced


def replace_inputs(operation: Operation, other: dict[Value, Value]) -> None:
    """Has ``operation`` read other values."""
    if any(value in other for value in operation.inputs):
        operation.args, operation.kwargs = (
            replaced(given, Value, lambda value: other.get(value, value))
            for given in (operation.args, operation.kwargs)
        )
        operation.inputs = [other.get(value, value) for value in operation.inputs]


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


def settle(tape: Tape) -> None:
    """Drops what nobody needs any more, and numbers all other results in order."""
    tape.operations[:] = aliasing.needed(tape.operations, tape.outputs)
    number = 0
    for operation in tape.operations:
        for value in operation.outputs:
            if value is not None:
                value.number, number = number, number + 1
