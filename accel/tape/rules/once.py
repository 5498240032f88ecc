"""Functions of one value that several blocks compute for themselves: SiLU of the time step's embedding, say. Exact."""

from ..pointwise import COSTLY
from ..traits import traits
from ..values import Operation, Tape, Value
from .edits import replace_inputs


def compute_once(tape: Tape) -> str:
    """The first such operation serves all; what is written in place afterwards is left alone."""
    written = {value.root for operation in tape.operations if (value := operation.writes) is not None}
    given_back = set(tape.outputs)
    first: dict[tuple, Value] = {}
    same: dict[Value, Value] = {}
    left: list[Operation] = []
    for operation in tape.operations:
        replace_inputs(operation, same)
        if _is_function(operation):
            source, output = operation.inputs[0], operation.outputs[0]
            key = operation.func, source, tuple(operation.kwargs.items())
            known = first.setdefault(key, output)
            alone = {source.root, output.root, known.root} & written or output in given_back
            if known is not output and known.stride == output.stride and not alone:
                same[output] = known
                continue
        left.append(operation)
    for operation in left if same else ():
        for value in operation.outputs:
            if value is not None and value.base in same:
                value.base = same[value.base].root
    tape.operations[:] = left
    return ""


def _is_function(operation: Operation) -> bool:
    if operation.opaque or operation.writes is not None or len(operation.inputs) != 1:
        return False
    return traits(operation.func).name in COSTLY and len(operation.args) == 1
