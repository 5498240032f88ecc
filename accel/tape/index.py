"""Index expressions: where an element of one value is in another.

An expression is a sum of terms ``coefficient * digit``. A digit is ``axis // div % mod`` with sizes of the model, so a
row of H * D channels has the digits h = c // D and d = c % D, and h * D + d is c again. What cannot be said with digits
(a split by a size of the call) is a quotient or a remainder of a whole expression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .values import Size


@dataclass(frozen=True)
class Number:
    """``factor`` times sizes of the call. Its value is known now, its name in a kernel is not."""

    factor: int
    sizes: tuple[Size, ...] = ()  # sorted by id

    @property
    def value(self) -> int:
        """The number at this size of the call."""
        return self.factor * math.prod(size.value for size in self.sizes)

    @property
    def static(self) -> bool:
        """Whether it is the same at every size of the call."""
        return not self.sizes

    def __mul__(self, other: Number) -> Number:
        if not (self.factor and other.factor):
            return ZERO
        return Number(self.factor * other.factor, tuple(sorted(self.sizes + other.sizes, key=id)))

    def over(self, other: Number) -> Number | None:
        """The quotient, where it can be told without looking at values."""
        if self.factor % other.factor:
            return None
        rest = list(self.sizes)
        for size in other.sizes:
            if size not in rest:
                return None
            rest.remove(size)
        return Number(self.factor // other.factor, tuple(rest))


ZERO, UNIT = Number(0), Number(1)


def number(size: Size) -> Number:
    """A size as a number; only that of a call has a name."""
    return Number(size.value) if size.static else Number(1, (size,))


def product(sizes: tuple[Size, ...]) -> Number:
    """The product of sizes."""
    result = UNIT
    for size in sizes:
        result *= number(size)
    return result


@dataclass(frozen=True, eq=False)
class Axis:
    """A loop variable of a kernel. kind: column | row | scalar (one value a program)."""

    name: str
    size: Size
    kind: str


@dataclass(frozen=True)
class Digit:
    """``axis // div % mod``; mod 0: without a remainder."""

    axis: Axis
    div: int
    mod: int

    @property
    def extent(self) -> Number:
        """It is less than this."""
        return Number(self.mod) if self.mod else Number(1, (self.axis.size,))


@dataclass(frozen=True)
class Quotient:
    """``of // by``, or ``of % by``."""

    of: Index
    by: Number
    remainder: bool

    @property
    def extent(self) -> Number | None:
        """It is less than this, if that is known."""
        return self.by if self.remainder else None


Atom = Digit | Quotient
Term = tuple[Number, Atom]


@dataclass(frozen=True)
class Index:
    """The sum of ``terms`` and of ``offsets``."""

    terms: tuple[Term, ...] = ()
    offsets: tuple[Number, ...] = ()

    def __add__(self, other: Index) -> Index:
        return _whole(Index(_merged(self.terms + other.terms), _summed(self.offsets + other.offsets)))

    def times(self, factor: Number) -> Index:
        """This, ``factor`` times."""
        if factor == ZERO:
            return NOTHING
        return Index(
            tuple((coefficient * factor, atom) for coefficient, atom in self.terms),
            tuple(offset * factor for offset in self.offsets),
        )

    def divided(self, by: Number) -> tuple[Index, Index]:
        """(quotient, remainder)."""
        if by == UNIT:
            return self, NOTHING
        high: list[Term] = []
        low: list[Term] = []
        for coefficient, atom in self.terms:
            whole = coefficient.over(by)
            if whole is not None:
                high.append((whole, atom))
                continue
            parts = _split(coefficient, atom, by)
            high += parts[0]
            low += parts[1]
        offsets = [(offset, offset.over(by)) for offset in self.offsets]
        rest = Index(_merged(tuple(low)), tuple(o for o, whole in offsets if whole is None))
        quotient = Index(_merged(tuple(high)), tuple(whole for _, whole in offsets if whole is not None))
        if any(offset.factor < 0 for offset in rest.offsets):  # it may be negative, where the whole is not
            return Index(((UNIT, Quotient(self, by, False)),)), Index(((UNIT, Quotient(self, by, True)),))
        if not rest.terms and not rest.offsets or rest.less_than(by):
            return quotient, rest
        return (
            quotient + Index(((UNIT, Quotient(rest, by, False)),)),
            Index(((UNIT, Quotient(rest, by, True)),)),
        )

    def less_than(self, bound: Number) -> bool:
        """Whether this is certainly less than ``bound``, judged in a way that holds for every size of the call."""
        if len(self.terms) == 1 and not self.offsets:
            coefficient, atom = self.terms[0]
            if coefficient == UNIT and atom.extent == bound:  # the same sizes, not sizes that are equal now
                return True
        span = self.span
        return span is not None and bound.static and span.stop <= bound.value

    @property
    def span(self) -> range | None:
        """Where it may lie, at every size of the call; None if that depends on the size."""
        largest = 0
        for coefficient, atom in self.terms:
            extent = atom.extent
            if extent is None or not (extent.static and coefficient.static):
                return None
            largest += coefficient.value * (extent.value - 1)
        if not all(offset.static for offset in self.offsets):
            return None
        start = sum(offset.value for offset in self.offsets)
        return range(start, start + largest + 1)

    def axes(self) -> set[Axis]:
        """The loop variables in it."""
        found: set[Axis] = set()
        for _, atom in self.terms:
            found |= {atom.axis} if isinstance(atom, Digit) else atom.of.axes()
        return found


NOTHING = Index()


def along(axis: Axis) -> Index:
    """The loop variable itself."""
    return Index(((UNIT, Digit(axis, 1, axis.size.value if axis.size.static else 0)),))


def at(*offsets: Number) -> Index:
    """A fixed place."""
    return Index((), _summed(offsets))


def _split(coefficient: Number, atom: Atom, by: Number) -> tuple[list[Term], list[Term]]:
    """A digit that reaches beyond ``by``, as a digit of whole ``by`` and one of less."""
    if isinstance(atom, Digit) and coefficient.static and by.static and by.value % coefficient.value == 0:
        step = by.value // coefficient.value
        if step > 1 and atom.mod > step and atom.mod % step == 0:
            high = Digit(atom.axis, atom.div * step, atom.mod // step)
            return [(UNIT, high)], [(coefficient, Digit(atom.axis, atom.div, step))]
    return [], [(coefficient, atom)]


def _merged(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Digits that continue each other become one."""
    left = list(terms)
    found = True
    while found:
        found = False
        for i, (high, a) in enumerate(left):
            for j, (low, b) in enumerate(left):
                if i != j and _continues(high, a, low, b):
                    left = [term for k, term in enumerate(left) if k not in (i, j)]
                    left.append((low, Digit(a.axis, b.div, b.mod * a.mod)))
                    found = True
                    break
            if found:
                break
    return tuple(left)


def _whole(index: Index) -> Index:
    """A quotient and its remainder that lie as far apart as before the division become what was divided."""
    divided = [(k, atom) for k, (_, atom) in enumerate(index.terms) if isinstance(atom, Quotient)]
    for i, a in divided:
        for j, b in divided:
            (high, _), (low, _) = index.terms[i], index.terms[j]
            if b.remainder and not a.remainder and (a.of, a.by) == (b.of, b.by) and high == low * a.by:
                rest = tuple(term for k, term in enumerate(index.terms) if k not in (i, j))
                return Index(rest, index.offsets) + a.of.times(low)
    return index


def _continues(high: Number, a: Atom, low: Number, b: Atom) -> bool:
    if not (isinstance(a, Digit) and isinstance(b, Digit)) or a.axis is not b.axis or not b.mod:
        return False
    return a.div == b.div * b.mod and a.mod > 0 and high == low * Number(b.mod)


def _summed(offsets: tuple[Number, ...]) -> tuple[Number, ...]:
    fixed = sum(offset.factor for offset in offsets if offset.static)
    loose = tuple(offset for offset in offsets if not offset.static)
    return loose + ((Number(fixed),) if fixed else ())
