"""A program: what a tape does, as steps that can be run again on other inputs of the same sizes.

It holds no model. Weights are slots, filled by ``bind`` from the module that was recorded (or from another of the same
structure) and emptied by ``unbind`` when ComfyUI unloads it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import group, sizes
from .group import Group
from .kernels import Launch, compile_all
from .layout import Layouts, contiguous
from .lower import NoKernel
from .structure import planned
from .traits import traits
from .values import Constant, Input, Operation, Tape, Value, Weight, replaced
from .weights import resolve


ALONE = "a single operation"
Bound = list[Tensor | None]  # a program's values before it runs: its weights and constants
Users = dict[Value, list[Operation | None]]  # who reads a value; None: the caller


class NotBound(RuntimeError):
    """The module no longer has a weight as it was recorded."""


@dataclass
class Step:
    """One call or one launch. ``free``: slots that nobody reads afterwards."""

    run: Any  # Operation | Launch
    args: tuple
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    free: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Slot:
    """Where a value lies in the list that a run fills."""

    number: int


@dataclass
class Report:
    """What became of a tape."""

    calls: int = 0
    kernels: int = 0
    fused: int = 0  # operations inside kernels
    compiled: int = 0  # kernels that were new to the process
    compile_seconds: float = 0.0
    left: dict[str, int] = field(default_factory=dict)  # groups that are no kernel, by reason


class Program:
    """The steps of one tape. fuse: neighbouring operations become kernels; without it they are eager's own."""

    def __init__(self, tape: Tape, fuse: bool, wrong: frozenset[str] = frozenset()) -> None:
        self.report = Report()
        self._slots: dict[Value, int] = {}
        self._launches: list[Launch] = []
        self._wrong = wrong
        self.device = tape.device
        sizes.annotate(tape)
        self._layouts = Layouts()
        steps = self._planned(tape, fuse)
        started = time.perf_counter()
        self.report.compiled = compile_all(self._launches, tape.device) if self._launches else 0
        self.report.compile_seconds = time.perf_counter() - started if self.report.compiled else 0.0
        self._steps = [self._step(step) for step in steps]
        self._output = replaced(tape.output, Value, self._slot)
        self._free(steps, tape)
        leaves = [value for value in self._slots if value.leaf is not None]
        self._inputs = [(self._slots[v], v.leaf.index) for v in leaves if isinstance(v.leaf, Input)]
        self._weights = [(self._slots[v], v) for v in leaves if isinstance(v.leaf, Weight)]
        self._fixed = [(self._slots[v], v.leaf.tensor) for v in leaves if isinstance(v.leaf, Constant)]
        self._bound: Bound | None = None
        del self._layouts

    # Making it ----------------------------------------------------------------------------------------------------

    def _planned(self, tape: Tape, fuse: bool) -> list[Operation | Launch]:
        steps = group.grouped(tape, fuse)
        users: Users = {}
        for operation in tape.operations:
            for value in operation.inputs:
                users.setdefault(value, []).append(operation)
        for value in tape.outputs:
            users.setdefault(value, []).append(None)
        viewed = {op.inputs[0].root for op in tape.operations if op.kind == group.VIEW}
        viewed |= {value.root for value in tape.outputs}
        planned: list[Operation | Launch] = []
        for step in steps:
            planned += self._fused(step, users, viewed) if isinstance(step, Group) else [step]
        self.report.calls = sum(isinstance(step, Operation) and step.kind != group.VIEW for step in planned)
        return planned

    def _fused(self, members: Sequence[Operation], users: Users, viewed: set[Value]) -> list[Operation | Launch]:
        """The kernels of a group, and the views of their results that others need."""
        own = {id(operation) for operation in members}
        outside = {
            value
            for operation in members
            for value in operation.outputs
            if value is not None and any(user is None or id(user) not in own for user in users.get(value, ()))
        }
        stored, views = group.wanted(members, outside)
        try:
            launches = self._kernels(members, stored, viewed)
        except NoKernel as reason:
            return self._smaller(members, str(reason), users, viewed)
        self._launches += launches
        self.report.kernels += len(launches)
        self.report.fused += sum(operation.kind == group.FUSE for operation in members)
        return [*launches, *views]

    def _kernels(self, members: Sequence[Operation], stored: Sequence[Value], viewed: set[Value]) -> list[Launch]:
        fused = [operation for operation in members if operation.kind == group.FUSE]
        if len(fused) == 1 and group.is_best_alone(fused[0]):
            raise NoKernel(ALONE)
        inside = {value: operation for operation in members for value in operation.outputs if value is not None}
        by_shape: dict[tuple, list[Value]] = {}
        for value in stored:
            if value not in viewed and value.stride != contiguous(value.shape):
                value.stride = contiguous(value.shape)
                self._layouts.forget(value)
            by_shape.setdefault((value.shape, value.stride), []).append(value)
        launches = [planned(outputs, inside, self._layouts) for outputs in by_shape.values()]
        if any(each.source.text in self._wrong for each in launches):
            raise NoKernel("its result was wrong here")
        return launches

    def _smaller(
        self, members: Sequence[Operation], reason: str, users: Users, viewed: set[Value]
    ) -> list[Operation | Launch]:
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
        return [*self._fused(early, users, viewed), *self._fused(late, users, viewed)]

    def _slot(self, value: Value) -> _Slot:
        return _Slot(self._slots.setdefault(value, len(self._slots)))

    def _step(self, step: Operation | Launch) -> Step:
        outputs = tuple(-1 if value is None else self._slot(value).number for value in step.outputs)
        if isinstance(step, Launch):
            return Step(step, tuple(self._slot(value).number for value in step.operands), {}, outputs)
        return Step(
            _run_of(step), replaced(step.args, Value, self._slot), replaced(step.kwargs, Value, self._slot), outputs
        )

    def _free(self, steps: Sequence[Operation | Launch], tape: Tape) -> None:
        """Each step frees what nobody reads after it."""
        kept = {self._slots[value] for value in tape.outputs}
        seen = set(kept)
        for planned, step in zip(reversed(steps), reversed(self._steps), strict=True):
            reads = planned.operands if isinstance(planned, Launch) else planned.inputs
            slots = {self._slots[value] for value in reads if value.leaf is None} | set(step.outputs) - {-1}
            step.free = tuple(slots - seen)
            seen |= slots

    # Running it ---------------------------------------------------------------------------------------------------

    def bind(self, module: nn.Module) -> None:
        """Takes the weights from ``module``. Raises ``NotBound``."""
        self._bound = self.bound_to(module)

    def bound_to(self, module: nn.Module) -> Bound:
        """The weights of ``module``, for ``run``. Raises ``NotBound``."""
        bound: Bound = [None] * len(self._slots)
        for slot, tensor in self._fixed:
            bound[slot] = tensor
        for slot, value in self._weights:
            try:
                tensor = resolve(module, value.leaf)
            except (AttributeError, KeyError) as error:
                raise NotBound(f"the weight {value.leaf.module}.{value.leaf.name} is gone") from error
            like = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
            if like != (value.shape, value.stride, value.dtype, value.device):
                raise NotBound(f"the weight {value.leaf.module}.{value.leaf.name} has another form or place")
            bound[slot] = tensor
        return bound

    def unbind(self) -> None:
        """Lets go of the weights."""
        self._bound = None

    def constants(self) -> list[Tensor]:
        """What the program holds on the device besides weights."""
        return [tensor for _, tensor in self._fixed]

    @property
    def launches(self) -> list[Launch]:
        """Its kernels."""
        return list(self._launches)

    def values(self, inputs: Sequence[Tensor], wanted: set[Value]) -> dict[Value, Tensor]:
        """What ``wanted`` values are in a run; memory for all of them is needed. For finding faults."""
        found: dict[Value, Tensor] = {}
        names = {slot: value for value, slot in self._slots.items() if value in wanted}
        self._execute(
            inputs, lambda slot, tensor: found.update({names[slot]: tensor.clone()}) if slot in names else None
        )
        for value in wanted - found.keys():
            tensor = self._bound[self._slots[value]] if not isinstance(value.leaf, Input) else inputs[value.leaf.index]
            found[value] = tensor
        return found

    def run(self, inputs: Sequence[Tensor], bound: Bound | None = None) -> Any:
        """The forward's result for these inputs. bound: other weights than those that it is bound to."""
        return self._execute(inputs, None, bound)

    def _execute(
        self, inputs: Sequence[Tensor], seen: Callable[[int, Tensor], None] | None, bound: Bound | None = None
    ) -> Any:
        values = list(self._bound if bound is None else bound)
        for slot, index in self._inputs:
            values[slot] = inputs[index]
        for step in self._steps:
            run = step.run
            if type(run) is Launch:
                outputs = [
                    torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device=self.device) for v in run.outputs
                ]
                run([values[slot] for slot in step.args], outputs)
                for slot, tensor in zip(step.outputs, outputs, strict=True):
                    values[slot] = tensor
            else:
                out = run(*_filled(step.args, values), **_filled(step.kwargs, values))
                for slot, tensor in zip(step.outputs, out if isinstance(out, (tuple, list)) else (out,), strict=False):
                    if slot >= 0:
                        values[slot] = tensor
                        if seen is not None:
                            seen(slot, tensor)
            for slot in step.free:
                values[slot] = None
        return replaced(self._output, _Slot, lambda slot: values[slot.number])


def _run_of(operation: Operation) -> Callable[..., Any]:
    """What runs an operation; one of another library that works in place may give nothing back, where we want it."""
    if operation.writes is None or operation.opaque or operation.func._schema.name.startswith("aten::"):
        return operation.func
    func, place = operation.func, traits(operation.func).writes
    name = func._schema.arguments[place].name

    def run(*args: Any, **kwargs: Any) -> Any:
        func(*args, **kwargs)
        return args[place] if place < len(args) else kwargs[name]

    return run


def _filled(structure: Any, values: list[Tensor | None]) -> Any:
    kind = type(structure)
    if kind is _Slot:
        return values[structure.number]
    if kind is tuple:
        return tuple([_filled(item, values) for item in structure])
    if kind is list:
        return [_filled(item, values) for item in structure]
    if kind is dict:
        return {name: _filled(item, values) for name, item in structure.items()}
    return structure
