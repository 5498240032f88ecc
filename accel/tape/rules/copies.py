"""Removes copies that nobody needs."""

import torch

from ..group import probably_fuses
from ..singles import strides_below
from ..traits import aten
from ..values import Operation, Tape, Value


def drop_repeats(tape: Tape) -> str:
    """A kernel reads one row again and again (a token for each place that is filled up), so nobody copies it before.

    ``x.repeat(1, 1, 1)`` copies x as it is (heads that are repeated once): the original serves whoever reads it. Exact.
    """
    if not any(map(_repeats, tape.operations)):
        return ""
    views: dict[Value, list[Operation]] = {}  # by whose memory they share
    readers = tape.readers()
    for operation in tape.operations:
        for root in {value.base for value in operation.outputs if value is not None and value.base is not None}:
            views.setdefault(root, []).append(operation)
    written = {operation.writes.root for operation in tape.operations if operation.writes is not None}
    kept = written | {value.root for value in tape.outputs}
    for operation in tape.operations:
        if not _repeats(operation):
            continue
        source, output, counts = operation.inputs[0], operation.outputs[0], operation.args[1]
        if len(source.shape) != len(output.shape) or {source.root, output} & written:
            continue
        if any(count != 1 and n != 1 for count, n in zip(counts, source.shape, strict=True)):
            continue
        below = views.get(output, [])
        if not below and output not in kept and all(map(_computes, readers.get(output, [None]))):
            # also where all counts are 1: at another size of the call they may be more
            func, args = aten.expand.default, (source, list(output.shape))
            stride = torch.empty_strided(source.shape, source.stride, device="meta").expand(output.shape).stride()
            strides = {output: stride}
        elif all(count == 1 for count in counts):
            func, args, strides = aten.alias.default, (source,), strides_below(output, source.stride, below)
        else:
            continue
        if strides is not None:
            operation.func, operation.args, operation.kwargs = func, args, {}
            for value, stride in strides.items():
                value.base, value.stride = source.root, stride
            views.setdefault(source.root, []).extend([operation, *views.pop(output, [])])
    return ""


def _repeats(operation: Operation) -> bool:
    return not operation.opaque and operation.traits.name == "repeat"


def _computes(operation: Operation | None) -> bool:
    """Whether it is one that reads a view as well as a copy, and makes something new of it."""
    return operation is not None and probably_fuses(operation) and operation.outputs[0].base is None
