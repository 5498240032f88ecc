"""Finds the middle of a model: the longest run of repeated blocks through which streams pass.

A block of a transformer adds to what it is given: ``x + attention(x)``, then ``x + mlp(x)``. So each result of a block
continues one of its arguments, and without the block the argument itself is what comes out. Blocks follow one another
where all that lies between them moves values (joins, slices) or adds to them (a ControlNet's residuals).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import cost
from .values import Operation, Tape, Value

# A sum continues its terms, the others their first argument.
SUMS = frozenset("add add_ sub sub_ rsub".split())
ALONG = frozenset(
    "addcmul addcmul_ clone contiguous to _to_copy nan_to_num nan_to_num_ clamp clamp_ alias detach copy_".split()
)
TURNS = frozenset("view reshape _unsafe_view transpose permute unsqueeze squeeze flatten unflatten movedim t".split())
MOVES = TURNS | frozenset("select slice split split_with_sizes chunk unbind narrow expand cat concat stack".split())
INTO = frozenset("copy slice_scatter select_scatter".split())  # what writes in place have become


class NotCut(Exception):  # noqa: N818  a message, as ``NotUsed``
    """Raised where a tape has no middle that could be skipped; says why."""


@dataclass(eq=False)
class BlockCall:
    """One call of a block, in values of the tape. given, out: the tensors among its arguments and in its result."""

    path: str
    operations: list[Operation]
    given: list[Value]
    out: list[Value]


@dataclass
class Passing:
    """A call of a block that adds to streams. continues: each of its results to the argument that it goes on from."""

    call: BlockCall
    continues: dict[Value, Value]
    must_run: bool = False  # it writes into memory that others see, or lays a stream out in another order


def find(tape: Tape, calls: Sequence[BlockCall]) -> list[Passing]:
    """The calls of the run with the most work, in order. Raises ``NotCut``."""
    if not calls:
        raise NotCut("it has no repeated blocks")
    readers, seen_by = _read_outside(tape, calls), _seen_by(tape)
    runs: list[list[Passing]] = [[]]
    why = ""
    for call in calls:
        try:
            passing = _passing(call, readers[id(call)], seen_by)
        except NotCut as error:  # it runs always, like what lies between blocks
            why = why or f"{error} ({call.path})"
            continue
        if runs[-1] and not _follows(passing, runs[-1]):
            runs.append([])
        runs[-1].append(passing)
    best = max(runs, key=lambda run: cost.of_all(operation for each in run for operation in each.call.operations))
    if not best:
        raise NotCut(why)
    return best


def _read_outside(tape: Tape, calls: Sequence[BlockCall]) -> dict[int, set[Value]]:
    """By call: the values of its operations that others read, or that are given back."""
    maker = {id(operation): call for call in calls for operation in call.operations}
    found: dict[int, set[Value]] = {id(call): set() for call in calls}
    for operation in tape.operations:
        here = maker.get(id(operation))
        for value in operation.inputs:
            _note(found, maker, value, here)
    for value in tape.outputs:
        _note(found, maker, value, None)
    return found


def _note(found: dict[int, set[Value]], maker: dict[int, BlockCall], value: Value, here: BlockCall | None) -> None:
    call = maker.get(id(value.origin)) if value.origin is not None else None
    if call is not None and call is not here:
        found[id(call)].add(value)


def _seen_by(tape: Tape) -> dict[Value, set[int]]:
    """By the value that owns some memory: who reads or writes it, but for views of it, whose readers count."""
    found: dict[Value, set[int]] = {}
    for operation in tape.operations:
        is_view = operation.writes is None and any(made is not None and made.base for made in operation.outputs)
        for value in operation.inputs if not is_view else ():
            found.setdefault(value.root, set()).add(id(operation))
    return found


def _passing(call: BlockCall, read: set[Value], seen_by: dict[Value, set[int]]) -> Passing:
    """Raises ``NotCut`` where somebody else reads what does not continue an argument."""
    given, own = set(call.given), {id(operation) for operation in call.operations}
    written = [operation.writes.root for operation in call.operations if operation.writes is not None]
    writes = any(root.leaf is not None or seen_by.get(root, set()) - own for root in written)
    continues: dict[Value, Value] = {}
    for value in read:
        if value not in call.out:
            raise NotCut("what a block computes is read past its result")
        found = {start for start in _starts(value, given, own) if _form(start) == _form(value)}
        if len(found) != 1:
            raise NotCut("the result of a block does not go on from one of its arguments")
        continues[value] = found.pop()
    if not continues:
        raise NotCut("nothing reads the result of a block")
    moves = any(value.stride != start.stride for value, start in continues.items())
    return Passing(call, continues, writes or moves)


def _form(value: Value) -> tuple:
    return value.shape, value.dtype, value.device


def _starts(value: Value, given: set[Value], own: set[int]) -> Iterator[Value]:
    """The arguments that ``value`` is a sum of, among other terms."""
    left, seen = [value], {value}
    while left:
        value = left.pop()
        if value in given:
            yield value
            continue
        operation = value.origin
        if operation is None or id(operation) not in own or operation.opaque:
            continue
        for term in _terms(operation, value):
            if term not in seen:
                seen.add(term)
                left.append(term)


def _terms(operation: Operation, result: Value) -> Sequence[Value]:
    name = operation.traits.name
    if name in SUMS:
        return [value for value in operation.inputs if value.numel == result.numel]
    if name == "copy":
        return operation.inputs[1:]
    first = operation.args[0] if operation.args else None
    if (name in ALONG or name in TURNS) and isinstance(first, Value):
        return [first]
    return []


def _follows(passing: Passing, run: list[Passing]) -> bool:
    """Whether each stream comes from the blocks before, by operations that move it or add to it."""
    made = {value for each in run for value in each.continues}
    return all(_comes_from(stream, made) for stream in passing.continues.values())


def _comes_from(stream: Value, made: set[Value]) -> bool:
    left, seen = [stream], {stream}
    while left:
        value = left.pop()
        if value in made:
            return True
        operation = value.origin
        if operation is None or operation.opaque:
            continue
        name = operation.traits.name
        if name in SUMS or name in ALONG or name in MOVES or name in INTO:
            fresh = [each for each in operation.inputs if each not in seen]
            seen.update(fresh)
            left += fresh
    return False
