"""Functions of one value that several blocks or layers compute for themselves: SiLU of the time step's embedding, or a
layer's input rounded to fp8, which queries, keys and values have in common. Exact.
"""

from typing import Any

from .. import views
from ..pointwise import COSTLY
from ..values import Operation, Tape, Value
from .edits import rebase, replace_inputs

ROUNDINGS = frozenset(("quantize_fp8",))  # of comfy-kitchen


def compute_once(tape: Tape) -> str:
    """The first such operation serves all others. A result that is written in place afterwards is left alone."""
    written = {value.root for operation in tape.operations if (value := operation.writes) is not None}
    given_back = set(tape.outputs)
    first: dict[tuple, Value] = {}
    same: dict[Value, Value] = {}
    left: list[Operation] = []
    for operation in tape.operations:
        if same:
            replace_inputs(operation, same)
        if _is_function(operation):
            source, output = operation.inputs[0], operation.outputs[0]
            key = operation.func, tuple(map(_form, operation.args)), tuple(operation.kwargs.items())
            known = first.setdefault(key, output)
            alone = {source.root, output.root, known.root} & written or output in given_back
            if known is not output and known.stride == output.stride and not alone:
                same[output] = known
                continue
        left.append(operation)
    rebase(left, same)
    tape.operations[:] = left
    return ""


def _is_function(operation: Operation) -> bool:
    if operation.opaque or operation.writes is not None or not operation.inputs:
        return False
    name = operation.traits.name
    if name in ROUNDINGS:
        return len(operation.outputs) == 1 and all(map(_is_plain, operation.args))
    return name in COSTLY and len(operation.inputs) == len(operation.args) == 1


def _is_plain(argument: Any) -> bool:
    return argument is None or isinstance(argument, (Value, int, float, str))


def _form(argument: Any) -> Any:
    """The same for arguments that are the same: each layer makes a scale of 1 again, and rows of its input."""
    if not isinstance(argument, Value):
        return argument
    number = argument.root.leaf.number if argument.root.is_constant else None
    if number is not None:
        return number, argument.shape, argument.stride, argument.dtype, argument.device
    maker = argument.origin
    if maker is not None and not maker.opaque and maker.traits.name in views.RESHAPES and len(maker.inputs) == 1:
        return maker.inputs[0], argument.shape, argument.stride
    return argument
