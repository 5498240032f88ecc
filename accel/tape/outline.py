"""A plan without its numbers: everything that one size's plan says about other sizes of the same model.

Values are slots, counted in the order in which the tape comes upon them. Lengths are classes: those that are equal at
every size of the call. What a kernel is given (its strides, its starts, its rows) is said with these, so that another
size only has to look its own numbers up (``reuse``). Holds no value, no tensor and no weight.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import views
from .codegen import Source
from .index import Number
from .kernels import Launch
from .plan import Plan, Report
from .structure import SHAPES_IN_RESULT
from .trust import Trust
from .values import Constant, Operation, Size, Tape, Value

NONE, ANY = -1, -2  # slots: no value; whichever
FREE, ATOMS, CUT, SPLIT = range(4)  # what an operation's arguments must have in common with the planned one's
CUTS = frozenset(("slice", "narrow", "select", "unbind"))
SPLITS = frozenset("chunk split split_with_sizes".split())

Ref = (
    tuple  # a number: ("length", class) | ("stride", slot, dimension, divisor) | ("start", line, result) | ("fixed", n)
)
Product = tuple[int, tuple[int, ...]]  # a factor, and the places of its numbers among ``refs``


class NoOutline(Exception):
    """A plan that says nothing about other sizes."""


class Form(NamedTuple):
    """What a value of any size has: lengths are classes, or ``~length`` where the model says it."""

    lengths: tuple[int, ...] | None  # None: nobody asks
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...] | None
    leaf: type
    scalar: float | None
    large: bool  # see ``Value.is_large``


class Line(NamedTuple):
    """One operation. func: see ``likeness``. check: which of its arguments are ``fixed``."""

    func: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    check: int
    fixed: tuple


@dataclass(frozen=True)
class Single:
    """What ``singles`` did to an operation, and the views that moved with it."""

    line: int
    func: Any
    copied: bool  # or left out
    views: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """One source, with places among ``refs`` for its sizes."""

    source: Source
    rows: tuple[int, ...]
    column: int
    integers: tuple[tuple[int, ...], ...]


@dataclass
class Outline:
    """See the module. steps: ("call", line, kind) | ("kernel", number, slots read, slots written) | ("join", slot) |
    ("part", slot of the join, dimension, slot)."""

    inputs: list[int]
    outputs: list[int]
    report: Report
    forms: list[Form] = field(default_factory=list)
    singular: list[int] = field(default_factory=list)  # of each class: its length if that is 0 or 1, else 2
    slots: list[int] = field(default_factory=list)  # the form of each
    bases: list[int] = field(default_factory=list)  # the slot of each one's root, NONE or ANY
    lines: list[Line] = field(default_factory=list)
    singles: list[Single] = field(default_factory=list)
    turns: set[tuple[int, int, tuple]] = field(default_factory=set)  # forms of a reshape, and what of them is equal
    moved: list[int] = field(default_factory=list)  # slots that kernels store in the order of their dimensions
    refs: list[Ref] = field(default_factory=list)
    layouts: list[tuple[Product, ...]] = field(default_factory=list)
    strides: list[tuple[int, int]] = field(default_factory=list)  # (a slot, its layout) of what kernels read and write
    offsets: list[tuple[int, int, int]] = field(default_factory=list)  # (constant, its memory, where it begins there)
    cuts: list[tuple[int, int, int]] = field(default_factory=list)  # (line, result, where it begins, in the source)
    alike: list[tuple[Ref, Ref]] = field(default_factory=list)  # starts that one argument of a kernel stands for
    chance: set[tuple[int, int]] = field(default_factory=set)  # classes of the planned size's equal lengths, likewise
    kernels: list[Kernel] = field(default_factory=list)
    steps: list[tuple] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    trust: Trust = field(default_factory=Trust)


def likeness(func: Any) -> Any:
    """What of an operation's function must be the same for the same plan; one made for one call says so itself."""
    return getattr(func, "likeness", func)


def atoms(structure: Any) -> tuple:
    """All that is no value in nested arguments."""
    found: list[Any] = []
    for item in structure:
        kind = type(item)
        if kind is Value:
            found.append(Value)
        elif kind is list or kind is tuple:
            found.append(atoms(item))
        else:
            found.append(item)
    return tuple(found)


def fixed(operation: Operation, check: int) -> tuple:
    """The arguments that count for ``check``."""
    if check == FREE:
        return ()
    if check == ATOMS:
        named = operation.kwargs
        return atoms(operation.args) + (atoms(named.values()), tuple(named)) if named else atoms(operation.args)
    if check == SPLIT:
        return (views.dimension(operation, 2, len(operation.inputs[0].shape)),)
    return views.dimension(operation, 1, len(operation.inputs[0].shape)), operation.args[4:]


def outline(tape: Tape, plan: Plan) -> Outline:
    """Returns what ``plan``, just made from ``tape``, says about other sizes. Raises ``NoOutline``."""
    return _Maker(tape, plan).made


class _Maker:
    def __init__(self, tape: Tape, plan: Plan) -> None:
        self._plan, self._layouts = plan, plan.layouts
        self._places: dict[Value, int] = {}
        self._forms: dict[Form, int] = {}
        self._classes: dict[Size, int] = {}
        self._lengths: dict[int, tuple[int, ...]] = {}  # by the sizes' id
        self._refs: dict[Ref, int] = {}
        self._known: dict[tuple, int] = {}  # places of layouts
        self._sources: dict[int, int] = {}  # places of kernels
        self._written: list[list[int]] = []  # how the results of each kernel lie
        self._loose = {value for single in plan.singles for value in single.moved}
        self._starts = {size: key for key, size in self._layouts.starts.items()}
        self._lines = {id(operation): place for place, operation in enumerate(tape.operations)}
        report = dataclasses.replace(plan.report, compiled=0, compile_seconds=0.0)
        self.made = Outline([], [], report)
        self.made.inputs = list(map(self._slot, tape.inputs))
        self._operations(tape)
        self.made.outputs = list(map(self._slot, tape.outputs))
        self._groups()
        for step in plan.steps:
            self._step(step)
        self.made.moved = [self._places[value] for value in self._layouts.moved if value.base is None]
        self.made.parts = [(self._places[place], self._places[part]) for place, part in plan.parts.items()]

    # Values and operations ------------------------------------------------------------------------------------------

    def _slot(self, value: Value) -> int:
        slot = self._places.get(value)
        if slot is None:
            made = self.made
            slot = self._places[value] = len(made.slots)
            made.slots.append(self._form(value))
            made.bases.append(NONE)
            if value in self._loose:
                made.bases[slot] = ANY
            elif value.base is not None:
                made.bases[slot] = self._slot(value.base)
        return slot

    def _form(self, value: Value) -> int:
        scalar = value.scalar() if not value.shape else None
        lengths = None
        if len(value.sizes) == len(value.shape):
            lengths = self._lengths.get(id(value.sizes))
            if lengths is None:
                lengths = self._lengths[id(value.sizes)] = tuple(map(self._length, value.sizes))
        rest = value.dtype, value.device, value.order, type(value.leaf), scalar, value.is_large
        form = Form(lengths, *rest)
        place = self._forms.setdefault(form, len(self._forms))
        if place == len(self.made.forms):
            self.made.forms.append(form)
        return place

    def _length(self, size: Size) -> int:
        if size.static:
            return ~size.value
        place = self._classes.setdefault(size.first, len(self._classes))
        if place == len(self.made.singular):
            self.made.singular.append(min(size.value, 2))
        return place

    def _operations(self, tape: Tape) -> None:
        inside = {id(operation) for group in self._plan.groups for operation in group.members}
        for operation in tape.operations:
            inputs = tuple(map(self._slot, operation.inputs))
            outputs = tuple([NONE if value is None else self._slot(value) for value in operation.outputs])
            check = self._check(operation, inputs, outputs) if id(operation) in inside else FREE
            line = Line(likeness(operation.func), inputs, outputs, check, fixed(operation, check))
            self.made.lines.append(line)
        for single in self._plan.singles:
            place = self._lines[id(single.operation)]
            moved = tuple(self._lines[id(view)] for view in single.views)
            self.made.singles.append(Single(place, single.func, single.copied, moved))
            self.made.lines[place] = self.made.lines[place]._replace(func=single.func, check=FREE)

    def _check(self, operation: Operation, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
        """Which arguments of an operation inside of a kernel belong to the kernel."""
        name = operation.traits.name
        if name in views.RESHAPES:
            runs = tuple(views.aligned(operation))
            self.made.turns.add((self.made.slots[outputs[0]], self.made.slots[inputs[0]], runs))
            return FREE
        if name in SHAPES_IN_RESULT:
            return FREE
        return CUT if name in CUTS else SPLIT if name in SPLITS else ATOMS

    # Kernels --------------------------------------------------------------------------------------------------------

    def _groups(self) -> None:
        """What the kernels read lies as it did for the first group of its form."""
        read_by: dict[int, list[tuple[int, int]]] = {}  # by the first group: which of the values, and how they lie
        for group in self._plan.groups:
            first = group.first
            reads = read_by.get(id(first))
            if reads is None:
                own = {value for operation in first.members for value in operation.outputs}
                read = {value for operation in first.members for value in operation.inputs} - own
                reads = read_by[id(first)] = [
                    (place, self._layout(value)) for place, value in enumerate(first.form.values) if value in read
                ]
            values = group.form.values
            self.made.strides += [(self._slot(values[place]), layout) for place, layout in reads]
            for value in values:
                if value.base is not None:
                    memory, start = self._layouts.memory(value)
                    if memory is not value:
                        self._begins(value, memory, start)
            for operation, planned in zip(group.members, first.members, strict=True):
                self._cut(operation, planned)
            for value, planned in zip(values, first.form.values, strict=True):
                self._equal(value, planned)

    def _equal(self, value: Value, planned: Value) -> None:
        """One kernel computes both, though their lengths may differ at another size: text and picture, say."""
        if value.sizes is planned.sizes:
            return
        for size, other in zip(value.sizes, planned.sizes, strict=True):
            if not size.static and size.first is not other.first:
                self.made.chance.add((self._length(size), self._length(other)))

    def _layout(self, value: Value) -> int:
        layout = tuple(map(self._product, self._layouts.of(value)))
        place = self._known.setdefault(layout, len(self._known))
        if place == len(self.made.layouts):
            self.made.layouts.append(layout)
        return place

    def _begins(self, value: Value, memory: Value, start: int) -> None:
        if type(value.leaf) is Constant:
            self.made.offsets.append((self._slot(value), self._slot(memory), start))
        elif (place := self._lines.get(id(value.origin))) is not None:  # by ``select``, a place of the model's
            line = self.made.lines[place]
            self.made.lines[place] = line._replace(check=ATOMS, fixed=fixed(value.origin, ATOMS))
        else:
            raise NoOutline("memory of nobody's")

    def _cut(self, operation: Operation, planned: Operation) -> None:
        """Where a cut begins is an argument of the kernel, or a number in its source."""
        place = self._lines[id(operation)]
        if self.made.lines[place].check != CUT:
            return
        for result, value in enumerate(operation.outputs):
            if value is None:
                continue
            start = views.start(operation, value)
            if (planned, start) not in self._layouts.starts:
                self.made.cuts.append((place, result, start))
            elif operation is not planned:
                self.made.alike.append((("start", place, result), ("start", self._lines[id(planned)], result)))

    def _product(self, number: Number) -> Product:
        return number.factor, tuple(sorted(map(self._ref, number.sizes)))

    def _ref(self, size: Size) -> int:
        ref: Ref
        if size in self._layouts.strides:
            value, d, divisor = self._layouts.strides[size]
            ref = "stride", self._slot(value), d, divisor
        elif size in self._starts:
            operation, start = self._starts[size]
            result = next(
                i for i, each in enumerate(operation.outputs) if each and views.start(operation, each) == start
            )
            ref = "start", self._lines[id(operation)], result
        elif size.static:
            ref = "fixed", size.value
        elif size.first in self._classes:
            ref = "length", self._classes[size.first]
        else:
            raise NoOutline("a length that no value has")
        place = self._refs.setdefault(ref, len(self._refs))
        if place == len(self.made.refs):
            self.made.refs.append(ref)
        return place

    # Steps ----------------------------------------------------------------------------------------------------------

    def _step(self, step: Operation | Launch) -> None:
        if isinstance(step, Launch):
            read, written = (tuple(map(self._slot, values)) for values in (step.operands, step.outputs))
            self.made.steps.append(("kernel", self._kernel(step.source), read, written))
            layouts = self._written[self.made.steps[-1][1]]
            self.made.strides += list(zip(written, layouts, strict=True))
            return
        line = self._lines.get(id(step))
        made = step.outputs[0]
        if line is not None:
            self.made.steps.append(("call", line, step.kind))
        elif not step.inputs:
            self.made.steps.append(("join", self._places[made]))
        elif made not in self._places:
            self.made.steps.append(("part", self._places[step.inputs[0]], step.args[1], self._slot(made)))
        else:  # the copy of an operation
            self.made.steps.append(("call", self._lines[id(made.origin)], step.kind))

    def _kernel(self, source: Source) -> int:
        place = self._sources.get(id(source))
        if place is None:
            place = self._sources[id(source)] = len(self._sources)
            rows = tuple(map(self._ref, source.row_sizes))
            integers = tuple(tuple(map(self._ref, sizes)) for sizes in source.integers)
            bare = dataclasses.replace(source, operands=(), outputs=(), row_sizes=(), integers=())
            self.made.kernels.append(Kernel(bare, rows, self._ref(source.column_size), integers))
            self._written.append([self._layout(value) for value in source.outputs])
        return place
