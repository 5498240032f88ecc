"""From a tape to steps: which groups become kernels, what they store, and what stays a call."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from . import group, singles, sizes, views
from .group import Group
from .index import number
from .kernels import ALIGNED, Launch
from .layout import Layouts
from .lower import NoKernel
from .structure import planned
from .traits import aten, traits
from .values import Operation, Tape, Value

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


class Plan:
    """The steps of one tape. wrong: sources of kernels that are not to be used."""

    def __init__(self, tape: Tape, fuse: bool, wrong: frozenset[str] = frozenset()) -> None:
        self.report = Report()
        self.launches: list[Launch] = []
        self.parts: dict[Value, Value] = {}  # parts of joins: where a kernel stores them, and what they are
        self._wrong = wrong
        sizes.annotate(tape)
        self._layouts = Layouts()
        if fuse:
            singles.copy_what_others_copy(tape, self._layouts)
        self._users: Users = {}
        for operation in tape.operations:
            for value in operation.inputs:
                self._users.setdefault(value, []).append(operation)
        for value in tape.outputs:
            self._users.setdefault(value, []).append(None)
        found = group.grouped(tape, fuse)
        # whose strides a view may rely on
        self._viewed = {op.inputs[0].root for op in tape.operations if op.kind == group.VIEW}
        self._viewed |= {value.root for value in tape.outputs}
        self.steps: Steps = []
        for step in found:
            self.steps += self._fused(step) if isinstance(step, Group) else [step]
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
        try:
            steps = self._kernels(members, stored)
        except NoKernel as reason:
            return self._smaller(members, str(reason))
        launches = [step for step in steps if isinstance(step, Launch)]
        if any(launch.source.text in self._wrong for launch in launches):
            return self._smaller(members, "its result was wrong here")
        self.launches += launches
        self.report.fused += sum(operation.kind == group.FUSE for operation in members)
        return [*steps, *after]

    def _kernels(self, members: Sequence[Operation], stored: Sequence[Value]) -> Steps:
        fused = [operation for operation in members if operation.kind == group.FUSE]
        if len(fused) == 1 and group.is_best_alone(fused[0], self._layouts):
            raise NoKernel(ALONE)
        if len(fused) <= len(stored) and all(map(group.is_copy, fused)):  # with one picture they copy nothing
            raise NoKernel(ALONE)
        inside = {value: operation for operation in members for value in operation.outputs if value is not None}
        by_form: dict[tuple, list[Value]] = {}
        before: Steps = []
        for value in stored:
            if value not in self._viewed and (self._layouts.is_straight(value) or self._may_move(value)):
                self._layouts.straighten(value)
            if self._joins(value, inside):
                parts = self._in_place(value, inside, before)
            else:
                parts = [value]
            for part in parts:
                form = tuple(
                    size.static or size.first for size in part.sizes
                )  # not equal by chance, at this size alone
                by_form.setdefault((part.shape, part.stride, part.base, form), []).append(part)
        return [*before, *(planned(outputs, inside, self._layouts) for outputs in by_form.values())]

    def _may_move(self, value: Value) -> bool:
        """Whether nobody minds how ``value`` lies: the results of a convolution, say, lie as its argument does."""
        readers = [user for user in self._users.get(value, ()) if user is not None]
        return not any(reader.kind == group.CALL and not singles.is_steady(reader) for reader in readers)

    def _joins(self, value: Value, inside: dict[Value, Operation]) -> bool:
        """Whether ``value`` is a join of parts that can each be stored where it belongs, by a kernel of its own."""
        operation = inside[value]
        if traits(operation.func).name != "cat" or value.base is not None:
            return False
        if any(user in inside.values() for user in self._users.get(value, ()) if user is not None):
            return False
        dim = views.dimension(operation, 1, len(value.shape))
        step, start = self._layouts.of(value)[dim], 0
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
        make = partial(torch.empty_strided, value.shape, value.stride, dtype=value.dtype, device=value.device)
        before.append(Operation(make, (), {}, [], [value], opaque=True))
        places = []
        for part in operation.args[0]:
            place = value.part(part.shape, part.sizes)
            end = start + part.shape[dim]
            before.append(Operation(aten.slice.Tensor, (value, dim, start, end), {}, [value], [place], kind=group.VIEW))
            self._layouts.adopt(place, value)
            inside[place] = Operation(aten.clone.default, (part,), {}, [part], [place], kind=group.FUSE)
            self.parts[place] = part
            places.append(place)
            start = end
        return places

    def _smaller(self, members: Sequence[Operation], reason: str) -> Steps:
        """A group that is no kernel, cut in two before its last sum or join; a single operation stays torch's."""
        fused = [operation for operation in members if operation.kind == group.FUSE]
        if len(fused) <= 1:
            self.report.left[reason] = self.report.left.get(reason, 0) + 1
            return list(members)
        cut = next((op for op in reversed(fused[1:]) if group.is_heavy(op)), fused[len(fused) // 2])
        late: list[Operation] = []
        values: set[Value] = set()
        for operation in members:
            if operation is cut or any(value in values for value in operation.inputs):
                late.append(operation)
                values.update(value for value in operation.outputs if value is not None)
        early = [operation for operation in members if operation not in late]
        return [*self._fused(early), *self._fused(late)]
