"""Nearest upsampling to twice the size in channels_last, where PyTorch's kernel reads memory out of order. Exact."""

from typing import Any

from ...kernels import operations as ours
from ..layout import lie_alike
from ..traits import aten
from ..values import Operation, Tape
from . import channels_last, edits

NEAREST, NEAREST_EXACT = aten.upsample_nearest2d.vec, aten._upsample_nearest_exact2d.vec


def double(tape: Tape) -> str:
    """Pictures with channels last, to twice their size or one pixel less. Exact.

    torch's ``nearest-exact`` takes the same pixels where the size is exactly twice as large.
    """
    for operation in tape.operations:
        if operation.opaque or operation.func not in (NEAREST, NEAREST_EXACT):
            continue
        x, out = operation.inputs[0], operation.outputs[0]
        lies_last = lie_alike(x.shape, x.stride, channels_last.last(x.shape))
        if not lies_last or out.order != channels_last.ORDER or x.dtype not in channels_last.FLOATS:
            continue
        made = x, *out.shape[2:]
        twice = all(2 * own == other for own, other in zip(x.shape[2:], out.shape[2:], strict=True))
        if _is_double(x.shape, out.shape) if operation.func is NEAREST else twice:
            edits.become(operation, ours.upsample_last, made, (x,))
        else:
            tape.ahead.append(Operation(ours.upsample_last, made, {}, [x], [out]))
    return ""


def _is_double(small: Any, large: Any) -> bool:
    return all(2 * own - other in (0, 1) for own, other in zip(small[2:], large[2:], strict=True))
