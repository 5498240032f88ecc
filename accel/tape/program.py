"""A program: a tape as steps that can run again on other inputs of the same sizes.

It holds no model. Weights are slots, filled by ``bind`` from the module that was recorded (or from another of the same
structure) and emptied by ``unbind`` when ComfyUI unloads it.
"""

import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.operations import is_ours
from ..preparing import look
from . import cost
from .binding import Bound, Loose, copy_over, form_of, loose, spread, there, tight, weight
from .called_patches import BETWEEN, LiveCall
from .fetched import AnyStep, Fetch, FetchedSteps, Sources, with_fetches
from .hand_kernels import compiling
from .kernels import Launch, compile_all
from .layer_calls import LayerCall
from .named_tensors import MAPPED, NO_OTHERS, OfPatch, PartsByPath
from .plan import Plan, unfused
from .reuse import Outlines
from .steps import Called, Launched, Slot, run_of
from .values import Constant, Derived, Input, Operation, Resident, Spread, Tape, Value, Weight, replaced

LONG_WORK = 2.5e13  # multiplications that take a GPU longer than the host takes to capture them: 60 ms of an H200


class Program:
    """The steps of one tape. fuse: neighbouring operations become kernels; without it they are eager's own.

    outlines: of the model's earlier plans, one of which may serve.
    """

    def __init__(
        self, tape: Tape, fuse: bool, wrong: frozenset[str] = frozenset(), outlines: Outlines | None = None
    ) -> None:
        self._slots: dict[Value, int] = {}
        self.device = tape.device
        if not fuse:
            plan = unfused(tape)
        elif outlines is None:
            plan = Plan(tape, wrong)
        else:
            plan = outlines.plan(tape)
        self.report, self.launches, self.parts, self.trust = plan.report, plan.launches, plan.parts, plan.trust
        started = time.perf_counter()
        with compiling(plan.called, tape.device) as by_hand:
            self.report.compiled = compile_all(self.launches, tape.device) if self.launches else 0
        self.report.compiled += by_hand.count
        self.report.compile_seconds = time.perf_counter() - started if self.report.compiled else 0.0
        steps = plan.steps
        self.calls = _calls(steps)
        calls = (step for step in steps if isinstance(step, Operation))
        self.is_long = self.device.type == "cuda" and cost.of_all(calls) > LONG_WORK
        self._written = {operation.writes.root for operation in tape.operations if operation.writes is not None}
        self._steps = [self._step(step) for step in steps]
        self._output = replaced(tape.output, Value, self._slot)
        self._free(steps, tape)
        for leaf in [value.leaf for value in self._slots if isinstance(value.leaf, (Derived, Spread))]:
            for source in leaf.sources if isinstance(leaf, Derived) else (leaf.source,):
                self._number(source)
        leaves = [value for value in self._slots if value.leaf is not None]
        self._inputs = [(self._slots[v], v.leaf.index) for v in leaves if isinstance(v.leaf, Input)]
        weights = [v for v in leaves if isinstance(v.leaf, Weight)]
        held = {source for value in leaves if isinstance(value.leaf, Derived) for source in value.leaf.sources}
        away = [v for v in weights if v.device != self.device and v not in held]
        self.fetches = sum(v.numel * v.dtype.itemsize for v in away)  # bytes that it copies to its device in each run
        self._weights = [form_of(v.leaf, v.shape, v.stride, v.dtype, v.device) for v in weights]
        self.weight_slots = [self._slots[v] for v in weights]
        self._fixed = [(self._slots[v], v.leaf.tensor) for v in leaves if isinstance(v.leaf, Constant)]
        derived = [(self._slots[v], v.leaf) for v in leaves if isinstance(v.leaf, Derived)]
        self._derived = [(slot, leaf.make, tuple(self._slots[v] for v in leaf.sources)) for slot, leaf in derived]
        self.resident = [(slot, self._slots[leaf.sources[0]]) for slot, leaf in derived if isinstance(leaf, Resident)]
        wide = [v for v in leaves if isinstance(v.leaf, Spread)]
        self._spread = [(self._slots[v], self._slots[v.leaf.source], v.leaf.rows) for v in wide]
        self._turned = frozenset(self._slots[v] for v in tape.permuted if v in self._slots)
        self.permuted = frozenset(v.leaf for v in tape.permuted if v in self._slots)  # may lie in channels_last
        self._count = len(self._slots)
        # what lies in a weight's memory, without being the weight
        self._lent = frozenset(n for v, n in self._slots.items() if v.leaf is None and isinstance(v.root.leaf, Weight))
        self._fetching: tuple[frozenset[str], list[AnyStep], set[int]] | None = None
        self._bound: Bound | Loose | None = None
        self.others = NO_OTHERS  # of patches, to which it is bound
        self._state: Hashable = None  # for which what stays on the device was copied there

    # Making it ----------------------------------------------------------------------------------------------------

    def _number(self, value: Value) -> int:
        return self._slots.setdefault(value, len(self._slots))

    def _slot(self, value: Value) -> Slot:
        return Slot(self._number(value))

    def _step(self, step: Operation | Launch) -> Launched | Called:
        slots = self._slots
        number = slots.setdefault
        outputs = tuple([-1 if value is None else number(value, len(slots)) for value in step.outputs])
        if isinstance(step, Launch):
            return Launched(outputs, step, tuple([number(value, len(slots)) for value in step.operands]), self.device)
        flat = [(place, number(item, len(slots))) for place, item in enumerate(step.args) if type(item) is Value]
        if len(flat) == len(step.inputs):
            args = tuple([None if type(item) is Value else item for item in step.args])
            return Called(outputs, run_of(step, self._written), args, step.kwargs, tuple(flat))
        args, kwargs = replaced(step.args, Value, self._slot), replaced(step.kwargs, Value, self._slot)
        return Called(outputs, run_of(step, self._written), args, kwargs)

    def _free(self, steps: Sequence[Operation | Launch], tape: Tape) -> None:
        """Each step frees what nobody reads after it."""
        seen = {self._slots[value] for value in tape.outputs}
        for made, step in zip(reversed(steps), reversed(self._steps), strict=True):
            free = []
            for value in (*made.outputs, *(made.operands if isinstance(made, Launch) else made.inputs)):
                if value is not None and value.leaf is None and (slot := self._slots[value]) not in seen:
                    seen.add(slot)
                    free.append(slot)
            step.free = tuple(free)
            if isinstance(step, Called) and isinstance(step.run, LiveCall):
                step.outputs = tuple([-1 if slot in step.free else slot for slot in step.outputs])
                step.run = partial(step.run, wanted=[slot >= 0 for slot in step.outputs])

    # Running it ---------------------------------------------------------------------------------------------------

    def bind(self, module: nn.Module, others: Mapping[int, OfPatch] = NO_OTHERS, state: Hashable = None) -> None:
        """Fills in the weights of ``module``. Raises ``NotBound``. others: of ``PartsByPath``. state: of ``renew``."""
        self._bound, self.others, self._state = self.bound_to(module, others), others, state

    def renew(self, state: Hashable) -> None:
        """Copies to the device what stays there, if that was last done in another state."""
        if self.resident and self._state != state:
            copy_over(there(self._bound), self.resident)
            self._state = state

    def bound_to(self, module: nn.Module, others: Mapping[int, OfPatch] = NO_OTHERS) -> Bound:
        """The weights of ``module``, for ``run``. Raises ``NotBound``."""
        bound = self._bound_to(PartsByPath(module, others))
        copy_over(bound, self.resident)
        bound.note(self._turned)
        if any(isinstance(step.run, LayerCall) for step in self._steps):
            bound.steps, bound.spread = [_on(module, step) for step in self._steps], self._spread
        return bound

    def _bound_to(self, modules: PartsByPath, but: Container[int] = ()) -> Bound:
        """The weights of these modules. but: slots that stay empty."""
        bound = Bound([None] * self._count)
        for slot, tensor in self._fixed:
            bound[slot] = tensor
        for slot, form in zip(self.weight_slots, self._weights, strict=True):
            if slot not in but:
                bound[slot] = weight(modules, form, slot in self._turned)
        for slot, make, sources in self._derived:
            if slot not in but:
                bound[slot] = make(*(bound[source] for source in sources))
        return bound

    def fetching(
        self, module: nn.Module, fetch: Fetch, is_fetched: Callable[[nn.Module], bool],
        others: Mapping[int, OfPatch] = NO_OTHERS,
    ) -> Bound:  # fmt: skip
        """As ``bound_to``, but steps fetch what they read of those parts of the module that ``is_fetched``.

        It holds these parts. Raises ``NotBound`` where that cannot be.
        """
        modules = PartsByPath(module, others)
        layers = dict.fromkeys(form.leaf.module for form in self._weights if form.leaf.name.startswith(MAPPED))
        steps, filled = self._with_fetches(frozenset(layer for layer in layers if is_fetched(modules[layer])))
        bound = self._bound_to(modules, but=filled)
        bound.steps = [
            step.on(modules, fetch) if isinstance(step, FetchedSteps) else _on(module, step) for step in steps
        ]
        bound.spread = [each for each in self._spread if each[0] not in filled]
        return bound

    def _with_fetches(self, fetched: frozenset[str]) -> tuple[list[AnyStep], set[int]]:
        """As the function. It is the same for blocks that are alike, and in each run."""
        if self._fetching is None or self._fetching[0] != fetched:
            forms = zip(self.weight_slots, self._weights, strict=True)
            sources = Sources(
                {slot: (form, slot in self._turned) for slot, form in forms},
                {slot: (make, of) for slot, make, of in self._derived},
                {slot: (of, rows) for slot, of, rows in self._spread},
            )
            self._fetching = fetched, *with_fetches(self._steps, sources, self._lent, fetched)
        return self._fetching[1:]

    def bound_with(self, known: Mapping[Value, Tensor]) -> Bound:
        """For ``run``: these values, and constants, in the place of weights and of what operations have made."""
        bound = Bound([None] * self._count)
        for slot, tensor in self._fixed:
            bound[slot] = tensor
        for value, tensor in known.items():
            if value in self._slots:
                bound[self._slots[value]] = tensor
        return bound

    def loosen(self) -> None:
        """Holds the weights no longer than their model does, and no copies, until ``tighten``."""
        self._bound = loose(self._bound, [*self.weight_slots, *(slot for slot, _ in self.resident)])

    def tighten(self) -> bool:
        """Whether all weights that it is bound to are there, and lie as they did."""
        self._bound = tight(self._bound)
        return self._bound is not None

    def unbind(self) -> None:
        """Releases the weights."""
        self._bound = None

    def settled(self) -> None:
        """Forgets what only ``values`` needs: the program was checked."""
        self._slots, self.parts = {}, {}

    def constants(self) -> list[Tensor]:
        """What the program holds on the device besides weights; what is made of weights while it is bound to them."""
        bound = there(self._bound)
        made = [bound[slot] for slot, _, _ in self._derived] if bound is not None else []
        return [tensor for _, tensor in self._fixed] + made

    def values(self, inputs: Sequence[Tensor], wanted: set[Value]) -> dict[Value, Tensor]:
        """What ``wanted`` values are in a run; memory for all of them is needed. For finding faults."""
        found: dict[Value, Tensor] = {}
        names = {slot: value for value, slot in self._slots.items() if value in wanted}
        self._execute(
            inputs, lambda slot, tensor: found.update({names[slot]: tensor.clone()}) if slot in names else None
        )
        return found | {value: self.leaf(value, inputs) for value in wanted - found.keys()}

    def leaf(self, value: Value, inputs: Sequence[Tensor]) -> Tensor:
        """What a leaf that the program reads is now."""
        if isinstance(value.leaf, Input):
            return inputs[value.leaf.index]
        if isinstance(value.leaf, Constant):  # of which the program may read only a part
            return value.leaf.tensor
        return self._bound[self._slots[value]]

    def fetches_its(self, value: Value) -> bool:
        """Whether a leaf that the program reads is there for one step alone: a weight, or what is made of some."""
        return self._bound is None and isinstance(value.leaf, (Weight, Derived, Spread))

    def run(self, inputs: Sequence[Tensor], bound: Bound | None = None) -> Any:
        """The forward's result for these inputs; inference tensors only where the caller is in inference mode.

        The steps were recorded in that mode, and what they do with tensors that were made in it needs it again.
        bound: other weights than those that it is bound to.
        """
        with torch.inference_mode():
            out = self._execute(inputs, None, bound)
        return out if torch.is_inference_mode_enabled() else replaced(out, Tensor, torch.clone)

    def _execute(
        self, inputs: Sequence[Tensor], seen: Callable[[int, Tensor], None] | None, bound: Bound | None = None
    ) -> Any:
        bound = tight(self._bound) if bound is None else bound  # another thread may have let go meanwhile
        values, steps = list(bound), bound.steps or self._steps
        for slot, index in self._inputs:
            values[slot] = inputs[index]
        spread(values, bound.spread if bound.steps else self._spread)
        waits = self.device.type == "cpu"  # each step is done when it returns, and one may take seconds
        for step in steps:
            if waits:
                look()
            step(values)
            if seen is not None:
                for slot in step.outputs:
                    seen(slot, values[slot])
            for slot in step.free:
                values[slot] = None
        return replaced(self._output, Slot, lambda slot: values[slot.number])


def _on(module: nn.Module, step: AnyStep) -> AnyStep:
    """The step; if it calls a layer, that of this module."""
    is_call = isinstance(step, Called) and isinstance(step.run, LayerCall)
    return replace(step, run=step.run.of(module)) if is_call else step


def _calls(steps: Sequence[Operation | Launch]) -> frozenset[Hashable]:
    """What the steps ask of torch's libraries and of ours; empty where they call others, of which nothing is known.

    Those that run between the pieces of a graph are in no capture.
    """
    inside = (step for step in steps if not isinstance(step, Launch) and not isinstance(step.func, BETWEEN))
    operations = {id(step.func): step for step in inside}.values()  # some have no hash
    if not all(map(_is_known, operations)):
        return frozenset()
    return frozenset((_called(operation.func), getattr(operation.func, "backend", "")) for operation in operations)


def _called(func: Any) -> Hashable:
    """A function without what it is for: attention's backend, or sizes."""
    return getattr(func, "likeness", getattr(func, "func", func))


def _is_known(operation: Operation) -> bool:
    own = getattr(operation.func, "own", _called(operation.func))
    schema = getattr(own, "_schema", None)
    return own is torch.empty_strided or (schema is not None and (schema.name.startswith("aten::") or is_ours(own)))
