"""Plans a tape as steps: which groups become kernels, what they store, and what stays a call."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..preparing import look
from . import group, joins, quantisers, repeats, singles, static_sizes, views
from .group import FUSE, Group
from .index import number
from .kernels import ALIGNED, Launch
from .layout import Layouts, contiguous
from .pointwise import COSTLY
from .structure import planned
from .terms import NoKernel
from .traits import aten
from .trust import Trust
from .values import ONE, Operation, Tape, Value

ALONE = "a single operation"
Steps = list[Operation | Launch]
Users = dict[Value, list[Operation | None]]  # who reads a value; None: the caller


@dataclass
class Report:
    """What became of a tape."""

    calls: int = 0
    kernels: int = 0
    fused: int = 0  # operations inside kernels
    compiled: int = 0  # kernels that were new to the process
    compile_seconds: float = 0.0
    left: dict[str, int] = field(default_factory=dict)  # groups that are no kernel, by reason


@dataclass
class Schedule:
    """What a program runs. parts: parts of joins, where a kernel stores them, and what they are.

    called: operations whose kernels by hand are to be compiled; none where those of an earlier plan serve again.
    trust: shared by all sizes of one plan.
    """

    report: Report = field(default_factory=Report)
    steps: Steps = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    parts: dict[Value, Value] = field(default_factory=dict)
    called: list[Operation] = field(default_factory=list)
    trust: Trust = field(default_factory=Trust)


def unfused(tape: Tape) -> Schedule:
    """Each operation by itself, as eager runs it."""
    calls = sum(any(value is None or value.base is None for value in each.outputs) for each in tape.operations)
    return Schedule(Report(calls=calls), list(tape.operations))


@dataclass
class Kernels:
    """A group that became kernels, and the first one of its form, which they were made for."""

    members: Sequence[Operation]
    form: repeats.Form
    first: repeats.Planned


class Plan(Schedule):
    """The kernels and calls of one tape. wrong: sources of kernels that are not to be used."""

    def __init__(self, tape: Tape, wrong: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._wrong = wrong
        static_sizes.annotate(tape)
        self.layouts, self._repeats = Layouts(), repeats.Repeats()
        self.groups: list[Kernels] = []
        self.singles = singles.copy_what_others_copy(tape, self.layouts)
        self._users: Users = {}
        for operation in tape.operations:
            for value in operation.inputs:
                self._users.setdefault(value, []).append(operation)
        for value in tape.outputs:
            self._users.setdefault(value, []).append(None)
        found = group.grouped(tape)
        # whose strides a view may rely on
        self._viewed = {op.inputs[0].root for op in tape.operations if op.kind == group.VIEW}
        self._viewed |= {value.root for value in tape.outputs}
        asking = [op for op in tape.operations if getattr(op.func, "by_strides", False)]
        self._viewed |= {value.root for op in asking for value in op.inputs}
        for step in found:
            look()
            self.steps += self._fused(step) if isinstance(step, Group) else [step]
        self.called = [*(step for step in self.steps if isinstance(step, Operation)), *tape.ahead]
        self.report.calls = sum(isinstance(step, Operation) and step.kind != group.VIEW for step in self.steps)
        self.report.kernels = len(self.launches)

    def _fused(self, members: Sequence[Operation]) -> Steps:
        """The kernels of a group, and the views of their results that others need."""
        own = {id(operation) for operation in members}
        outside = {
            value
            for operation in members
            for value in operation.outputs
            if value is not None and any(user is None or id(user) not in own for user in self._users.get(value, ()))
        }
        stored, after = group.wanted(members, outside)
        strides, parts = [value.stride for value in stored], len(self.parts)
        try:
            steps = self._planned(members, stored)
            launches = [step for step in steps if isinstance(step, Launch)]
            if any(launch.source.text in self._wrong for launch in launches):
                raise NoKernel("its result was wrong here")
        except NoKernel as reason:
            for value, stride in zip(stored, strides, strict=True):
                self.layouts.put_back(value, stride)
            for place in list(self.parts)[parts:]:
                del self.parts[place]
            return self._smaller(members, str(reason))
        self.launches += launches
        self.report.fused += sum(operation.kind == FUSE for operation in members)
        return [*steps, *after]

    def _planned(self, members: Sequence[Operation], stored: Sequence[Value]) -> Steps:
        """The kernels of a group; those of an earlier one like it, if there was one. Raises ``NoKernel``."""
        form = repeats.form_of(members, stored, {value for value in stored if self._stays(value)}, self.layouts)
        planned = self._repeats.find(form)
        if isinstance(planned, str):
            raise NoKernel(planned)
        if planned is not None:
            steps, parts = repeats.again(planned, form, self.layouts)
            self.parts |= parts
        else:
            known = set(self.parts)
            try:
                steps = self._kernels(members, stored)
            except NoKernel as reason:
                self._repeats.keep(form, str(reason))
                raise
            parts = {place: part for place, part in self.parts.items() if place not in known}
            planned = repeats.Planned(members, form, steps, parts)
            self._repeats.keep(form, planned)
        self.groups.append(Kernels(members, form, planned))
        return steps

    def _kernels(self, members: Sequence[Operation], stored: Sequence[Value]) -> Steps:
        fused = [operation for operation in members if operation.kind == FUSE]
        if len(fused) == 1 and group.is_best_alone(fused[0], self.layouts):
            raise NoKernel(ALONE)
        if len(fused) <= len(stored) and all(map(group.is_copy, fused)):  # with one picture they copy nothing
            raise NoKernel(ALONE)
        inside = {value: operation for operation in members for value in operation.outputs if value is not None}
        by_form: dict[tuple, list[Value]] = {}
        left = list(stored)
        before = self._once(left, inside)
        for value in left:
            if not self._stays(value):
                self.layouts.straighten(value)
            if self._joins(value, inside):
                parts = self._in_place(value, inside, before)
            else:
                parts = [value]
            for part in parts:
                main = quantisers.rounded_with(part, inside)
                form = tuple(
                    size.static or size.first for size in main.sizes
                )  # not equal by chance, at this size alone
                by_form.setdefault((main.shape, main.stride, main.base, form), []).append(part)
        return [*before, *(planned(outputs, inside, self.layouts) for outputs in by_form.values())]

    def _once(self, stored: list[Value], inside: dict[Value, Operation]) -> Steps:
        """What is computed before a group's kernels, which then read it: functions that each row would compute again.

        A gate, say, has a number a channel and is read by every token; a rotary table is read by every head. What is
        done here leaves ``stored`` and ``inside``.
        """
        steps: Steps = []
        tables: set[Value] = set()  # what sines or cosines in this group lead to
        for value, operation in list(inside.items()):
            if operation.traits.name in ("sin", "cos") or any(given in tables for given in operation.inputs):
                tables.add(value)
            if value in stored:
                early = value in tables and any(value in other.inputs for other in inside.values())
            else:
                costly = operation.traits.name in COSTLY
                early = costly and any(_is_spread(value, result) for result in stored)
            if not early:
                continue
            if value in stored or any(given in inside for given in operation.inputs):  # a view of such one, too
                steps.append(planned([value], inside, self.layouts))
            else:
                steps.append(operation)
            stored[:] = [other for other in stored if other is not value]
            del inside[value]
            tables.discard(value)
        return steps

    def _stays(self, value: Value) -> bool:
        """Whether somebody minds how ``value`` lies: the results of a convolution, say, lie as its argument does."""
        if value in self._viewed or value.order is not None:
            return True
        readers = [user for user in self._users.get(value, ()) if user is not None]
        moves = not any(reader.kind == group.CALL and not singles.is_steady(reader) for reader in readers)
        # torch looks at the strides of dimensions of 1, too: by them a convolution takes a picture for channels last
        return not (moves or self.layouts.is_straight(value) and value.stride == contiguous(value.shape))

    def _joins(self, value: Value, inside: dict[Value, Operation]) -> bool:
        """Whether ``value`` is a join of parts that can each be stored where it belongs, by a kernel of its own."""
        operation = inside[value]
        if operation.traits.name != "cat" or value.base is not None:
            return False
        if any(user in inside.values() for user in self._users.get(value, ()) if user is not None):
            return False
        dim = views.dimension(operation, 1, len(value.shape))
        step, start = self.layouts.of(value)[dim], 0
        for part in operation.args[0][:-1]:  # aligned whatever the sizes of the call are
            length = number(part.sizes[dim]) * step
            start += length.factor * value.dtype.itemsize
            if start % ALIGNED or not length.static and length.factor * value.dtype.itemsize % ALIGNED:
                return False
        return all(part.numel for part in operation.args[0])

    def _in_place(self, value: Value, inside: dict[Value, Operation], before: Steps) -> list[Value]:
        """The parts of a join, each as a place in the join's memory, which is made first."""
        operation = inside[value]
        dim, start = views.dimension(operation, 1, len(value.shape)), 0
        before.append(joins.join(value))
        places = []
        for part in operation.args[0]:
            before.append(joins.part(value, dim, start, part.shape, part.sizes))
            place = before[-1].outputs[0]
            self.layouts.adopt(place, value)
            inside[place] = Operation(aten.clone.default, (part,), {}, [part], [place], kind=FUSE)
            self.parts[place] = part
            places.append(place)
            start += part.shape[dim]
        return places

    def _smaller(self, members: Sequence[Operation], reason: str) -> Steps:
        """A group that is no kernel, cut in two before its last sum or join; a single operation stays torch's."""
        fused = [operation for operation in members if operation.kind == FUSE]
        if len(fused) <= 1:
            self.report.left[reason] = self.report.left.get(reason, 0) + 1
            for operation in fused:
                value, straight = operation.outputs[0], map(self.layouts.is_straight, operation.inputs)
                if value.base is None and all(straight) and not self._stays(value):
                    self.layouts.straighten(value)  # as torch makes it, now that kernels store its arguments so
            return list(members)
        middle = 1 if group.is_heavy(fused[0]) else len(fused) // 2
        cut = next((op for op in reversed(fused[1:]) if group.is_heavy(op)), fused[middle])
        late: list[Operation] = []
        values: set[Value] = set()
        for operation in members:
            if operation is cut or any(value in values for value in operation.inputs):
                late.append(operation)
                values.update(value for value in operation.outputs if value is not None)
        early = [operation for operation in members if operation not in late]
        return [*self._fused(early), *self._fused(late)]


def _is_spread(value: Value, result: Value) -> bool:
    """Whether each element of ``value`` is read for several of ``result``, at every size of the call."""
    places = zip(reversed(value.sizes), reversed(result.sizes), strict=False)
    return any(own is ONE and other is not ONE for own, other in places)
