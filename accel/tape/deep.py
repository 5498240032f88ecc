"""Finds the deep part of a network that is shaped like a U, where one value stands for all of its results.

A skip connection takes what the outer blocks made past the deep ones, to a join (``cat``) with what comes out of them.
On a tape that is a join of two values, one of which is made of nothing but what the other is made of, too, and of less.
Such joins lie within one another: the outermost has the least behind its skip connection. Shortly before each of them
there is a moment at which a single value of the deep part is still to be read. Whoever is given that value needs
nothing else of the deep part.
"""

from dataclasses import dataclass

from . import cost
from .values import Operation, Tape, Value

PICTURE = 1  # the bit of the call's first input; the others are of operations, in order


@dataclass(frozen=True)
class _Join:
    """A join that a skip connection leads to. skip, whole: what its parts are made of; deep: what only the latter is.

    What is made of the time step or the prompt alone is not deep, wherever it is first needed.
    """

    place: int
    skip: int
    whole: int
    deep: int

    def lies_in(self, outer: "_Join") -> bool:
        return not (outer.skip & ~self.skip or self.whole & ~outer.whole)


def find(tape: Tape) -> list[Value]:
    """The values that the tape may be cut at, the outermost first; none where it has no such shape."""
    work = _Work(tape)
    joins = _within_one_another([join for place in range(len(tape.operations)) for join in work.joins(place)], work)
    found = [work.last_of(join) for join in joins]
    return list(dict.fromkeys(value for value in found if value is not None))


def _within_one_another(joins: list[_Join], work: "_Work") -> list[_Join]:
    """Those of the joins that lie within one another and have the most work in them, the outermost first."""
    best: list[tuple[float, list[_Join]]] = []
    for join in joins:
        inner = max((each for each in best if each[1][0].lies_in(join)), key=lambda each: each[0], default=(0.0, []))
        best.append((inner[0] + work.cost_of(join.deep), [join, *inner[1]]))
    return max(best, key=lambda each: each[0], default=(0.0, []))[1]


class _Work:
    """What each value of a tape is made of, as bits: the operations that cost something, and the picture."""

    def __init__(self, tape: Tape) -> None:
        self._operations = tape.operations
        self._costs = [0.0]  # by bit
        self._of_picture = 0  # bits of the operations that depend on it
        self._made_of: dict[Value, int] = dict.fromkeys(tape.inputs[:1], PICTURE)
        self._made: dict[Value, int] = {}
        self._read = dict.fromkeys(tape.outputs, len(tape.operations))
        for place, operation in enumerate(tape.operations):
            self._note(place, operation)

    def _note(self, place: int, operation: Operation) -> None:
        bits = 0
        for value in operation.inputs:
            bits |= self._made_of.get(value, 0)
            if self._read.get(value, 0) <= place:
                self._read[value] = place
        if work := cost.multiplications(operation):
            bit = 1 << len(self._costs)
            self._costs.append(work)
            self._of_picture |= bit if bits & PICTURE else 0
            bits |= bit
        for value in operation.outputs:
            if value is not None:
                self._made_of[value], self._made[value] = bits, place
        if operation.writes is not None:
            root = operation.writes.root
            self._made_of[root] = self._made_of.get(root, 0) | bits

    def cost_of(self, bits: int) -> float:
        """Of the operations with these bits."""
        return sum(work for bit, work in enumerate(self._costs) if bits >> bit & 1)

    def joins(self, place: int) -> list[_Join]:
        """The operation as a join with a skip connection, if it is one.

        Another pack's function may be: it gets both, and nobody knows what it makes of them.
        """
        operation = self._operations[place]
        if not operation.opaque and operation.traits.name != "cat":
            return []
        parts = {bits for value in operation.inputs if (bits := self._made_of.get(value, 0)) & PICTURE}
        *_, skip, whole = 0, 0, *sorted(parts, key=int.bit_count)
        deep = whole & ~skip & self._of_picture
        return [_Join(place, skip, whole, deep)] if skip and deep and not skip & ~whole else []

    def last_of(self, join: _Join) -> Value | None:
        """The value that is all that is read of the join's deep part at some moment; None if there are always more.

        Of several such moments it is the first one after all deep work, but for a convolution that follows a resizing.
        """
        alive = {
            value
            for value, last in self._read.items()
            if last >= join.place > self._made.get(value, last) and self._made_of[value] & join.deep
        }
        found, convolved = None, False
        for operation in reversed(self._operations[: join.place]):
            if len(alive) == 1:
                (value,) = alive
                gains = found is None or value.numel < found.numel or (value.numel == found.numel and not convolved)
                found = value if gains and value.base is None else found
            made = alive.intersection(operation.outputs)
            if found is not None and made:
                name = "" if operation.opaque else operation.traits.name
                works = operation.opaque or cost.multiplications(operation) > 0
                if name == "cat" or (works and (convolved or name not in cost.CONVOLUTIONS or len(alive) > 1)):
                    break
                convolved = convolved or works
            if made:
                alive -= made
                alive.update(value for value in operation.inputs if self._made_of.get(value, 0) & join.deep)
        return found
