"""Merges GroupNorm with its neighbours: what is added to each channel before it, and SiLU after it.

A number added to a whole channel moves that channel's mean, so the time step's embedding and a convolution's bias cost
nothing there. Norm and SiLU are one pass over memory.
"""

from ...kernels import operations as ours
from .. import group
from ..layout import lie_alike
from ..traits import aten
from ..values import Operation, Readers, Tape, Value, Weight
from . import edits

LESS_EXACT = (
    "GroupNorm adds the time step's embedding and a convolution's bias, and computes SiLU, in float32: up to three "
    "roundings to 16 bits less than in eager"
)
MOST_PENDING = 2  # as many as the kernel takes


def take_in(tape: Tape) -> str:
    """Applies to GroupNorms in channels_last, if nothing else reads what is merged. Rounds less than eager."""
    norms = [operation for operation in tape.operations if operation.func is ours.group_norm_last]
    if not norms:
        return ""
    readers, given_back = tape.readers(), set(tape.outputs)
    gone: set[int] = set()
    changed = False
    for operation in norms:
        changed |= _take_silu(operation, readers, given_back, gone)
        while _take_sum(operation, readers, given_back):
            changed = True
    if not changed:
        return ""
    tape.operations[:] = [operation for operation in tape.operations if id(operation) not in gone]
    return LESS_EXACT


def _alone(value: Value, reader: Operation, readers: Readers, given_back: set[Value]) -> bool:
    return readers.get(value) == [reader] and value not in given_back


def _take_silu(norm: Operation, readers: Readers, given_back: set[Value], gone: set[int]) -> bool:
    """Takes in the SiLU that reads a GroupNorm, by itself or through views that nobody else reads."""
    value, below = norm.outputs[0], []
    while True:
        (reader, *others) = readers.get(value, [None])
        if others or reader is None or value in given_back or norm.args[6]:
            return False
        if not group.is_view(reader) or len(reader.outputs) != 1:
            break
        below.append(reader)
        value = reader.outputs[0]
    if reader.opaque or reader.func is not aten.silu.default:
        return False
    result = reader.outputs[0]
    if below and not lie_alike(value.shape, value.stride, result.stride):
        return False
    norm.args = (*norm.args[:6], True, norm.args[7])
    gone.add(id(reader))
    if not below:
        norm.outputs = reader.outputs
        result.origin = norm
        return True
    below[-1].outputs, result.origin, result.order = [result], below[-1], None
    edits.share_memory(result, norm.outputs[0], readers)
    return True


def _take_sum(norm: Operation, readers: Readers, given_back: set[Value]) -> bool:
    """Takes in the sum that a GroupNorm reads, if it adds one number to each channel."""
    x, weight, bias, groups, eps, shift, silu, pending = norm.args
    made = x.origin
    if made is None or made.opaque or made.func is not aten.add.Tensor or made.kwargs or len(made.args) != 2:
        return False
    if not _alone(x, norm, readers, given_back) or not all(isinstance(item, Value) for item in made.args):
        return False
    for picture, numbers in (made.args, made.args[::-1]):
        if picture.shape != x.shape or picture.dtype != x.dtype or numbers.dtype != x.dtype:
            continue
        sides = (1,) * len(x.shape[2:])
        if numbers.shape[1:] != (x.shape[1], *sides) or numbers.shape[0] not in (1, x.shape[0]):
            continue
        root = numbers.root
        fixed = isinstance(root.leaf, Weight) and root.numel == x.shape[1]
        if x.shape[2:] == sides and len(root.shape) > 2 and not fixed:  # a picture too, where each has one pixel
            continue
        if fixed and len(pending) < MOST_PENDING:
            pending = [root, *pending]
        elif not fixed and shift is None:
            shift = numbers
        else:
            return False
        edits.become(
            norm,
            norm.func,
            (picture, weight, bias, groups, eps, shift, silu, pending),
            (picture, weight, bias, shift, *pending),
        )
        readers.setdefault(picture, []).append(norm)
        readers[picture] = [reader for reader in readers[picture] if reader is not made]
        return True
    return False
