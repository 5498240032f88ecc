"""Reuses plans of one model: other sizes differ from an earlier one only in their numbers.

A later size is not planned again. Its tape is held against an ``Outline`` of an earlier one: the same operations on the
same values, lengths that were equal are equal again, and what kernels read lies as they expect. Each of these is
looked at, so a size that differs in any way is planned by itself, and its outline is kept beside the others.
"""

import copy
import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress

from . import singles, views
from .joins import join, part
from .kernels import Launch
from .layout import contiguous
from .outline import NONE, NoOutline, Outline, fixed, likeness, outline
from .plan import Plan, Schedule
from .trust import Elements
from .values import Constant, Operation, Size, Tape, Value

MAX_OUTLINES = 8  # per model: kinds of sizes (one picture, several; one frame, several) and of inputs


class Misfit(Exception):
    """Raised where an outline does not fit this tape."""


class Outlines:
    """The outlines of one model, the one that served last in front. misfits: why those that did not serve did not."""

    def __init__(self) -> None:
        self.reused = 0  # plans that were not made
        self.misfits: Counter[str] = Counter()
        self._known: list[Outline] = []
        self._lock = threading.Lock()  # several threads may sample one model

    def plan(self, tape: Tape) -> Schedule:
        """The plan of a tape with kernels, made or reused."""
        for known in self._known[:]:
            try:
                found = _Fitting(known, tape).reused()
            except Misfit as reason:
                self.misfits[str(reason)] += 1
                continue
            self._keep(known)
            self.reused += 1
            found.trust = known.trust
            return found
        plan = Plan(tape)
        with suppress(NoOutline):
            made = outline(tape, plan)
            plan.trust = made.trust
            self._keep(made)
        return plan

    def are_trusted(self, about: Hashable, sizes: Elements) -> bool:
        """Whether there is a plan that was right at sizes like these: theirs, perhaps. See ``Trust``."""
        return any(known.trust.covers(about, sizes) for known in self._known)

    def _keep(self, known: Outline) -> None:
        with self._lock:
            others = [other for other in self._known if other is not known]
            self._known = [known, *others[: MAX_OUTLINES - 1]]


class _Fitting:
    """One tape held against an outline. Raises ``Misfit`` as soon as they differ."""

    def __init__(self, known: Outline, tape: Tape) -> None:
        self._known, self._tape = known, tape
        if len(tape.operations) != len(known.lines) or len(tape.inputs) != len(known.inputs):
            raise Misfit("how many operations")
        self._values: list[Value | None] = [None] * len(known.slots)
        self._lengths: list[int | None] = [None] * len(known.singular)
        self._shapes: list[tuple[int, ...] | None] = [None] * len(known.forms)

    def reused(self) -> Schedule:
        """The plan of the tape. A tape that does not fit is as it was."""
        self._match()
        of_tape = self._tape.operations
        changed = [of_tape[place] for single in self._known.singles for place in (single.line, *single.views)]
        moved = [self._values[slot] for slot in self._known.moved]
        moved += [value for each in changed for value in each.outputs if value is not None]
        calls = [(each, each.func, each.args, each.kwargs, each.inputs) for each in changed]
        places = [(value, value.base, value.stride) for value in moved]
        try:
            return self._changed()
        except Misfit:
            for operation, *call in calls:
                operation.func, operation.args, operation.kwargs, operation.inputs = call
            for value, base, stride in places:
                value.base, value.stride = base, stride
            raise

    def _changed(self) -> Schedule:
        """The plan of the tape, once what the planned one changed on its own is changed here."""
        for single in self._known.singles:
            views_of = [self._tape.operations[place] for place in single.views]
            if not singles.again(self._tape.operations[single.line], single.copied, views_of):
                raise Misfit("a copy")
        for slot in self._known.moved:
            value = self._values[slot]
            value.stride = contiguous(value.shape)
        return self._planned()

    # Is it the same tape? -------------------------------------------------------------------------------------------

    def _match(self) -> None:
        known, values, shapes = self._known, self._values, self._shapes
        slots, bases, forms = known.slots, known.bases, known.forms
        for slot, value in zip(known.inputs, self._tape.inputs, strict=True):
            self._leaf(slot, value)
        for operation, line in zip(self._tape.operations, known.lines, strict=True):
            func = operation.func
            if func is not line.func and likeness(func) != line.func:
                raise Misfit("another function")
            inputs, outputs = operation.inputs, operation.outputs
            if len(inputs) != len(line.inputs) or len(outputs) != len(line.outputs):
                raise Misfit("how many values")
            for value, slot in zip(inputs, line.inputs, strict=True):
                if values[slot] is not value:
                    self._leaf(slot, value)
            if line.check and fixed(operation, line.check) != line.fixed:
                raise Misfit("arguments of a kernel's operation")
            for value, slot in zip(outputs, line.outputs, strict=True):
                if slot == NONE or value is None:
                    if (slot == NONE) != (value is None):
                        raise Misfit("a missing result")
                    continue
                values[slot] = value
                place = slots[slot]
                if shapes[place] is None:
                    self._learn(place, value)
                elif (
                    shapes[place] != value.shape
                    or value.dtype != forms[place].dtype
                    or value.order != forms[place].order
                ):
                    raise Misfit("the form of a result")
                base = bases[slot]
                if base >= 0:
                    if values[base] is not value.base:
                        self._leaf(base, value.base)
                elif base == NONE and value.base is not None:
                    raise Misfit("a result's memory")
        if [self._values[slot] for slot in known.outputs] != self._tape.outputs:
            raise Misfit("what is given back")
        for out, source, runs in known.turns:
            for run in runs:
                if math.prod(shapes[out][run.out0 : run.out1]) != math.prod(shapes[source][run.src0 : run.src1]):
                    raise Misfit("what a reshape merges")

    def _leaf(self, slot: int, value: Value | None) -> None:
        """A value that no operation has made yet."""
        form = self._known.forms[self._known.slots[slot]]
        if self._values[slot] is not None or value is None or type(value.leaf) is not form.leaf:
            raise Misfit("what is no operation's result")
        if form.leaf is Constant and not value.shape and value.scalar() != form.scalar:
            raise Misfit("a number")
        self._values[slot] = value
        self._learn(self._known.slots[slot], value)
        base = self._known.bases[slot]
        if base >= 0 and self._values[base] is not value.base:
            self._leaf(base, value.base)
        elif base == NONE and value.base is not None:
            raise Misfit("memory of a leaf")

    def _learn(self, place: int, value: Value) -> None:
        """What the shape of a value says about lengths, or whether it says what others have said."""
        form = self._known.forms[place]
        if value.dtype != form.dtype or value.device != form.device or value.order != form.order:
            raise Misfit("dtype, device or order")
        if form.lengths is None:
            return
        if len(value.shape) != len(form.lengths):
            raise Misfit("how many dimensions")
        for n, length in zip(value.shape, form.lengths, strict=True):
            if length < 0:
                if n != ~length:
                    raise Misfit("a length of the model")
            elif self._lengths[length] is None and min(n, 2) == self._known.singular[length]:
                self._lengths[length] = n
            elif self._lengths[length] != n:
                raise Misfit("lengths that were equal, or 1")
        if value.is_large != form.large:
            raise Misfit("how many elements")
        self._shapes[place] = value.shape

    # Its numbers ----------------------------------------------------------------------------------------------------

    def _planned(self) -> Schedule:
        known = self._known
        for slot, memory, start in known.offsets:
            if self._offset(slot) - self._offset(memory) != start:
                raise Misfit("where a constant begins")
        if any(self._start(line, result) != start for line, result, start in known.cuts):
            raise Misfit("where a cut begins")
        if any(self._number(one) != self._number(other) for one, other in known.alike):
            raise Misfit("where cuts begin that begin alike")
        if any(self._lengths[one] != self._lengths[other] for one, other in known.chance):
            raise Misfit("lengths of groups that share a kernel")
        numbers = [self._number(ref) for ref in known.refs]
        report = copy.copy(known.report)
        report.left = dict(report.left)
        found = Schedule(report)
        made: list[Launch | None] = [None] * len(known.kernels)
        joined: dict[int, int] = {}  # how much of each join has been given away
        for step in known.steps:
            if step[0] == "call":
                operation = self._tape.operations[step[1]]
                operation.kind = step[2]
                found.steps.append(operation)
            elif step[0] == "kernel":
                launch = self._launch(made, numbers, *step[1:])
                found.steps.append(launch)
                found.launches.append(launch)
            elif step[0] == "join":
                found.steps.append(join(self._values[step[1]]))
            else:
                found.steps.append(self._part(joined, *step[1:]))
        self._lie_alike(numbers)
        found.parts = {self._values[place]: self._values[part] for place, part in known.parts}
        return found

    def _offset(self, slot: int) -> int:
        return self._values[slot].leaf.tensor.storage_offset()

    def _start(self, line: int, result: int) -> int:
        operation = self._tape.operations[line]
        return views.start(operation, operation.outputs[result])

    def _number(self, ref: tuple) -> int:
        kind, *rest = ref
        if kind == "fixed":
            return rest[0]
        if kind == "start":
            return self._start(*rest)
        if kind == "stride":
            slot, d, divisor = rest
            quotient, remainder = divmod(self._values[slot].stride[d], divisor) if divisor else (0, 0)
            if remainder:
                raise Misfit("a stride's divisor")
            return quotient
        number = self._lengths[rest[0]]
        if number is None:
            raise Misfit("a length that no value has")
        return number

    def _lie_alike(self, numbers: Sequence[int]) -> None:
        """Whether what kernels read and write lies as their arguments say."""
        layouts = [
            tuple([factor * math.prod([numbers[place] for place in places]) for factor, places in layout])
            for layout in self._known.layouts
        ]
        for slot, place in self._known.strides:
            value, wanted = self._values[slot], layouts[place]
            if value.stride != wanted and any(
                own != other and n != 1 for own, other, n in zip(value.stride, wanted, value.shape, strict=True)
            ):
                raise Misfit("how a value lies")

    # Its steps ------------------------------------------------------------------------------------------------------

    def _launch(
        self, made: list[Launch | None], numbers: Sequence[int], place: int, read: Sequence[int], written: Sequence[int]
    ) -> Launch:
        values = self._values
        operands, outputs = tuple([values[slot] for slot in read]), tuple([values[slot] for slot in written])
        launch = made[place]
        if launch is None:
            kernel = self._known.kernels[place]
            if any(value.is_large for value in (*operands, *outputs)) and not kernel.source.large:
                raise Misfit("how many elements")
            fixed_column = kernel.source.column_size.static
            source = dataclasses.replace(
                kernel.source, operands=operands, outputs=outputs,
                row_sizes=tuple(Size(numbers[each]) for each in kernel.rows),
                column_size=Size(numbers[kernel.column], fixed_column),
                integers=tuple(tuple(Size(numbers[each]) for each in places) for places in kernel.integers),
            )  # fmt: skip
            launch = made[place] = Launch(source)
            return launch
        return launch.again(operands, outputs)

    def _part(self, joined: dict[int, int], whole: int, dim: int, slot: int) -> Operation:
        form = self._known.forms[self._known.slots[slot]]
        shape = tuple(~length if length < 0 else self._lengths[length] for length in form.lengths)
        start = joined.get(whole, 0)
        joined[whole] = start + shape[dim]
        operation = part(self._values[whole], dim, start, shape, ())
        self._values[slot] = operation.outputs[0]
        return operation
