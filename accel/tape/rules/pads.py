"""Turns zeros around a picture or video that only a convolution reads into that convolution's own padding.

Models of video pad by hand, because frames are padded before the first one alone. Height and width need no copy for
that. The same products of the same numbers: exact.
"""

from typing import Any

from ..layout import dense, outermost_first
from ..traits import aten, by_name
from ..values import Operation, Readers, Tape, Value
from . import edits
from .channels_last import CONVOLUTIONS, PADS, RANKS


def fold(tape: Tape) -> str:
    """Applies to padding that is equally wide on both sides; any other stays. Exact."""
    if not any(_pads(operation) for operation in tape.operations):
        return ""
    readers, given_back = tape.readers(), set(tape.outputs)
    written = {value.root for operation in tape.operations if (value := operation.writes) is not None}
    gone: set[int] = set()
    same: dict[Value, Value] = {}
    for operation in tape.operations:
        if same:
            edits.replace_inputs(operation, same)
        widths = _widths(operation)
        if widths is None or {operation.inputs[0].root, operation.outputs[0]} & (written | given_back):
            continue
        left = _folded(operation, widths, readers)
        is_copy = not any(map(any, widths))  # which others may view
        if any(map(any, left)):
            flat = [width for pair in reversed(left) for width in pair]
            edits.become(operation, aten.constant_pad_nd.default, (operation.inputs[0], flat), operation.inputs)
            _shrink(operation, left)
        elif not is_copy or operation.inputs[0].stride == operation.outputs[0].stride:
            gone.add(id(operation))
            same[operation.outputs[0]] = operation.inputs[0]
    tape.operations[:] = [operation for operation in tape.operations if id(operation) not in gone]
    edits.rebase(tape.operations, same)
    return ""


def _pads(operation: Operation) -> bool:
    return not operation.opaque and operation.traits.name in PADS


def _widths(operation: Operation) -> list[tuple[int, int]] | None:
    """(before, behind) of height and width, or of frames, height and width; None if it pads otherwise."""
    if not _pads(operation):
        return None
    given = by_name(operation.func, operation.args, operation.kwargs)
    pad, rank = given["pad"], len(operation.outputs[0].shape)
    if given.get("mode", "constant") != "constant" or given.get("value") or rank not in RANKS:
        return None
    if len(pad) > 2 * (rank - 2) or any(width < 0 for width in pad):
        return None
    pairs = [(pad[place], pad[place + 1]) for place in range(0, len(pad), 2)]
    return [*((0, 0) for _ in range(rank - 2 - len(pairs))), *reversed(pairs)]


def _folded(pad: Operation, widths: list[tuple[int, int]], readers: Readers) -> list[tuple[int, int]]:
    """What is left of the padding when the one convolution that reads it has taken its part."""
    conv, *others = readers.get(pad.outputs[0], [None])
    if others or conv is None or conv.opaque or conv.func not in CONVOLUTIONS or conv.args[0] is not pad.outputs[0]:
        return widths
    given: dict[str, Any] = by_name(conv.func, conv.args, conv.kwargs)
    own = given.get("padding", 0)
    own = [own] * len(widths) if isinstance(own, int) else list(own) * (len(widths) if len(own) == 1 else 1)
    even = [before == behind for before, behind in widths]
    if not any(before for (before, _), is_even in zip(widths, even, strict=True) if is_even):
        return widths
    given["padding"] = [n + before * is_even for n, (before, _), is_even in zip(own, widths, even, strict=True)]
    conv.args, conv.kwargs = conv.args[:2], {name: given[name] for name in list(given)[2:]}
    return [(0, 0) if is_even else pair for pair, is_even in zip(widths, even, strict=True)]


def _shrink(pad: Operation, widths: list[tuple[int, int]]) -> None:
    """Has the result the shape of what is still padded."""
    source, out = pad.inputs[0], pad.outputs[0]
    sides = [n + before + behind for n, (before, behind) in zip(source.shape[2:], widths, strict=True)]
    order = outermost_first(out.stride)
    out.shape = (*source.shape[:2], *sides)
    out.stride = dense(out.shape, order)
