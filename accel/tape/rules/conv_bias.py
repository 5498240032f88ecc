"""A convolution's bias as an addition, which becomes part of the kernel behind it.

cuDNN gives a convolution without its bias, and PyTorch adds that by a kernel of its own, in memory. Exact: it adds it
to the rounded result, as here. (On a CPU PyTorch adds it before rounding.)
"""

from ...kernels import operations as ours
from ..traits import aten
from ..values import Operation, Tape, Value


def add_after(tape: Tape) -> str:
    """Every convolution that runs in channels_last. Exact."""
    found: list[Operation] = []
    for operation in tape.operations:
        if operation.func is not ours.conv2d_last or operation.args[2] is None:
            found.append(operation)
            continue
        result, bias = operation.outputs[0], operation.args[2]
        count = bias.shape[0]
        raw = Value.made(result.shape, result.stride, result.dtype, result.device)
        raw.order, raw.origin, operation.outputs = result.order, operation, [raw]
        operation.args = (*operation.args[:2], None, *operation.args[3:])
        operation.inputs = list(operation.args[:2])
        spread = Value.made((1, count, 1, 1), (count, 1, 1, 1), bias.dtype, bias.device)
        spread.base = bias.root
        spread.origin = Operation(aten.view.default, (bias, [1, count, 1, 1]), {}, [bias], [spread])
        result.origin = Operation(aten.add.Tensor, (raw, spread), {}, [raw, spread], [result])
        found += [operation, spread.origin, result.origin]
    tape.operations[:] = found
    return ""
