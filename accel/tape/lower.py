"""Turns values into the lines of one kernel: a value at an index, computed through the operations of a group.

Everything is pulled: a result asks for its arguments at the index it needs, views turn that index around, and what the
group does not compute is loaded. Each result is rounded where eager rounds it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from . import pointwise, quantisers, rows, views
from .index import NOTHING, UNIT, Axis, Digit, Index, Number, at, number, product
from .kernel_lines import KernelLines
from .layout import Layouts
from .terms import EVERYWHERE, FLOATS, Indices, Mask, NoKernel, Term, where
from .traits import NORMS
from .values import ONE, Operation, Size, Value

COPIES = frozenset("clone contiguous to _to_copy float type_as copy".split())
LITERALS = frozenset(
    (0.0, 1.0, -1.0, 2.0, 0.5)
)  # other numbers are arguments, so that they make no kernel of their own


class Lowering(KernelLines):
    """The lines of one kernel, and what it reads."""

    def __init__(
        self, layouts: Layouts, inside: Mapping[Value, Operation], column: Axis, tile: Axis | None = None
    ) -> None:
        super().__init__(column, tile)
        self.operands: list[Value] = []
        self.floats: list[float] = []
        self.loads: list[tuple[Index, int]] = []  # for the schedule: what is read, and how
        self.pairs = False  # whether neighbours are read together, so that ``cc`` counts them
        self._layouts, self._inside = layouts, inside

    # Values -------------------------------------------------------------------------------------------------------

    def value(self, value: Value, index: Indices, mask: Mask = EVERYWHERE) -> Term:
        """``value`` at ``index``, in float32."""
        key = value, index, mask
        term = self.memo.get(key)
        if term is None:
            pair = rows.pair(self, value, index, mask)
            term = self.memo[key] = pair or self._computed(value, index, mask)
        return term

    def _computed(self, value: Value, index: Indices, mask: Mask) -> Term:
        operation = self._inside.get(value)
        if operation is None:
            return self._load(value, index, mask)
        name = operation.traits.name
        if operation.kind == "view" or name in views.RESHAPES:
            return self.value(operation.inputs[0], self.turned(operation, name, value, index), mask)
        if name in COPIES:
            source = operation.inputs[1 if name == "copy" else 0]
            return self.rounded(self.argument(source, value, index, mask), value.dtype, source.dtype)
        if name in ("cat", "stack"):
            return rows.joined(self, operation, name, value, index, mask)
        if quantisers.is_quantiser(operation):
            return quantisers.lowered(self, operation, value, index, mask)
        if name in NORMS:
            term = rows.norm(self, operation, name, index, mask)
        elif name == "mean":
            term = rows.mean(self, operation, index, mask)
        elif name == rows.LENGTH:
            term = rows.length(self, operation, index, mask)
        else:
            term = self._pointwise(operation, name, index, mask)
        return self.rounded(term, value.dtype)

    def argument(self, item: Any, output: Value, index: Indices, mask: Mask) -> Term:
        """A number, or a value that is broadcast, for the element of ``output`` at ``index``."""
        if isinstance(item, Value):
            if (scalar := item.scalar()) is not None:
                return self._number(scalar)
            return self.value(item, self._spread(item, output, index), mask)
        if isinstance(item, (int, float)):
            return self._number(float(item))
        raise NoKernel(f"an argument of type {type(item).__name__}")

    def _spread(self, item: Value, output: Value, index: Indices) -> Indices:
        """The index of an argument that is broadcast.

        A constant of one row may have one row for each image at the next size. It is read with a step that is an
        argument, 0 where there is one row, so that both are one kernel.
        """
        offset = len(index) - len(item.shape)
        spread = []
        for d, size in enumerate(item.sizes):
            target = output.sizes[d + offset]
            single = size.value == 1 and (target.static or (target.value != 1 and not item.is_constant))
            spread.append(NOTHING if size is ONE or single else index[d + offset])
        return tuple(spread)

    def _number(self, value: float) -> Term:
        if value in LITERALS:
            return Term(repr(value), frozenset())
        if value != value or value in (float("inf"), float("-inf")):
            return Term(f'float("{value}")', frozenset())
        self.floats.append(value)
        return Term(f"f{len(self.floats) - 1}", frozenset())

    def _pointwise(self, operation: Operation, name: str, index: Indices, mask: Mask) -> Term:
        output, args = operation.outputs[0], operation.args
        overload = operation.func._overloadname
        form = pointwise.simple(name, overload, args, operation.kwargs)
        if form is None:
            raise NoKernel(f"{name} has no form in a kernel")
        if form == "clamp":
            return self._clamp(operation, name, index, mask)
        count = 1 if name == "pow" else len(args)
        terms = [self.argument(item, output, index, mask) for item in args[: min(count, 3)]]
        if name in pointwise.ADDING:
            terms = terms[:2]
            alpha = operation.kwargs.get("alpha", args[2] if len(args) > 2 else 1)
            if alpha != 1:
                scale = self._number(float(alpha))
                terms[1] = Term(f"({terms[1].name} * {scale.name})", terms[1].axes)
        if operation.kwargs.get("value", 1) != 1:
            raise NoKernel("addcmul with a value")
        axes = frozenset().union(*(term.axes for term in terms))
        return self.let(form.format(*(term.name for term in terms)), axes)

    def _clamp(self, operation: Operation, name: str, index: Indices, mask: Mask) -> Term:
        args = operation.args
        term = self.argument(args[0], operation.outputs[0], index, mask)
        low = args[1] if name != "clamp_max" and len(args) > 1 else None
        high = args[1] if name == "clamp_max" else args[2] if len(args) > 2 else None
        for limit, function in ((low, "maximum"), (high, "minimum")):
            if limit is not None:
                bound = self.argument(limit, operation.outputs[0], index, mask)
                term = self.let(f"tl.{function}({term.name}, {bound.name})", term.axes | bound.axes)
        return term

    # Views --------------------------------------------------------------------------------------------------------

    def turned(self, operation: Operation, name: str, value: Value, index: Indices) -> Indices:
        """The index into a view's source."""
        source, args = operation.inputs[0], operation.args
        rank, places = len(source.shape), list(index)
        if name in views.RESHAPES:
            return self._reshaped(operation, index)
        if (order := views.permutation(operation, rank)) is not None:
            turned = [NOTHING] * rank
            for place, d in zip(places, order, strict=True):
                turned[d] = place
            return tuple(turned)
        if name == "unsqueeze":
            del places[args[1] % (rank + 1)]
        elif name == "squeeze":
            dims = range(rank) if len(args) < 2 else args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            for d in sorted({d % rank for d in dims}):
                if source.shape[d] == 1:
                    places.insert(d, NOTHING)
        elif name in ("select", "unbind"):
            d = views.dimension(operation, 1, rank)
            start, size = views.start(operation, value), source.sizes[d]
            places.insert(d, self._start(operation, size, start) if start or size.static else self._first(operation))
        elif name in ("slice", "narrow"):
            d = views.dimension(operation, 1, rank)
            if name == "slice" and len(args) > 4 and args[4] != 1:
                raise NoKernel("a slice with a step")
            places[d] += self._start(operation, source.sizes[d], views.start(operation, value))
        elif name in ("chunk", "split", "split_with_sizes"):
            d = views.dimension(operation, 2, rank)
            before = operation.outputs[: views.pieces(operation, value)]
            places[d] += at(*(number(piece.sizes[d]) for piece in before))
        elif name in ("expand", "expand_as"):
            new = len(places) - rank
            places = [
                NOTHING if size is ONE or source.shape[d] != value.shape[d + new] else places[d + new]
                for d, size in enumerate(source.sizes)
            ]
        elif name not in views.SAME:
            raise NoKernel(f"a view by {name}")
        return tuple(places)

    def _first(self, operation: Operation) -> Index:
        """The first of several pictures, read like the others."""
        return at(Number(1, (self._layouts.start(operation, 0),)))

    def _start(self, operation: Operation, size: Size, start: int) -> Index:
        """A place along a dimension; one that may depend on the call is an argument."""
        if views.is_table_part(operation):
            return at(Number(1, (self._layouts.start(operation, start),)))
        if start == 0:
            return NOTHING
        return at(Number(start) if size.static else Number(1, (self._layouts.start(operation, start),)))

    def _reshaped(self, operation: Operation, index: Indices) -> Indices:
        found: list[Index] = []
        source, value = operation.inputs[0], operation.outputs[0]
        for group in views.aligned(operation):
            outs, sources = range(group.out0, group.out1), range(group.src0, group.src1)
            if len(outs) == len(sources) == 1:
                found.append(index[group.out0])
                continue
            flat = NOTHING
            for d in outs:
                below = product(value.sizes[d + 1 : group.out1])
                flat += NOTHING if value.sizes[d] is ONE else index[d].times(below)
            for d in sources:
                if source.sizes[d] is ONE:
                    found.append(NOTHING)
                    continue
                place, flat = flat.divided(product(source.sizes[d + 1 : group.src1]))
                found.append(place)
        return tuple(found)

    # Memory -------------------------------------------------------------------------------------------------------

    def operand(self, value: Value) -> int:
        """The place of ``value`` among the kernel's pointers."""
        if value not in self.operands:
            self.operands.append(value)
        return self.operands.index(value)

    def offset(self, value: Value, index: Indices) -> Index:
        """How far from the start of ``value`` the element at ``index`` lies."""
        result = NOTHING
        for place, step, size in zip(index, self._layouts.of(value), value.sizes, strict=True):
            if size is not ONE:
                result += place.times(step)
        return result

    def _load(self, value: Value, index: Indices, mask: Mask) -> Term:
        if value.dtype not in FLOATS:
            raise NoKernel(f"{value.dtype} in a kernel")
        memory, start = self._layouts.memory(value)
        place, number_ = self.offset(value, index) + at(Number(start)), self.operand(memory)
        key = "load", number_, place, mask
        if key in self.memo:
            return self.memo[key]
        self.loads.append((place, number_))
        convert = "" if value.dtype == torch.float32 else ".to(tl.float32)"
        if pair := self._neighbours(place, mask):
            terms = self._load_pair(number_, *pair, mask, convert)
            for odd, term in enumerate(terms):
                self.memo["load", number_, pair[0] + at(Number(odd)), mask] = term
            return self.memo[key]
        axes = self.axes(place)
        wanted = axes | mask.axes
        text = self.text(place, f"p{number_}")
        for axis in sorted(wanted - axes):
            text += f" + {axis} * 0"
        self.memo[key] = term = self.let(f"tl.load(p{number_} + ({text}){where(wanted, mask)}){convert}", wanted)
        return term

    def _neighbours(self, place: Index, mask: Mask) -> tuple[Index, Digit] | None:
        """(where the first of two neighbours lies, the digit of the columns), if ``place`` is one of them.

        Each column of a rotary table has two numbers side by side. Heads may lie apart in it.
        """
        if "c" in mask.axes or not self.column.size.static:
            return None
        along = [
            (coefficient, atom) for coefficient, atom in place.terms if self.column in Index(((UNIT, atom),)).axes()
        ]
        if not all(isinstance(atom, Digit) for _, atom in along):
            return None
        near = [digit for coefficient, digit in along if coefficient == Number(2) and digit.div == 1]
        others = (coefficient for coefficient, atom in place.terms if atom not in near)
        if len(near) != 1 or any(coefficient.static and coefficient.factor % 2 for coefficient in others):
            return None  # pairs may overlap, and the last one's second number lie beside the memory
        odd = sum(offset.factor for offset in place.offsets if offset.static) % 2
        return place + at(Number(-odd)), near[0]

    def _load_pair(self, operand: int, place: Index, digit: Digit, mask: Mask, convert: str) -> list[Term]:
        """Both neighbours, from one read of whole vectors."""
        axes = self.axes(place) | mask.axes
        both = Axis("cc", Size(2 * self.column.size.value, static=True), "column")
        others = [
            (coefficient, Digit(both, 2 * atom.div, atom.mod) if self._is_of_columns(atom) else atom)
            for coefficient, atom in place.terms
            if atom is not digit
        ]
        rest = Index(tuple(others), place.offsets)
        wide = "cc" if digit.mod >= self.column.size.value else f"(cc % {2 * digit.mod})"
        self.pairs = True
        text = f"{self.text(rest, f'p{operand}')} + {wide}" + (" + r * 0" if "r" in axes else "")
        condition = where(axes, mask).replace("cmask", "ccmask")
        read = self.let(f"tl.load(p{operand} + ({text}){condition}){convert}", axes)
        height = "R" if "r" in axes else "1"
        return self.apart(f"tl.reshape({read.name}, [{height}, BC, 2])", axes)

    def _is_of_columns(self, atom: Any) -> bool:
        return isinstance(atom, Digit) and atom.axis is self.column
