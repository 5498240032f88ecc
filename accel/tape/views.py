"""Views and reshapes: which dimension of the result comes from which of the source.

``groups`` is the one place that aligns two shapes; sizes and index expressions both follow it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .traits import traits
from .values import ONE, Operation, Size, Sizes, Value, Weight

RESHAPES = frozenset("view reshape _unsafe_view flatten unflatten view_as reshape_as ravel".split())
SAME = frozenset(
    "alias detach clone contiguous to _to_copy float type_as dropout lift_fresh detach_ view_as_same".split()
)


class Group(NamedTuple):
    """Dimensions [out0, out1) of the result and [src0, src1) of the source that hold the same elements."""

    out0: int
    out1: int
    src0: int
    src1: int


def groups(out: Sequence[int], source: Sequence[int]) -> list[Group]:
    """The smallest runs of dimensions with equal products, from left to right.

    A size of 1 goes with what stands beside it, so that one row and two rows are cut alike.
    """
    found: list[Group] = []
    o = s = 0
    while o < len(out) or s < len(source):
        o1, s1 = o + (o < len(out)), s + (s < len(source))
        left = out[o] if o1 > o else 1
        right = source[s] if s1 > s else 1
        while left != right:
            if left < right:
                left *= out[o1]
                o1 += 1
            else:
                right *= source[s1]
                s1 += 1
        found.append(Group(o, o1, s, s1))
        o, s = o1, s1
    return found


def permutation(operation: Operation, rank: int) -> list[int] | None:
    """For a view that only reorders dimensions: the source's dimension of each of the result's."""
    name, args = traits(operation.func).name, operation.args
    if name in ("transpose", "swapaxes", "swapdims"):
        order = list(range(rank))
        i, j = args[1] % rank, args[2] % rank
        order[i], order[j] = j, i
        return order
    if name in ("t", "numpy_T"):
        return list(range(rank))[::-1]
    if name == "mT":
        return [*range(rank - 2), rank - 1, rank - 2]
    if name == "permute":
        return [d % rank for d in args[1]]
    if name == "movedim":
        given = [[d] if isinstance(d, int) else d for d in args[1:3]]
        source, target = ([d % rank for d in dims] for dims in given)
        places = dict(zip(target, source, strict=True))
        rest = iter([d for d in range(rank) if d not in source])
        return [places[d] if d in places else next(rest) for d in range(rank)]
    return None


def dimension(operation: Operation, place: int, rank: int, default: int = 0) -> int:
    """The dimension that ``operation`` was given as argument ``place`` or by name."""
    args = operation.args
    dim = args[place] if len(args) > place else operation.kwargs.get("dim", default)
    return dim % rank


def pieces(operation: Operation, output: Value) -> int:
    """Which of an operation's results ``output`` is."""
    return next(i for i, value in enumerate(operation.outputs) if value is output)


def reshaped(out: Sequence[int], source: Sequence[int], sizes: Sizes) -> Sizes:
    """The sizes of a reshape's result."""
    result: list[Size] = []
    for group in groups(out, source):
        old, new = sizes[group.src0 : group.src1], out[group.out0 : group.out1]
        if len(old) == len(new) == 1:
            result.append(old[0])
        elif not old:
            result += [ONE] * len(new)
        elif len(new) == 1:
            solid = [size for size in old if size is not ONE]
            result.append(solid[0] if len(solid) == 1 else Size(new[0], all(s.static for s in old), tuple(old)))
        else:
            result += _split(new, old)
    return tuple(result)


def _split(new: Sequence[int], old: Sizes) -> list[Size]:
    if [size.value for size in old] == list(new):
        return list(old)
    solid = tuple(size for size in old if size is not ONE)
    parts = solid[0].parts if len(solid) == 1 else ()
    if tuple(part.value for part in parts) == tuple(new):
        return list(parts)
    static = all(size.static for size in old)
    places = [index for index, length in enumerate(new) if length != 1]
    if len(places) == 1 and solid:  # ones come or go, and the others are merged
        merged = solid[0] if len(solid) == 1 else Size(new[places[0]], static, solid)
        return [merged if index == places[0] else ONE for index in range(len(new))]
    nothing = not any(map(_has_single, old))  # a 1 that no picture, frame or token stands for
    return [ONE if length == 1 and nothing else Size(length, static) for length in new]


def _has_single(size: Size) -> bool:
    """Whether a size of the call that is 1 now is among those merged into ``size``."""
    return size.value == 1 and not size.static or any(map(_has_single, size.parts))


def start(operation: Operation, value: Value) -> int:
    """Where a view by slice, narrow, select or unbind begins along its dimension."""
    name, args, source = traits(operation.func).name, operation.args, operation.inputs[0]
    if name == "unbind":
        return pieces(operation, value)
    length = source.shape[dimension(operation, 1, len(source.shape))]
    begin = (args[2] if len(args) > 2 else operation.kwargs.get("start")) or 0
    return min(begin + length if begin < 0 else begin, length)


def is_table(value: Value) -> bool:
    """Whether ``value`` is a weight, or a copy of one in another form."""
    value = value.root
    while value.origin is not None and len(value.origin.inputs) == 1:
        value = value.origin.inputs[0].root
    return isinstance(value.leaf, Weight)


def is_table_part(operation: Operation) -> bool:
    """Whether a view takes a stretch of a weight, as of a table of positions: the call says where it begins."""
    return traits(operation.func).name in ("slice", "narrow") and is_table(operation.inputs[0])
