"""Turns a convolution's bias into an addition, which becomes part of the kernel after it.

cuDNN gives a convolution without its bias, and PyTorch adds that by a kernel of its own, in memory. Exact: it adds it
to the rounded result, as here. (On a CPU PyTorch adds it before rounding.)
"""

from ...kernels import operations as ours
from ..layout import contiguous
from ..traits import aten
from ..values import Operation, Tape, Value


def add_after(tape: Tape) -> str:
    """Applies to every convolution that runs in channels_last. Exact."""
    found: list[Operation] = []
    for operation in tape.operations:
        if operation.func not in ours.CONVOLUTIONS or operation.args[2] is None:
            found.append(operation)
            continue
        result, bias = operation.outputs[0], operation.args[2]
        count = bias.shape[0]
        raw = Value.made(result.shape, result.stride, result.dtype, result.device)
        raw.order, raw.origin, operation.outputs = result.order, operation, [raw]
        operation.args = (*operation.args[:2], None, *operation.args[3:])
        operation.inputs = list(operation.args[:2])
        shape = (1, count, *(1 for _ in result.shape[2:]))
        spread = Value.made(shape, contiguous(shape), bias.dtype, bias.device)
        spread.base = bias.root
        spread.origin = Operation(aten.view.default, (bias, list(shape)), {}, [bias], [spread])
        result.origin = Operation(aten.add.Tensor, (raw, spread), {}, [raw, spread], [result])
        found += [operation, spread.origin, result.origin]
    tape.operations[:] = found
    return ""
