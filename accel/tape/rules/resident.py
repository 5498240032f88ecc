"""What layers copy to the device at each call, kept there: a LoRA in main memory, say, that a GGUF file's layers put on
their weights. A program without such copies may be a graph. Exact.
"""

from functools import partial

from ..binding import memory
from ..named_tensors import is_note
from ..traits import aten
from ..values import Operation, Resident, Tape, Value, Weight
from . import edits

COPIES = ("to", "_to_copy")


def keep(tape: Tape) -> str:
    """Where ``Tape.resident`` says that there is room. In the dtype that it has in main memory, as files have it."""
    if not tape.resident:
        return ""
    written = {operation.writes.root for operation in tape.operations if operation.writes is not None}
    given_back = set(tape.outputs)
    left: list[Operation] = []
    kept: dict[tuple[Value, tuple[int, ...]], Value] = {}
    same: dict[Value, Value] = {}
    for operation in tape.operations:
        edits.replace_inputs(operation, same)
        left.append(operation)
        if operation.opaque or operation.traits.name not in COPIES or len(operation.inputs) != 1:
            continue
        (source,), (copy,) = operation.inputs, operation.outputs
        if not is_fetched(source) or not is_away(source, tape) or copy in written or copy.base is not None:
            continue
        if (source, copy.stride) not in kept:
            leaf = Resident(partial(memory, copy.stride, copy.device), (source,))
            made = Value.made(source.shape, copy.stride, source.dtype, copy.device, leaf, source.number)
            made.sizes = source.sizes
            kept[source, copy.stride] = made
        there = kept[source, copy.stride]
        if copy.dtype != source.dtype or copy in given_back:
            edits.become(operation, aten._to_copy.default, (there,), [there])
            operation.kwargs = {"dtype": copy.dtype}
        else:
            left.pop()
            same[copy] = there
    edits.rebase(left, same)
    tape.operations[:] = left
    return ""


def is_fetched(value: Value) -> bool:
    """Whether it is what a weight notes: its layer copies that to the device at each call, wherever it lies."""
    return isinstance(value.leaf, Weight) and is_note(value.leaf.name)


def is_away(value: Value, tape: Tape) -> bool:
    """Whether it does not lie on the tape's device."""
    return value.device != tape.device


def fetched_bytes(tape: Tape) -> int:
    """How much the layers copy to the device at each call."""
    away = [value for value in tape.leaves() if is_fetched(value) and is_away(value, tape)]
    return sum(value.numel * value.dtype.itemsize for value in away)
