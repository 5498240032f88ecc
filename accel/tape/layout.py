"""How far apart neighbours lie in memory, as products of sizes: strides that hold at every size of the call."""

from collections.abc import Callable, Sequence

from . import views
from .index import UNIT, ZERO, Number, number
from .traits import traits
from .values import Operation, Size, Value

Steps = tuple[Number, ...]
SMALL_STEP = 4


class Layouts:
    """The steps of each value on a tape, found when first asked for."""

    def __init__(self) -> None:
        self._known: dict[Value, Steps] = {}
        self._starts: dict[tuple[Operation, int], Size] = {}
        self._tables: dict[tuple[Value, tuple[int, ...], tuple[int, ...]], Steps] = {}
        self._memory: dict[Value, tuple[Value, int]] = {}

    def start(self, operation: Operation, start: int) -> Size:
        """Where a view begins along its dimension, as a size that a kernel gets as an argument."""
        return self._starts.setdefault((operation, start), Size(start))

    def of(self, value: Value) -> Steps:
        """The stride of each dimension of ``value``, in elements."""
        steps = self._known.get(value)
        if steps is None:
            found = self._view(value) if value.base is not None and value.origin is not None else None
            if value.is_constant:  # parts of one table, alike: the same arguments
                part = value.root, value.shape, value.stride
                steps = self._known[value] = self._tables.setdefault(part, _of_constant(value))
            else:
                steps = self._known[value] = _checked(value, found or _fresh(value))
        return steps

    def memory(self, value: Value) -> tuple[Value, int]:
        """(whose pointer a kernel takes to read ``value``, how many elements behind it ``value`` begins).

        That is ``value`` itself but for one of several neighbours: the cosines of a rotary table, say. Its sines may
        begin where no vector load can, and read together the table is read once.
        """
        found = self._memory.get(value)
        if found is None:
            found = self._memory[value] = _neighbour(value, self.of) or (value, 0)
        return found

    def adopt(self, part: Value, whole: Value) -> None:
        """``part`` lies within the memory of ``whole``."""
        self._known[part] = self.of(whole)

    def forget(self, value: Value) -> None:
        """``value`` will be stored in another layout."""
        self._known.pop(value, None)

    def _view(self, value: Value) -> Steps | None:
        operation = value.origin
        if operation.opaque or not operation.inputs or operation.writes is not None:
            return None
        source = operation.inputs[0]
        steps, name, rank = self.of(source), traits(operation.func).name, len(source.shape)
        if (order := views.permutation(operation, rank)) is not None:
            return tuple(steps[d] for d in order)
        if name in ("slice", "narrow", "chunk", "split", "split_with_sizes", "tensor_split"):
            stride = operation.args[4] if name == "slice" and len(operation.args) > 4 else 1
            return steps if stride == 1 else None
        if name == "unsqueeze":
            dim = operation.args[1] % (rank + 1)
            return (*steps[:dim], ZERO, *steps[dim:])
        if name in ("select", "unbind", "squeeze") and len(value.shape) == rank - 1 and len(operation.args) > 1:
            dim = operation.args[1] % rank
            return (*steps[:dim], *steps[dim + 1 :])
        if name == "unbind":
            return steps[1:]
        if name in ("expand", "expand_as"):
            new = len(value.shape) - rank
            kept = (ZERO if n != m else s for n, m, s in zip(source.shape, value.shape[new:], steps, strict=True))
            return (*([ZERO] * new), *kept)
        if name in views.RESHAPES:
            return self._reshaped(value, source, steps)
        return steps if name in views.SAME else None

    def _reshaped(self, value: Value, source: Value, steps: Steps) -> Steps:
        found: list[Number] = []
        for group in views.groups(value.shape, source.shape):
            inner = steps[group.src1 - 1] if group.src1 > group.src0 else ZERO
            solid = [d for d in range(group.src0, group.src1) if source.shape[d] != 1]
            inner = steps[solid[-1]] if solid else inner
            run: list[Number] = []
            for d in reversed(range(group.out0, group.out1)):
                run.insert(0, inner)
                inner *= number(value.sizes[d])
            found += run
        return tuple(found)


def _fresh(value: Value) -> Steps:
    """Of memory without gaps, in whatever order its dimensions are."""
    shape, stride = value.shape, value.stride
    solid = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: (-stride[d], d))
    order, rest = [], list(solid)
    for d in range(len(shape)):  # a dimension of 1 lies where it stands among the others
        if shape[d] == 1:
            order.append(d)
        elif rest:
            order.append(rest.pop(0))
    steps: list[Number] = [ZERO] * len(shape)
    step = UNIT
    for d in reversed(value.order or order):
        steps[d] = step
        step *= number(value.sizes[d])
    return tuple(steps)


def _neighbour(value: Value, steps_of: Callable[[Value], Steps]) -> tuple[Value, int] | None:
    """As ``Layouts.memory``, if ``value`` is one place of a short last dimension."""
    source, operation = value.base, value.origin
    if source is None or source.dtype != value.dtype:
        return None
    if any(stride == 1 for stride, n in zip(value.stride, value.shape, strict=True) if n > 1):
        return None
    if value.is_constant:
        start = value.leaf.tensor.storage_offset() - source.leaf.tensor.storage_offset()
        return (source, start) if source.is_constant and 0 <= start < SMALL_STEP else None
    if operation is None or operation.opaque or traits(operation.func).name != "select":
        return None
    source = operation.inputs[0]
    dim = views.dimension(operation, 1, len(source.shape))
    step, start = steps_of(source)[dim], views.start(operation, value)
    if step != UNIT or not source.sizes[dim].static or source.shape[dim] > SMALL_STEP:
        return None
    return source, start


def _checked(value: Value, steps: Sequence[Number]) -> Steps:
    """``steps``, and where one is not the stride that was recorded, that stride by a name of its own."""
    if not value.numel:
        return tuple(steps)
    return tuple(
        step if n == 1 or step.value == stride else Number(1, (Size(stride),)) if stride else ZERO
        for step, stride, n in zip(steps, value.stride, value.shape, strict=True)
    )


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of memory in order."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _of_constant(value: Value) -> Steps:
    """Small steps are of the model (the pairs of a rotary table); larger ones are arguments, 0 for a single row."""
    steps: list[Number] = [ZERO] * len(value.shape)
    factor = 1
    for d in reversed(range(len(value.shape))):
        size, stride = value.sizes[d], value.stride[d]
        if size.value == 1:
            steps[d] = Number(factor, (Size(0),))
        elif stride and stride <= SMALL_STEP and stride % factor == 0:
            steps[d], factor = Number(stride), stride
            if size.static:
                factor *= size.value
        elif stride % factor == 0:
            steps[d] = Number(factor, (Size(stride // factor),))
        else:
            steps[d] = Number(1, (Size(stride),))
    return tuple(steps)
