"""Copies that change nothing."""

from ..traits import aten, traits
from ..values import Tape, Value


def drop_repeats_of_one(tape: Tape) -> str:
    """``x.repeat(1, 1, 1)`` copies x as it is (heads that are repeated once): the original serves. Exact."""
    views: dict[Value, list[Value]] = {}  # by what they are views of
    last_write = -1
    for place, operation in enumerate(tape.operations):
        last_write = last_write if operation.writes is None else place
        for value in operation.outputs:
            if value is not None and value.base is not None:
                views.setdefault(value.base, []).append(value)
    for place, operation in enumerate(tape.operations):
        if operation.opaque or traits(operation.func).name != "repeat" or any(n != 1 for n in operation.args[1]):
            continue
        source, output = operation.inputs[0], operation.outputs[0]
        if len(source.shape) == len(output.shape) and source.stride != output.stride and place < last_write:
            continue
        operation.func, operation.args, operation.kwargs = aten.alias.default, (source,), {}
        output.base, output.stride = source.root, source.stride
        moved = views.pop(output, [])
        for value in moved:
            value.base = source.root
        views.setdefault(source.root, []).extend([output, *moved])
    return ""
