"""Cuts a tape in two: the forward that also returns features, and the one that takes them and skips what made them.

What is left out is all that only the features needed. There are two forms, because there are two kinds of model.

In a network that is shaped like a U one *value* is all that the deep part gives the outer one (``deep``). It is the
feature, and takes the place of itself.

In a row of blocks each adds to streams that go on through all of them (``middle``), so what comes out of the last block
is mostly what went into the first. There the feature is what the middle *added*: without its blocks each stream passes
through as it is, and what lies between them still happens to it (two streams are joined, a ControlNet's residual is
added). The difference to the real stream behind the middle is an input of the other tape, which adds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from . import aliasing, cost, deep, middle, static_sizes
from .layout import contiguous
from .middle import BlockCall, NotCut, Passing
from .rest import Copies, Rest
from .values import Operation, Tape, Value

aten = torch.ops.aten

MAX_SHARE = 0.1  # of the forward's work that a skipped step may have under depth auto
LEAST_SHARE = 0.2  # of the work that must be left out, or leaving it out gains nothing
CALLED = "another node's patch is called between its blocks"


@dataclass(frozen=True)
class Cut:
    """Where a tape was cut. full: its outputs are the forward's and then ``features``. skipped: takes those.

    depth: how many blocks at either end always run, or, in a U, beside the outermost ones. share: of the work that is
    left on a skipped step.
    """

    full: Tape
    skipped: Tape
    features: int
    depth: int
    share: float


def cut(tape: Tape, calls: Sequence[BlockCall], depth: int | None, rows: int, given: int) -> Cut:
    """The two tapes; ``tape`` becomes the full one. Raises ``NotCut``, and the tape is as it was.

    depth: see ``Cut``; None chooses by ``MAX_SHARE``. rows: of the batch, by which features are kept. given: the inputs
    that the call is given; the others are options that are tensors.
    """
    values = deep.find(tape)
    if values and 1 - _share_without(tape, values[0]) >= LEAST_SHARE:
        return _at_a_value(tape, values, depth, rows, given)
    return _around_blocks(tape, calls, depth, rows, given)


def _check(tape: Tape, features: Sequence[Value], rows: int) -> None:
    """Features are kept by picture, so pictures must be their first dimension, not frames that are as many."""
    latent = tape.inputs[0]
    alike = rows > 1 and rows in latent.shape[1:]
    if alike:
        static_sizes.annotate(tape)
    others = {size.first for size in latent.sizes[1:]} if alike else set()
    for value in features:
        if len(value.shape) < 2 or value.shape[0] != rows or alike and value.sizes[0].first in others:
            raise NotCut(f"one of its streams has the shape {list(value.shape)}, which is not one part per picture")


# At a value -----------------------------------------------------------------------------------------------------------


def _at_a_value(tape: Tape, values: Sequence[Value], depth: int | None, rows: int, given: int) -> Cut:
    if depth is None or depth >= len(values):
        depth = len(list(takewhile(lambda value: _share_without(tape, value) <= MAX_SHARE, values[1:])))
    value = values[depth]
    _check(tape, [value], rows)
    behind, share = _without(tape, value), _share_without(tape, value)
    rest = Rest(tape, given, 1)
    rest.copies.values[value] = _laid_out(rest.copies, rest.feature(value), value, behind)
    for operation in behind:
        rest.copies.copy(operation)
    skipped = rest.tape()
    tape.output = [*tape.outputs, _kept(tape, value, behind)]
    return Cut(tape, skipped, 1, depth, share)


def _without(tape: Tape, value: Value) -> list[Operation]:
    """What runs where ``value`` is given."""
    left = [operation for operation in tape.operations if operation is not value.origin]
    return aliasing.needed(left, tape.outputs, calls=False)


def _share_without(tape: Tape, value: Value) -> float:
    return cost.of_all(_without(tape, value)) / (cost.of_all(tape.operations) or 1.0)


def _is_written(value: Value, operations: Sequence[Operation]) -> bool:
    return any(operation.writes is not None and operation.writes.root is value for operation in operations)


def _laid_out(copies: Copies, feature: Value, value: Value, behind: Sequence[Operation]) -> Value:
    """``feature`` as ``value`` lies in memory; in memory of its own where something is written into it."""
    if value.stride == feature.stride:
        return copies.add(aten.clone.default, (feature,), value) if _is_written(value, behind) else feature
    form = torch.empty(value.shape, device="meta")
    if len(value.shape) != 4 or value.stride != form.to(memory_format=torch.channels_last).stride():
        raise NotCut("its deep feature has a memory layout of its own")
    return copies.add(aten.clone.default, (feature,), value, memory_format=torch.channels_last)


def _kept(tape: Tape, value: Value, behind: Sequence[Operation]) -> Value:
    """``value`` as it is given back: as it was when it was made, and straight in memory."""
    if value.stride == contiguous(value.shape) and not _is_written(value, behind):
        return value
    copies = Copies(lambda value: value)
    kept = _straightened(copies, value)
    place = next(place for place, operation in enumerate(tape.operations) if operation is value.origin)
    tape.operations[place + 1 : place + 1] = copies.operations
    return kept


def _straightened(copies: Copies, value: Value) -> Value:
    """A copy of ``value`` that is straight in memory, as the tape of a skipped step expects it."""
    made = copies.add(aten.clone.default, (value,), value, memory_format=torch.contiguous_format)
    made.stride = contiguous(value.shape)
    return made


# Around blocks --------------------------------------------------------------------------------------------------------


def _around_blocks(tape: Tape, calls: Sequence[BlockCall], depth: int | None, rows: int, given: int) -> Cut:
    run = middle.find(tape, calls)
    first, last, share = _ends(tape, calls, run, depth)
    identity = _Identity(tape, run[first : last + 1])
    streams = identity.streams()
    _check(tape, streams, rows)
    skipped = _skipped(tape, identity, streams, given)
    _full(tape, identity, streams)
    return Cut(tape, skipped, len(streams), first, share)


def _ends(
    tape: Tape, calls: Sequence[BlockCall], run: Sequence[Passing], depth: int | None
) -> tuple[int, int, float]:  # fmt: skip
    """(the first and the last block of the middle, the share of work without it)."""
    here = {id(operation) for operation in tape.operations}
    work = [cost.of_all(o for o in each.call.operations if id(o) in here) for each in run]
    total, count = cost.of_all(tape.operations) or 1.0, len(run)
    if sum(work) < LEAST_SHARE * total:
        few = f"its repeated blocks are only {sum(work) / total:.0%} of its work"
        raise NotCut(CALLED if _calls_between(tape, calls) else few)
    usable = [at for at in range((count + 1) // 2) if not any(passing.must_run for passing in run[at : count - at])]
    if not usable:
        raise NotCut("its blocks write into tensors that they are given, or change their memory layout")
    left = {at: 1 - sum(work[at : count - at]) / total for at in usable}
    if depth is not None and usable[0] <= depth <= usable[-1]:
        chosen = depth
    elif depth is not None and depth < usable[0]:
        chosen = usable[0]
    else:
        chosen = max([usable[0], *(at for at in usable if left[at] <= MAX_SHARE)])
    return chosen, count - 1 - chosen, left[chosen]


def _calls_between(tape: Tape, calls: Sequence[BlockCall]) -> bool:
    """Whether other packs' code, which is called in each forward, parts the blocks from one another."""
    inside = {id(operation) for call in calls for operation in call.operations}
    places = [place for place, operation in enumerate(tape.operations) if id(operation) in inside]
    between = tape.operations[places[0] : places[-1]]
    return any(getattr(operation.func, "lives", False) and id(operation) not in inside for operation in between)


class _Identity:
    """What streams are without the blocks ``passing``: which operations are left, and on which values."""

    def __init__(self, tape: Tape, passing: Sequence[Passing]) -> None:
        self.tape = tape
        self.continues = {out: start for each in passing for out, start in each.continues.items()}
        left_out = {id(operation) for each in passing for operation in each.call.operations}
        places = [place for place, operation in enumerate(tape.operations) if id(operation) in left_out]
        self.end = max(places)  # what comes behind reads the streams with what was added
        self.before = [operation for operation in tape.operations[: self.end] if id(operation) not in left_out]
        self.behind = tape.operations[self.end + 1 :]
        self.reached = set(self.continues)  # what depends on the middle
        self.between: list[Operation] = []
        for operation in self.before:
            if any(value in self.reached for value in operation.inputs):
                self.between.append(operation)
                self.reached.update(value for value in operation.outputs if value is not None)
        # in place between the blocks: into a copy, because the stream's own memory is that of a block before them
        written = {operation.writes.root for operation in self.between if operation.writes is not None}
        self.copied = {value for value in self.continues if value.root in written}
        if any(value.base is not None for value in self.copied):
            raise NotCut("something writes into a part of a stream between its blocks")

    def streams(self) -> list[Value]:
        """What is read behind the middle and depends on it, in order."""
        read = [value for operation in self.behind for value in operation.inputs] + self.tape.outputs
        found = list(dict.fromkeys(value for value in read if value in self.reached))
        if not found:
            raise NotCut("nothing after its blocks depends on them")
        return found


def _skipped(tape: Tape, identity: _Identity, streams: Sequence[Value], given: int) -> Tape:
    """The forward without its middle."""
    rest = Rest(tape, given, len(streams), identity.continues, identity.copied)
    copies = rest.copies
    for operation in identity.before:
        copies.copy(operation)
    for stream in streams:
        start, term = copies.own(stream), rest.feature(stream)
        if _sum_of(start, term) != stream.stride:
            raise NotCut("one of its streams has another memory layout after its blocks")
        copies.values[stream] = total = copies.add(aten.add.Tensor, (start, term), stream)
        copies.values.setdefault(stream.root, total)
    for operation in identity.behind:
        copies.copy(operation)
    return rest.tape()


def _sum_of(a: Value, b: Value) -> tuple[int, ...]:
    """How a sum lies in memory."""
    return torch.add(a.empty("meta"), b.empty("meta")).stride()


def _full(tape: Tape, identity: _Identity, streams: Sequence[Value]) -> None:
    """Gives back what the middle added, too."""
    if any(getattr(operation.func, "lives", False) for operation in identity.between):
        raise NotCut(CALLED)
    copies = Copies(lambda value: value, identity.continues, identity.copied)
    for operation in identity.between:
        copies.copy(operation)
    added = [copies.add(aten.sub.Tensor, (stream, copies.own(stream)), stream) for stream in streams]
    added = [value if value.stride == contiguous(value.shape) else _straightened(copies, value) for value in added]
    place = identity.end + 1
    tape.operations[place:place] = copies.operations
    tape.output = [*tape.outputs, *added]
