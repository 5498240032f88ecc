"""Writes into parts of a tensor become values, so that they fuse with what is around them.

A model may modulate its tokens in place, slice by slice, or fill a tensor piece by piece. To a tape such a write is a
call, because others look at the same memory. Here each slice that is written becomes a value of its own, and whoever
reads the whole afterwards reads the slices joined. What is written through another view, and is read through that view
alone from then on, is a value as well. The same numbers from the same operations: exact.

A tensor is left as it is where anything is in doubt: a view that is neither whole nor a slice and is read after a
write, slices along several dimensions, an operation that only works in place, memory with gaps, and where values would
cost more than writes do.
"""

from ..traits import aten
from ..values import Operation, Readers, Tape, Value
from . import edits, through_views
from .memory import Doubtful, Memory

ALIASES = frozenset(("alias", "detach", "slice", "narrow"))


def to_values(tape: Tape) -> str:
    """Every tensor that is written in place where that is right. Exact."""
    if not any(operation.writes is not None for operation in tape.operations):
        return ""
    through_views.to_values(tape)
    touching: dict[Value, list[int]] = {
        operation.writes.root: [] for operation in tape.operations if operation.writes is not None
    }
    for place, operation in enumerate(tape.operations):
        made = (value for value in operation.outputs if value is not None)
        for root in {value.root for value in (*operation.inputs, *made)} & touching.keys():
            touching[root].append(place)
    before: dict[int, list[Operation]] = {}
    for root in list(touching):
        memory = Memory(tape, root, touching.keys())
        try:
            memory.follow(touching[root])
        except Doubtful:
            memory.undo()
            continue
        del touching[root]
        for place, added in memory.before.items():
            before.setdefault(place, []).extend(added)
    found = [each for place, op in enumerate(tape.operations) for each in (*before.get(place, ()), op)]
    tape.operations[:] = found + before.get(len(tape.operations), [])
    edits.prune(tape)
    _drop_copies(tape)
    return ""


def _drop_copies(tape: Tape) -> None:
    """What is made to be copied over a whole tensor is that tensor; an alias is what it is an alias of."""
    readers, given_back = tape.readers(), set(tape.outputs)
    written = {operation.writes.root for operation in tape.operations if operation.writes is not None}
    same: dict[Value, Value] = {}
    gone: set[int] = set()
    for operation in tape.operations:
        edits.replace_inputs(operation, same)
        if operation.opaque or not operation.inputs or operation.kwargs or operation.writes is not None:
            continue
        source, result = operation.inputs[0], operation.outputs[0]
        if result is None or source in given_back or result in given_back and operation.traits.view:
            continue
        if operation.traits.name in ALIASES:
            if (result.shape, result.stride) != (source.shape, source.stride) or source.root in written:
                continue
            same[result] = source
        elif operation.func is aten.clone.default and _is_made_for(source, operation, readers):
            if any(each.func is aten.cat.default for each in readers.get(result, ())):
                continue
            maker = source.origin
            maker.outputs, maker.like, result.origin, result.order = [result], None, maker, None
            edits.lay(result, result.stride)
        else:
            continue
        gone.add(id(operation))
    tape.operations[:] = [operation for operation in tape.operations if id(operation) not in gone]


def _is_made_for(value: Value, operation: Operation, readers: Readers) -> bool:
    """Whether nobody else reads ``value``, which has memory of its own."""
    maker = value.origin
    if maker is None or maker.opaque or maker.writes is not None or len(maker.outputs) != 1 or value.base is not None:
        return False
    return not maker.traits.maybe_view and readers.get(value) == [operation]
