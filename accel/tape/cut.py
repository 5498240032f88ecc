"""A tape in two: the forward that also gives what its middle added, and the one that is told so and leaves it out.

Without its middle blocks each stream passes through as it is. What lies between the blocks still happens to it: two
streams are joined, a ControlNet's residual is added. The difference to the real stream behind the middle is what the
middle has added. It takes the place of the blocks at steps that are skipped, as an input of that tape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import aliasing, cost, middle
from .middle import BlockCall, NotCut, Passing
from .values import Input, Operation, Tape, Value, replaced

aten = torch.ops.aten

MAX_SHARE = 0.1  # of the forward's work that a skipped step may have under depth auto
LEAST_SHARE = 0.2  # of the work that the middle must have, or leaving it out gains nothing
MANY = 4  # blocks: of so many, one at either end always runs


@dataclass(frozen=True)
class Cut:
    """Where a tape was cut. full: its outputs are the forward's and then ``added`` ones. skipped: takes those.

    depth: how many blocks at either end always run. share: of the work that is left on a skipped step.
    """

    full: Tape
    skipped: Tape
    added: int
    depth: int
    share: float


def cut(tape: Tape, calls: Sequence[BlockCall], depth: int | None, rows: int, given: int) -> Cut:
    """The two tapes; ``tape`` becomes the full one. Raises ``NotCut``, and the tape is as it was.

    depth: how many blocks at either end always run; None chooses by ``MAX_SHARE``. rows: of the batch, by which
    features are kept. given: the inputs that the call is given; the others are options that are tensors.
    """
    run = middle.find(tape, calls)
    first, last, share = _ends(tape, run, depth)
    passing = run[first : last + 1]
    identity = _Identity(tape, passing)
    streams = identity.streams()
    if odd := [stream for stream in streams if not stream.shape or stream.shape[0] != rows or len(stream.shape) < 2]:
        raise NotCut(f"a stream of it has the form {list(odd[0].shape)}, which is not one part per picture")
    skipped = _skipped(tape, identity, streams, given)
    _full(tape, identity, streams)
    return Cut(tape, skipped, len(streams), first, share)


def _ends(tape: Tape, run: Sequence[Passing], depth: int | None) -> tuple[int, int, float]:
    """(the first and the last block of the middle, the share of work without it)."""
    here = {id(operation) for operation in tape.operations}
    work = [cost.of_all(o for o in each.call.operations if id(o) in here) for each in run]
    total, count = cost.of_all(tape.operations) or 1.0, len(run)
    if sum(work) < LEAST_SHARE * total:
        raise NotCut(f"its repeated blocks are only {sum(work) / total:.0%} of its work")
    usable = [at for at in range((count + 1) // 2) if not any(passing.must_run for passing in run[at : count - at])]
    if not usable:
        raise NotCut("its blocks write into tensors that they are given, or lay them out in another order")
    left = {at: 1 - sum(work[at : count - at]) / total for at in usable}
    if depth is not None and usable[0] <= depth <= usable[-1]:
        chosen = depth
    elif depth is not None and depth < usable[0]:
        chosen = usable[0]
    else:
        least = min(usable[-1], max(usable[0], int(count >= MANY)))
        chosen = max([least, *(at for at in usable if left[at] <= MAX_SHARE)])
    return chosen, count - 1 - chosen, left[chosen]


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
            raise NotCut("nothing behind its blocks depends on them")
        return found


class _Copies:
    """Operations on other values. leaf: what stands for a value that no copied operation makes."""

    def __init__(self, identity: _Identity, leaf: Callable[[Value], Value]) -> None:
        self.operations: list[Operation] = []
        self.values: dict[Value, Value] = {}
        self._identity, self._leaf = identity, leaf
        self._made: dict[int, Operation] = {}

    def own(self, value: Value) -> Value:
        """What stands for ``value``."""
        found = self.values.get(value)
        if found is None:
            start = self._identity.continues.get(value)
            found = self._leaf(value) if start is None else self.own(start)
            if value in self._identity.copied:
                found = self.add(aten.clone.default, (found,), found)
            self.values[value] = found
        return found

    def add(self, func: object, args: tuple[Value, ...], like: Value) -> Value:
        """The result, of the form of ``like``, of one more operation."""
        made = like.again(like.number, None)
        made.origin = operation = Operation(func, args, {}, list(args), [made])
        self.operations.append(operation)
        return made

    def copy(self, operation: Operation) -> None:
        """The operation on the values that stand for its own."""
        args, kwargs = (replaced(given, Value, self.own) for given in (operation.args, operation.kwargs))
        inputs = [self.own(value) for value in operation.inputs]
        writes = operation.writes and self.own(operation.writes)
        like = self._made.get(id(operation.like)) if operation.like is not None else None
        made = Operation(operation.func, args, kwargs, inputs, writes=writes, opaque=operation.opaque, like=like)
        source = writes or next(iter(inputs), None)
        for value in operation.outputs:
            if value is None:
                made.outputs.append(None)
                continue
            self.values[value] = new = value.again(value.number, None if value.base is None else source.root)
            new.origin = made
            made.outputs.append(new)
        self._made[id(operation)] = made
        self.operations.append(made)


def _skipped(tape: Tape, identity: _Identity, streams: Sequence[Value], given: int) -> Tape:
    """The forward without its middle. Its inputs: the call's, what the middle added, then the options."""
    leaves: dict[Value, Value] = {}

    def leaf(value: Value) -> Value:
        if value.leaf is None:
            raise NotCut("what its blocks keep for each other is read behind them")
        if value not in leaves:
            copied = value.again(value.number, value.base and leaf(value.base))
            index = value.leaf.index if isinstance(value.leaf, Input) else -1
            copied.leaf = value.leaf if index < given else Input(index + len(streams))
            leaves[value] = copied
        return leaves[value]

    inputs = [leaf(value) for value in tape.inputs]
    copies = _Copies(identity, leaf)
    for operation in identity.before:
        copies.copy(operation)
    added = []
    for place, stream in enumerate(streams):
        start, term = copies.own(stream), stream.again(stream.number, None)
        term.leaf, term.stride = Input(given + place), torch.empty(stream.shape, device="meta").stride()
        if _sum_of(start, term) != stream.stride:
            raise NotCut("a stream of it lies in memory in another order behind its blocks")
        added.append(term)
        copies.values[stream] = total = copies.add(aten.add.Tensor, (start, term), stream)
        copies.values.setdefault(stream.root, total)
    for operation in identity.behind:
        copies.copy(operation)
    output = replaced(tape.output, Value, copies.own)
    skipped = Tape(copies.operations, [*inputs[:given], *added, *inputs[given:]], output, tape.device)
    skipped.operations = aliasing.needed(skipped.operations, skipped.outputs)
    return skipped


def _sum_of(a: Value, b: Value) -> tuple[int, ...]:
    """How a sum lies in memory."""
    terms = [torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta") for value in (a, b)]
    return torch.add(*terms).stride()


def _full(tape: Tape, identity: _Identity, streams: Sequence[Value]) -> None:
    """Gives back what the middle added, too."""
    if any(getattr(operation.func, "lives", False) for operation in identity.between):
        raise NotCut("another node's patch is called between its blocks")
    copies = _Copies(identity, lambda value: value)
    for operation in identity.between:
        copies.copy(operation)
    added = [copies.add(aten.sub.Tensor, (stream, copies.own(stream)), stream) for stream in streams]
    place = identity.end + 1
    tape.operations[place:place] = copies.operations
    tape.output = [*tape.outputs, *added]
