"""A tensor that grows piece by piece is one join of all pieces: the frames of a video VAE, say."""

from .. import views
from ..values import Operation, Tape
from .edits import prune
from .parts import is_join


def join_once(tape: Tape) -> str:
    """``cat([cat([a, b]), c])`` is ``cat([a, b, c])``: each piece is copied once, not once for each that follows.

    In one kernel such a chain would take more operands with each piece, so that each number of frames would need a
    kernel of its own. Exact.
    """
    joins = {each.outputs[0]: each for each in tape.operations if is_join(each) and len(each.args[0]) == 2}
    if not any(join.args[0][0] in joins for join in joins.values()):
        return ""
    readers, written = tape.readers(), {op.writes.root for op in tape.operations if op.writes is not None}
    kept = written | set(tape.outputs)
    for result, join in joins.items():
        before, new = join.args[0]
        inner, alone = joins.get(before), len(readers.get(before, ())) == 1 and before not in kept
        if inner is None or not alone or _dim(inner) != _dim(join) or before.dtype != result.dtype:
            continue
        pieces = [*inner.args[0], new]
        if not any(piece.root in written for piece in pieces):
            join.args, join.inputs, join.like = (pieces, _dim(join)), list(dict.fromkeys(pieces)), None
    prune(tape)
    return ""


def _dim(join: Operation) -> int:
    return views.dimension(join, 1, len(join.outputs[0].shape))
