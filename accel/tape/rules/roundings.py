"""A layer's input that is rounded before rows are made of it, not after: exact.

ComfyUI makes rows of an input [B, T, K] and rounds those to fp8. What makes the input has the three dimensions, and can
store it rounded beside its other results only in that shape.
"""

from .. import quantisers, views
from ..layout import contiguous, lie_alike
from ..traits import aten
from ..values import Operation, Tape, Value
from . import edits


def round_first(tape: Tape) -> str:
    """Moves each element-wise rounding before the reshape of its input, where that reshape is only a view."""
    found: list[Operation] = []
    moved: dict[Value, Value] = {}
    for operation in tape.operations:
        source = _source(operation)
        if source is None:
            found.append(operation)
            continue
        rows = operation.outputs[0]
        whole = moved[rows] = Value.made(source.shape, contiguous(source.shape), rows.dtype, rows.device)
        inputs = [source, *operation.inputs[1:]]
        whole.origin = Operation(operation.func, (source, *operation.args[1:]), {}, inputs, [whole])
        rows.origin = Operation(aten.view.default, (whole, list(rows.shape)), {}, [whole], [rows])
        rows.base = whole
        found += [whole.origin, rows.origin]
    edits.rebase(found, moved)
    tape.operations[:] = found
    return ""


def _source(operation: Operation) -> Value | None:
    """What is made rows of before ``operation`` rounds it; None if that is not all there is to it."""
    if operation.opaque or operation.traits.name != quantisers.TO_FP8 or operation.kwargs:
        return None
    x, rows = operation.args[0], operation.outputs[0]
    maker = x.origin
    if maker is None or maker.opaque or maker.traits.name not in views.RESHAPES or x.base is None:
        return None
    source = maker.inputs[0]
    straight = lie_alike(source.shape, source.stride, contiguous(source.shape)) and rows.base is None
    return source if straight and source.shape[-1:] == x.shape[-1:] else None
