"""Copies that change nothing."""

from ..traits import aten, traits
from ..values import Tape


def drop_repeats_of_one(tape: Tape) -> str:
    """``x.repeat(1, 1, 1)`` copies x as it is (heads that are repeated once): the original serves. Exact."""
    for operation in tape.operations:
        if operation.opaque or traits(operation.func).name != "repeat" or any(n != 1 for n in operation.args[1]):
            continue
        source, output = operation.inputs[0], operation.outputs[0]
        if len(source.shape) == len(output.shape) and source.stride != output.stride:
            rest = tape.operations[tape.operations.index(operation) + 1 :]
            if any(other.writes is not None for other in rest):
                continue
        operation.func, operation.args, operation.kwargs = aten.alias.default, (source,), {}
        output.base, output.stride = source.root, source.stride
        for other in tape.operations:
            for value in other.outputs:
                if value is not None and value.base is output:
                    value.base = source.root
    return ""
