"""A join of what one operation makes of the parts of a tensor is what it makes of the whole tensor.

Models modulate text and picture with a call for each, or norm a few frames at a time. What works on each element, or on
each row or picture by itself, computes the same numbers from the whole: in one kernel, and without a join. Numbers that
differ from part to part are joined instead, each as long as its part: a kernel looks up which one it needs. Exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .. import pointwise, views
from ..layout import dense, outermost_first
from ..rows import MAX_JOINED
from ..terms import FLOATS
from ..traits import aten
from ..values import Operation, Readers, Tape, Value, values_in
from .edits import lay, made_of, prune
from .memory import MOST

Make = Callable[[list[Operation]], Value]  # makes a value; adds the operations that it takes
COPIES = frozenset("clone contiguous to _to_copy float".split())
ROWS, PICTURES = frozenset(("layer_norm", "rms_norm")), "group_norm"  # norms of each row, of each picture


def put_together(tape: Tape) -> str:
    """Every join whose parts are made alike of the parts of one tensor. Exact."""
    if not any(map(is_join, tape.operations)):
        return ""
    search, changed = _Search(tape), False
    operations: list[Operation] = []
    for operation in tape.operations:
        make = search.of_join(operation) if is_join(operation) else None
        if make is not None:
            changed = True
            whole, result = make(operations), operation.outputs[0]
            made = operations[-1] if operations else None
            if made is not None and made.outputs == [whole]:
                operations.pop()
            else:
                made = Operation(aten.clone.default, (whole,), {}, [whole])
            operation.func, operation.args, operation.kwargs = made.func, made.args, made.kwargs
            operation.inputs, operation.like, result.order = made.inputs, None, None
            lay(result, result.stride)
        operations.append(operation)
    if changed:
        tape.operations[:] = operations
        prune(tape)
    return ""


def is_join(operation: Operation) -> bool:
    """Whether it joins several tensors."""
    return not operation.opaque and operation.func is aten.cat.default and len(operation.args[0]) > 1


@dataclass(frozen=True)
class _Found:
    """What stands for one argument of all parts. is_whole: a tensor that was cut into parts, or made of one."""

    make: Make | None  # None: ``plain`` itself
    plain: Any = None
    is_whole: bool = False


class _Search:
    """Looks for the whole of some parts."""

    def __init__(self, tape: Tape) -> None:
        self._tape, self._given_back = tape, set(tape.outputs)
        self._written = {operation.writes.root for operation in tape.operations if operation.writes is not None}

    @cached_property
    def _readers(self) -> Readers:
        return self._tape.readers()  # few tapes need them

    def of_join(self, operation: Operation) -> Make | None:
        """How the result of a join is made without it; None if it is not that simple."""
        parts = operation.args[0]
        dim = views.dimension(operation, 1, len(operation.outputs[0].shape))
        return self._made_alike(parts, dim)

    def _made_alike(self, parts: Sequence[Value], dim: int) -> Make | None:
        """How the whole of ``parts``, which lie side by side along ``dim``, is made by what makes each of them."""
        makers = [part.origin for part in parts]
        first = makers[0]
        if first is None or not _works_by_itself(first, dim) or any(not _is_like(maker, first) for maker in makers):
            return None
        if not all(map(self._is_alone, parts)):
            return None
        if any(value.root in self._written for maker in makers if maker is not None for value in maker.inputs):
            return None
        arguments = zip(*(maker.args for maker in makers if maker is not None), strict=True)
        by_element = first.traits.name not in ROWS | {PICTURES}
        found = [
            self._argument(each, parts, dim) if by_element or not place else _same(each)
            for place, each in enumerate(arguments)
        ]
        if any(each is None for each in found) or not any(each.is_whole for each in found if each is not None):
            return None
        if first.traits.name in COPIES and parts[0].dtype == first.inputs[0].dtype:
            return found[0].make if found[0] is not None else None

        def make(added: list[Operation]) -> Value:
            args = tuple([each.plain if each.make is None else each.make(added) for each in found if each is not None])
            operation = Operation(first.func, args, dict(first.kwargs), list(values_in(args)))
            return _made(operation, parts[0], _length(parts, dim), added)

        return make

    def _is_alone(self, part: Value) -> bool:
        """Whether only one operation reads it."""
        return len(self._readers.get(part, ())) == 1 and part not in self._given_back

    def _argument(self, items: Sequence[Any], parts: Sequence[Value], dim: int) -> _Found | None:
        first = items[0]
        if not all(isinstance(item, Value) for item in items):
            fixed = not any(values_in(items)) and all(type(item) is type(first) and item == first for item in items)
            return _Found(None, first) if fixed else None
        place = dim - len(parts[0].shape) + len(first.shape)
        if all(item is first for item in items) and (place < 0 or first.shape[place] == 1):
            return _Found(None, first)
        forms = {(item.dtype, item.device, len(item.shape), *_without(item.shape, place)) for item in items}
        if len(forms) > 1:
            return None
        lengths = [part.shape[dim] for part in parts]
        if place >= 0 and [item.shape[place] for item in items] == lengths:
            whole = _cut_from(items, place)
            if whole is not None:
                return _Found(None, whole, is_whole=True)
            make = self._made_alike(items, place)
            if make is not None:
                return _Found(make, is_whole=True)
            return _Found(lambda added: _joined(items, place, added)) if _may_join(items) else None
        if (place >= 0 and any(item.shape[place] != 1 for item in items)) or not _may_join(items):
            return None
        return _Found(lambda added: _spread(items, lengths, dim - len(parts[0].shape), added))


def _same(items: Sequence[Any]) -> _Found | None:
    """What all parts have in common."""
    first = items[0]
    same = all(item is first if isinstance(first, Value) else item == first for item in items)
    return _Found(None, first) if same else None


def _is_like(maker: Operation | None, first: Operation) -> bool:
    """Whether it is the same operation with the same settings, if on other values."""
    if maker is None or maker.opaque or maker.writes is not None or maker.func is not first.func:
        return False
    return len(maker.args) == len(first.args) and maker.kwargs == first.kwargs and maker.outputs[0].base is None


def _works_by_itself(operation: Operation, dim: int) -> bool:
    """Whether what it makes of one place along ``dim`` depends on nothing else along it."""
    if operation.opaque or operation.writes is not None or len(operation.outputs) != 1:
        return False
    if any(values_in(operation.kwargs)):
        return False
    name, args = operation.traits.name, operation.args
    if name in ROWS:
        return dim < len(operation.outputs[0].shape) - len(args[1])
    if name == PICTURES:
        return dim == 0
    if name in COPIES:
        return len(operation.inputs) == 1
    return name != "copy" and pointwise.simple(name, operation.func._overloadname, args, operation.kwargs) is not None


def _cut_from(parts: Sequence[Value], dim: int) -> Value | None:
    """The tensor that was cut into just these parts along ``dim``, in this order."""
    sources, place = set(), 0
    for part in parts:
        source, start = _source(part, dim)
        sources.add(source)
        if start != place:
            return None
        place += part.shape[dim]
    return sources.pop() if len(sources) == 1 and place == source.shape[dim] else None


def _source(part: Value, dim: int) -> tuple[Value, int]:
    """(what a slice was cut from, where it begins there)."""
    start = 0
    while (operation := part.origin) is not None and not operation.opaque and part.base is not None:
        if not operation.inputs or len(operation.inputs[0].shape) != len(part.shape):
            break
        piece = views.part(operation, part)
        if piece is None or piece[0] != dim:
            break
        start += piece[1]
        part = operation.inputs[0]
    return part, start


def _may_join(items: Sequence[Value]) -> bool:
    """Whether a kernel can hold a join of them."""
    return len(items) <= MOST and items[0].dtype in FLOATS


def _without(shape: tuple[int, ...], place: int) -> tuple[int, ...]:
    return shape if place < 0 else (*shape[:place], 1, *shape[place + 1 :])


def _length(parts: Sequence[Value], dim: int) -> tuple[int, ...]:
    shape = parts[0].shape
    return (*shape[:dim], sum(part.shape[dim] for part in parts), *shape[dim + 1 :])


def _made(operation: Operation, like: Value, shape: tuple[int, ...], added: list[Operation]) -> Value:
    """The result of a new operation: of this shape, and laid out like a part."""
    stride = dense(shape, outermost_first(like.stride))
    value = Value.made(shape, stride, like.dtype, like.device)
    value.origin, operation.outputs = operation, [value]
    lay(value, stride)
    added.append(operation)
    return value


def _joined(items: Sequence[Value], dim: int, added: list[Operation]) -> Value:
    """The join of ``items``; of several joins, where they are more than a kernel holds in one."""
    while len(items) > 1:
        runs = [list(items[place : place + MAX_JOINED]) for place in range(0, len(items), MAX_JOINED)]
        items = [_join(run, dim, added) if len(run) > 1 else run[0] for run in runs]
    return items[0]


def _join(items: list[Value], dim: int, added: list[Operation]) -> Value:
    operation = Operation(aten.cat.default, (items, dim), {}, items)
    return _made(operation, items[0], _length(items, dim), added)


def _spread(items: Sequence[Value], lengths: Sequence[int], dim: int, added: list[Operation]) -> Value:
    """The join of ``items``, each repeated as often as its part is long. dim: counted from the last one."""
    found = []
    for item, length in zip(items, lengths, strict=True):
        shape = [*(1,) * (-dim - len(item.shape)), *item.shape]
        shape[dim] = length
        long = item.part(tuple(shape), ())
        long.origin = Operation(aten.expand.default, (item, shape), {}, [item], [long])
        long.stride, long.order = made_of(long.origin).stride(), None
        added.append(long.origin)
        found.append(long)
    return _joined(found, len(shape) + dim, added)
