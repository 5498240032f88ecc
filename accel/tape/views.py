"""Views and reshapes: which dimension of the result comes from which dimension of the source.

``groups`` is the one place that aligns two shapes; sizes and index expressions both follow it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .values import ONE, Operation, Size, Sizes, Value, Weight

RESHAPES = frozenset("view reshape _reshape_copy _unsafe_view flatten unflatten view_as reshape_as ravel".split())
PIECES = frozenset("chunk split split_with_sizes".split())
SAME = frozenset(
    "alias detach clone contiguous to _to_copy float type_as dropout lift_fresh detach_ view_as_same".split()
)


class Group(NamedTuple):
    """Dimensions [out0, out1) of the result and [src0, src1) of the source that hold the same elements."""

    out0: int
    out1: int
    src0: int
    src1: int


def aligned(operation: Operation) -> list[Group]:
    """Which dimensions of a reshape's result and source hold the same elements."""
    if operation.runs is None:
        name, args, kwargs = operation.traits.name, operation.args, operation.kwargs
        out, source = operation.outputs[0].shape, operation.inputs[0].sizes
        if name == "flatten" and source:  # says itself what it merges
            start = (args[1] if len(args) > 1 else kwargs.get("start_dim", 0)) % len(source)
            end = (args[2] if len(args) > 2 else kwargs.get("end_dim", -1)) % len(source)
            operation.runs = [Group(d, d + 1, d, d + 1) for d in range(start)]
            operation.runs.append(Group(start, start + 1, start, end + 1))
            more = end - start
            operation.runs += [Group(d - more, d - more + 1, d, d + 1) for d in range(end + 1, len(source))]
        elif name == "unflatten":
            dim = dimension(operation, 1, len(source))
            more = len(out) - len(source)
            operation.runs = [Group(d, d + 1, d, d + 1) for d in range(dim)]
            operation.runs.append(Group(dim, dim + more + 1, dim, dim + 1))
            operation.runs += [Group(d + more, d + more + 1, d, d + 1) for d in range(dim + 1, len(source))]
        else:
            operation.runs = groups(out, source)
    return operation.runs


def groups(out: Sequence[int], source: Sizes) -> list[Group]:
    """The smallest runs of dimensions with equal products, from left to right.

    A 1 of the call (one picture, one frame) goes where it would go if it were more, so that one and several are cut
    alike. Its value does not say where: ``_goes_left`` guesses from what stands beside it.
    """
    if 0 in out:  # without elements it does not say what it merges
        return [Group(0, len(out), 0, len(source))]
    runs = _runs(out, source)
    found: list[Group] = []
    o = s = 0
    for run in [*runs, Group(len(out), len(out), len(source), len(source))]:
        alike = run.out0 - o == run.src0 - s
        while o < run.out0 and any(alike or _is_single(size) for size in source[s : run.src0]):  # one with one
            s1 = s + 1
            while not alike and s1 < run.src0 and not _is_single(source[s1 - 1]):
                s1 += 1
            found.append(Group(o, o + 1, s, s1))
            o, s = o + 1, s1
        right = run if run.out1 > run.out0 or run.src1 > run.src0 else None
        if (o < run.out0 or s < run.src0) and found and (right is None or _goes_left(found[-1], right, out, source, s)):
            found[-1] = found[-1]._replace(out1=run.out0, src1=run.src0)
        elif right is not None:
            right = right._replace(out0=o, src0=s)
        elif o < run.out0 or s < run.src0:
            found.append(Group(o, run.out0, s, run.src0))
        if right is not None:
            found.append(right)
        o, s = run.out1, run.src1
    return found


def _runs(out: Sequence[int], source: Sizes) -> list[Group]:
    """The smallest runs that begin and end with a size that is not 1."""
    found: list[Group] = []
    o = s = 0
    while True:
        while o < len(out) and out[o] == 1:
            o += 1
        while s < len(source) and source[s].value == 1:
            s += 1
        if o == len(out) or s == len(source):
            return found
        o1, s1 = o + 1, s + 1
        left, right = out[o], source[s].value
        while left != right:
            if left < right:
                left *= out[o1]
                o1 += 1
            else:
                right *= source[s1].value
                s1 += 1
        found.append(Group(o, o1, s, s1))
        o, s = o1, s1


def _is_single(size: Size) -> bool:
    """Whether this is one of something that may be more at another size of the call."""
    return size.value == 1 and not size.static


def _goes_left(left: Group, right: Group, out: Sequence[int], source: Sizes, s: int) -> bool:
    """Whether ones between two runs belong to the first: what they were merged from says so, or what is merged there.

    ``b t c h w -> (b t) c h w`` merges nothing else, ``b t h w c -> b (t h w) c`` does.
    """
    if s == right.src0:  # ones of the result: part of what was merged before?
        for group, place, goes in ((left, -1, True), (right, 0, False)):
            solid = [size for size in source[group.src0 : group.src1] if size.value != 1 or not size.static]
            parts = _primes(solid[place]) if solid else ()
            if len(parts) > 1 and parts[place].value == 1:
                return goes
    fixed = [all(size.static for size in source[group.src0 : group.src1]) for group in (left, right)]
    if fixed[0] != fixed[1]:
        return fixed[1]
    changes = [group.out1 - group.out0 > 1 or group.src1 - group.src0 > 1 for group in (left, right)]
    return changes[0] or not changes[1]


def _primes(size: Size) -> tuple[Size, ...]:
    """What was merged into a size, and into that."""
    return tuple(prime for part in size.parts for prime in _primes(part)) or (size,)


def permutation(operation: Operation, rank: int) -> list[int] | None:
    """For a view that only reorders dimensions: the source's dimension of each of the result's."""
    name, args = operation.traits.name, operation.args
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


def dimension(operation: Operation, place: int, rank: int) -> int:
    """The dimension that ``operation`` was given as argument ``place`` or by name."""
    args = operation.args
    dim = args[place] if len(args) > place else operation.kwargs.get("dim", 0)
    return dim % rank


def pieces(operation: Operation, output: Value) -> int:
    """Which of an operation's results ``output`` is."""
    return next(i for i, value in enumerate(operation.outputs) if value is output)


def reshaped(operation: Operation) -> Sizes:
    """The sizes of a reshape's result."""
    out, sizes = operation.outputs[0].shape, operation.inputs[0].sizes
    result: list[Size] = []
    for group in aligned(operation):
        new = out[group.out0 : group.out1]
        old = tuple(size for size in sizes[group.src0 : group.src1] if size is not ONE)
        if not old or not new:  # ones come, or a size that is 1 goes
            result += [ONE] * len(new)
        elif (cut := old[0].cut) and cut[0] == old and [size.value for size in cut[1]] == list(new):
            result += cut[1]
        elif len(new) == 1 and len(old) == 1 and (old[0].static or group.src1 - group.src0 == 1):
            result += old
        elif len(new) == 1:  # with the ones that were written down as such
            parts = sizes[group.src0 : group.src1]
            merged = Size(new[0], all(size.static for size in old), parts)
            if len(old) == 1:
                merged.meet(old[0])
            result.append(merged)
        else:
            result += _split(new, old)
    return tuple(result)


def _split(new: Sequence[int], old: Sizes) -> list[Size]:
    """Several sizes from the product of ``old``, of which none is ONE."""
    if [size.value for size in old] == list(new):
        return list(old)
    if parts := _regrouped(new, old):
        return parts
    static = all(size.static for size in old)
    places = [index for index, length in enumerate(new) if length != 1] or [0]
    clip = len(old) == 1 and not static and len(new) == 2  # how many clips, and frames of each
    if len(places) == 1 and not clip:  # ones come or go, and the others are merged
        merged = old[0] if len(old) == 1 else Size(new[places[0]], static, old)
        return [merged if index == places[0] else ONE for index in range(len(new))]
    nothing = not clip and not any(
        _is_single(prime) for size in old for prime in _primes(size)
    )  # that a 1 could stand for
    found = [ONE if length == 1 and nothing else Size(length, static) for length in new]
    neighbours = tuple(size for size in found if size is not ONE)
    for size in neighbours:
        size.cut = neighbours, old
    return found


def _regrouped(new: Sequence[int], old: Sizes) -> list[Size]:
    """What was merged before, in runs that fit the new sizes; [] if it does not."""
    parts = [prime for size in old for prime in _primes(size)]
    found: list[Size] = []
    for left, length in zip(reversed(range(len(new))), new, strict=True):
        run, value = parts[:1], math.prod(size.value for size in parts[:1])
        while run and len(run) < len(parts) and value < length:
            value *= parts[len(run)].value
            run = parts[: len(run) + 1]
        while run and len(parts) - len(run) > left and parts[len(run)].value == 1:  # more ones than places for them
            run = parts[: len(run) + 1]
        if not run or value != length:
            return []
        found.append(run[0] if len(run) == 1 else Size(length, all(size.static for size in run), tuple(run)))
        del parts[: len(run)]
    return [] if parts else found


def start(operation: Operation, value: Value) -> int:
    """Where a view by slice, narrow, select or unbind begins along its dimension."""
    name, args, source = operation.traits.name, operation.args, operation.inputs[0]
    if name == "unbind":
        return pieces(operation, value)
    length = source.shape[dimension(operation, 1, len(source.shape))]
    begin = (args[2] if len(args) > 2 else operation.kwargs.get("start")) or 0
    return min(max(begin + length, 0) if begin < 0 else begin, length)  # the last two of one are that one


def part(operation: Operation, value: Value) -> tuple[int, int, int] | None:
    """(dimension, from, to) of what a view is of the operation's first input; None if it is no slice of step 1.

    Of ``select`` and ``unbind`` as well, whose results do not have that dimension.
    """
    name, source = operation.traits.name, operation.inputs[0]
    rank = len(source.shape)
    if name in PIECES:
        d, before = dimension(operation, 2, rank), operation.outputs[: pieces(operation, value)]
        if None in before:
            return None
        begin = sum(each.shape[d] for each in before)
    elif name in ("narrow", "select", "unbind") or name == "slice" and (operation.args[4:] or (1,))[0] == 1:
        d, begin = dimension(operation, 1, rank), start(operation, value)
    else:
        return None
    return d, begin, begin + (value.shape[d] if len(value.shape) == rank else 1)


def is_table(value: Value) -> bool:
    """Whether ``value`` is a weight, or a copy of one in another form."""
    value = value.root
    while value.origin is not None and len(value.origin.inputs) == 1:
        value = value.origin.inputs[0].root
    return isinstance(value.leaf, Weight)


def is_table_part(operation: Operation) -> bool:
    """Whether a view takes a part of a weight, such as a table of positions, whose start the call decides."""
    return operation.traits.name in ("slice", "narrow") and is_table(operation.inputs[0])
