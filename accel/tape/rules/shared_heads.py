"""Heads of keys and values that several heads of queries share (grouped-query attention), without copies of them.

Models repeat them before they call attention. torch's cuDNN and Flash kernels read one head for all that share it: the
same sums in the same order, so the results are the same to the bit.
"""

from ..traits import by_name, traits
from ..values import Operation, Tape, Value
from . import edits
from .attention import NAMES, Attention, replace

ABLE = ("cudnn", "flash")  # the efficient kernel wants as many heads of keys as of queries


def share(tape: Tape) -> str:
    """Applies to attention whose keys and values are heads repeated in turn, only for it."""
    if not any(map(_repeats, tape.operations)):
        return ""
    readers = tape.readers()
    given_back = set(tape.outputs)
    for operation in tape.operations:
        if _backend(operation) not in ABLE:
            continue
        keys, values = operation.args[1:3]
        times = {_times(value) for value in (keys, values)}
        alone = all(len(readers[value]) == 1 and value not in given_back for value in (keys, values))
        if keys is values or len(times) != 1 or not all(times) or not alone:
            continue
        if not operation.opaque:
            if any(other in readers for other in operation.outputs[1:]):
                continue
            replace(operation, "")
        operation.func.shared = times.pop()
        edits.replace_inputs(operation, {value: value.origin.inputs[0] for value in (keys, values)})
    return ""


def _backend(operation: Operation) -> str:
    """The one that an attention without a mask runs on; "" for all else."""
    called = operation.func if isinstance(operation.func, Attention) else None
    if len(operation.inputs) != 3 or (operation.opaque and called is None):
        return ""
    own = operation.func if called is None else called.own
    return (called and called.backend) or NAMES.get(traits(own).name, "")


def _repeats(operation: Operation) -> bool:
    return not operation.opaque and operation.traits.name == "repeat_interleave"


def _times(value: Value) -> int:
    """How often each head of [B, H, T, D] is repeated, one after the other; 0 if it is not that."""
    maker = value.origin
    if maker is None or len(value.shape) != 4 or not _repeats(maker):
        return 0
    given = by_name(maker.func, maker.args, maker.kwargs)
    fits = len(maker.inputs) == 1 and isinstance(given.get("repeats"), int) and given.get("dim") in (1, -3)
    return given["repeats"] if fits else 0
