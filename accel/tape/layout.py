"""Derives strides as products of sizes, so that they hold at every size of the call."""

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import static_sizes, views
from .index import UNIT, ZERO, Number, number
from .traits import ELEMENTWISE
from .values import ONE, Operation, Size, Value

Steps = tuple[Number, ...]
SMALL_STEP = 4


class Layouts:
    """The steps of each value on a tape, found when first asked for.

    strides, starts: sizes that are no length of a dimension but a stride (of this value, along this dimension, divided
    by this; 0 by 0), or where a view begins (by this operation, there). moved: what is stored otherwise than recorded.
    """

    def __init__(self) -> None:
        self.strides: dict[Size, tuple[Value, int, int]] = {}
        self.starts: dict[tuple[Operation, int], Size] = {}
        self._known: dict[Value, Steps] = {}
        self.moved: dict[Value, Steps] = {}
        self._tables: dict[tuple[Value, tuple[int, ...], tuple[int, ...]], Steps] = {}
        self._memory: dict[Value, tuple[Value, int]] = {}

    def start(self, operation: Operation, start: int) -> Size:
        """Where a view begins along its dimension, as a size that a kernel gets as an argument."""
        return self.starts.setdefault((operation, start), Size(start))

    def of(self, value: Value) -> Steps:
        """The stride of each dimension of ``value``, in elements."""
        return self.moved.get(value) or self._recorded(value)

    def adopt(self, part: Value, whole: Value) -> None:
        """``part`` lies within the memory of ``whole``."""
        self.moved[part] = self.of(whole)

    def straighten(self, value: Value) -> None:
        """``value`` will be stored in the order of its dimensions."""
        self._recorded(value)  # others are laid out like it
        value.stride = contiguous(value.shape)
        self.moved[value] = _dense_steps(value, range(len(value.shape)))

    def put_back(self, value: Value, stride: tuple[int, ...]) -> None:
        """``value`` is stored as it was recorded after all, with this stride."""
        value.stride = stride
        self.moved.pop(value, None)

    def follow(self, value: Value, other: Value) -> None:
        """``value`` is stored as ``other`` is, which has its form."""
        if other in self.moved:
            self.straighten(value)

    def is_straight(self, value: Value) -> bool:
        """Whether ``value`` lies in the order of its dimensions without gaps, at every size of the call."""
        if value.is_constant:
            return value.stride == contiguous(value.shape)
        wanted = _dense_steps(value, range(len(value.shape)))
        return all(
            size is ONE or step == other for size, step, other in zip(value.sizes, self.of(value), wanted, strict=True)
        )

    def has_rows(self, value: Value) -> bool:
        """Whether neighbours along the last dimension are neighbours in memory, and rows in the order of dimensions."""
        dims = [d for d in order_of(self.of(value)) if value.sizes[d] is not ONE]
        return not dims or dims == sorted(dims) and self.of(value)[dims[-1]] == UNIT

    def forget(self, value: Value) -> None:
        """``value`` lies elsewhere from now on."""
        self._known.pop(value, None)

    def is_view_by_chance(self, operation: Operation) -> bool:
        """Whether a reshape copies at other sizes of the call: what it merges only lies well where there is one."""
        source = operation.inputs[0]
        steps = self._recorded(source)
        for group in views.aligned(operation):
            dims = [d for d in range(group.src0, group.src1) if source.sizes[d] is not ONE]
            for outer, inner in pairwise(dims):
                apart, wanted = steps[outer], steps[inner] * number(source.sizes[inner])
                ones = 1 in (source.shape[outer], source.shape[inner], *(size.value for size in apart.sizes))
                if apart != wanted and (ones or any(size.value == 1 for size in wanted.sizes)):
                    return True
        return False

    def _recorded(self, value: Value) -> Steps:
        """The strides that ``value`` had when it was recorded."""
        steps = self._known.get(value)
        if steps is None:
            found = self._view(value) if value.base is not None and value.origin is not None else None
            if value.is_constant:  # parts of one table, alike: the same arguments
                part = value.root, value.shape, value.stride
                steps = self._tables.get(part) or self._tables.setdefault(part, self._of_constant(value))
            elif value.origin is not None and value.origin.writes is not None:
                steps = self._checked(value, self._recorded(value.origin.writes))
            else:
                steps = self._checked(value, found or self._fresh(value))
            self._known[value] = steps
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

    def _fresh(self, value: Value) -> Steps:
        """Of memory without gaps, in whatever order its dimensions are.

        A stride of a dimension of 1 says little. What works on elements lays its result out like its first argument,
        and a convolution puts channels last where they are.
        """
        order = outermost_first(value.stride)
        operation = value.origin
        name = operation.traits.name if operation is not None and not operation.opaque else ""
        if 1 in value.shape and (name in ELEMENTWISE or name in static_sizes.CONVOLUTIONS):
            like = next((each for each in operation.inputs if _may_be_like(each, value)), None)
            steps = self._recorded(like) if like is not None else ()
            if steps and all(step.value or size is ONE for step, size in zip(steps, value.sizes, strict=True)):
                guess = order_of(steps)
                solid = [d for d in guess if value.shape[d] != 1]
                known = name in ELEMENTWISE or guess == [0, *range(2, len(guess)), 1]
                if known and solid == [d for d in order if value.shape[d] != 1]:
                    order = guess
        return _dense_steps(value, value.order or order)

    def _view(self, value: Value) -> Steps | None:
        operation = value.origin
        if operation.opaque or not operation.inputs or operation.writes is not None:
            return None
        source = operation.inputs[0]
        steps, name, rank = self._recorded(source), operation.traits.name, len(source.shape)
        if (order := views.permutation(operation, rank)) is not None:
            return tuple(steps[d] for d in order)
        if name in ("slice", "narrow", "chunk", "split", "split_with_sizes", "tensor_split"):
            stride = operation.args[4] if name == "slice" and len(operation.args) > 4 else 1
            return steps if stride == 1 else None
        if name == "unsqueeze":
            dim = operation.args[1] % (rank + 1)
            return (*steps[:dim], ZERO, *steps[dim:])
        if name in ("select", "unbind", "squeeze") and len(value.shape) == rank - 1:
            if name == "squeeze" and (len(operation.args) < 2 or not isinstance(operation.args[1], int)):
                return None
            dim = views.dimension(operation, 1, rank)
            return (*steps[:dim], *steps[dim + 1 :])
        if name in ("expand", "expand_as"):
            new = len(value.shape) - rank
            # a 1 of the model may be expanded at another size of the call
            grown = [
                n != m or size is ONE for n, m, size in zip(source.shape, value.shape[new:], source.sizes, strict=True)
            ]
            return (*([ZERO] * new), *(ZERO if new else step for new, step in zip(grown, steps, strict=True)))
        if name in views.RESHAPES:
            return self._reshaped(operation, steps)
        return steps if name in views.SAME else None

    def _reshaped(self, operation: Operation, steps: Steps) -> Steps:
        found: list[Number] = []
        source, value = operation.inputs[0], operation.outputs[0]
        for group in views.aligned(operation):
            solid = [d for d in range(group.src0, group.src1) if source.sizes[d] is not ONE]
            inner = steps[solid[-1]] if solid else ZERO
            run: list[Number] = []
            for d in reversed(range(group.out0, group.out1)):
                run.insert(0, inner)
                inner *= number(value.sizes[d])
            found += run
        return tuple(found)

    def _checked(self, value: Value, steps: Sequence[Number]) -> Steps:
        """``steps``, and where one is not the stride that was recorded, that stride by a name of its own."""
        if not value.numel:
            return tuple(steps)
        places = enumerate(zip(steps, value.stride, value.shape, strict=True))
        return tuple(
            step if n == 1 or step.value == stride else self._stride(value, d, step.factor) if stride else ZERO
            for d, (step, stride, n) in places
        )

    def _stride(self, value: Value, d: int, factor: int) -> Number:
        """A stride as an argument, but for ``factor`` where it divides it: a kernel reads several numbers at once."""
        stride = value.stride[d]
        factor = factor if factor and stride % factor == 0 else 1
        size = Size(stride // factor)
        self.strides[size] = value, d, factor
        return Number(factor, (size,))

    def _of_constant(self, value: Value) -> Steps:
        """Small steps are of the model (the pairs of a rotary table); larger ones are arguments, 0 for a single row."""
        steps: list[Number] = [ZERO] * len(value.shape)
        factor = 1
        for d in reversed(range(len(value.shape))):
            size, stride = value.sizes[d], value.stride[d]
            if size.value == 1:
                none = Size(0)
                self.strides[none] = value, d, 0
                steps[d] = Number(factor, (none,))
            elif d == 0 and len(value.shape) > 1 and value.numel == size.value:
                steps[d] = self._stride(value, d, 1)  # one number a picture, and there may be one picture
            elif stride and stride <= SMALL_STEP and stride % factor == 0:
                steps[d], factor = Number(stride), stride
                if size.static:
                    factor *= size.value
            else:
                steps[d] = self._stride(value, d, factor)
        return tuple(steps)


def _may_be_like(argument: Value, result: Value) -> bool:
    """Whether a result may be laid out like this argument: of its form, if for other channels and sides."""
    if argument.is_constant or len(argument.shape) != len(result.shape):
        return False
    return argument.shape == result.shape or result.origin.traits.name in static_sizes.CONVOLUTIONS


def order_of(steps: Steps) -> list[int]:
    """The dimensions from the outermost on, which is the same where some of them are 1."""
    return sorted(range(len(steps)), key=lambda d: (-steps[d].value, -len(steps[d].sizes), d))


def _dense_steps(value: Value, order: Sequence[int]) -> Steps:
    """Of memory without gaps whose dimensions lie in this order."""
    steps: list[Number] = [ZERO] * len(value.shape)
    step = UNIT
    for d in reversed(order):
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
    if operation is None or operation.opaque or operation.traits.name != "select":
        return None
    source = operation.inputs[0]
    dim = views.dimension(operation, 1, len(source.shape))
    step, start = steps_of(source)[dim], views.start(operation, value)
    if step != UNIT or not source.sizes[dim].static or source.shape[dim] > SMALL_STEP:
        return None
    return source, start


def lie_alike(shape: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """Whether both are where elements of this shape lie: the strides of dimensions of 1 say nothing."""
    return all(n == 1 or own == wanted for n, own, wanted in zip(shape, stride, other, strict=True))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of memory in order."""
    return dense(shape, range(len(shape)))


def outermost_first(stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions as they lie in memory by these strides, the outermost first."""
    return tuple(sorted(range(len(stride)), key=lambda d: (-stride[d], d)))


def dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of memory without gaps whose dimensions lie in this order, the outermost first."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d], step = step, step * max(shape[d], 1)
    return tuple(strides)


def copied(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy with this stride. Where that is 0, the elements must be the same."""
    out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    fill(out, tensor)
    return out


def fill(place: Tensor, tensor: Tensor) -> None:
    """Copies into ``place``. Where its stride is 0, the elements must be the same."""
    stride = place.stride()
    if 0 in stride:
        once = tuple([slice(None) if step else slice(0, 1) for step in stride])
        place, tensor = place[once], tensor[once]
    place.copy_(tensor)


@functools.lru_cache(maxsize=4096)
def lies_oddly(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a dimension of one element has a stride that new memory would not give it, or might not.

    What was changed in place keeps such a stride of a view that it was copied from. torch looks at it: by it, padding
    takes one picture for channels last or not. Where memory is in order, some operations give it the strides of new
    memory, and others (adding a number) keep the order that strides say.
    """
    if 1 not in shape:
        return False
    usual = kept = dense(shape, outermost_first(stride))
    if lie_alike(shape, stride, contiguous(shape)):
        usual = contiguous(shape)
    return any(n == 1 and not own == new == old for n, own, new, old in zip(shape, stride, usual, kept, strict=True))


def lying_so(
    func: Callable[..., Tensor], stride: tuple[int, ...], places: tuple[int, ...], apart: bool, *args: Any,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """What ``func`` gives, lying as a rule has chosen, or as recorded, whatever torch finds best.

    places: its dimensions of more than one element. apart: it was recorded as a copy, and must not be its argument
    itself now that this lies otherwise.
    """
    out = func(*args, **kwargs)
    if not isinstance(out, Tensor):  # a list of one
        return out
    own = out.stride()
    if apart and torch._C._is_alias_of(out, args[0]):
        return copied(out, stride)
    if own == stride:
        return out
    return out.as_strided(out.shape, stride) if all(own[d] == stride[d] for d in places) else copied(out, stride)


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``tensor`` with this stride."""
    return tensor if tensor.stride() == stride else copied(tensor, stride)


def spread_out(tensor: Tensor) -> Tensor:
    """``tensor`` with memory for each element: what lies once for several cannot be written one by one."""
    repeats = any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.contiguous() if repeats else tensor
