"""Looking a group up by its structure, before any source is made.

Two groups of the same operations differ in their values and in the sizes of the call, nothing else. The structure says
all that the source depends on: operations and how they hang together, dtypes, sizes of the model, how reshapes align,
and which sizes of the call are the same one. The kernel of the first such group serves the others with their sizes.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from . import views
from .codegen import Source, source
from .index import Number
from .kernels import Launch
from .layout import Layouts
from .terms import NoKernel
from .values import ONE, Operation, Size, Value, replaced

SHAPES_IN_RESULT = views.RESHAPES | {"expand", "expand_as", "repeat", "repeat_interleave"}


class _Structure:
    """Values and sizes of a group in an order that depends on its structure alone, and the structure as a key."""

    def __init__(self, outputs: Sequence[Value], inside: Mapping[Value, Operation], layouts: Layouts) -> None:
        self.values: dict[Value, int] = {}
        self.sizes: dict[Size, int] = {}
        self._lengths: dict[int, int] = {}  # sizes of the call that are equal: what may be simplified depends on it
        self._inside, self._layouts = inside, layouts
        parts: list[Any] = [(self._value(value), self._steps(value), value.order) for value in outputs]
        seen: set[int] = set()
        place, order = 0, list(outputs)
        while place < len(order):
            value = order[place]
            place += 1
            operation = inside.get(value)
            if operation is None:
                memory, start = layouts.memory(value)
                steps = self._steps(value), self._value(memory), start
                parts.append((self.values[value], value.is_constant, value.scalar(), steps))
            elif id(operation) not in seen:
                seen.add(id(operation))
                new = [each for each in operation.inputs if each not in self.values]
                parts.append(self._operation(operation))
                order += dict.fromkeys(new)
            else:
                continue
        self.large = any(value.is_large for value in self.values)
        self.key = self.large, *parts

    def _value(self, value: Value) -> tuple:
        if value in self.values:
            return (self.values[value],)
        self.values[value] = len(self.values)
        return self.values[value], value.dtype, tuple(self._size(size) for size in value.sizes)

    def _size(self, size: Size) -> int | tuple[int, int, bool]:
        """-1: ONE; a model's size by its value; a call's by its place among all, and among the different ones."""
        if size is ONE:
            return -1
        if size.static:
            self.sizes.setdefault(size, len(self.sizes))
            return size.value
        place = self.sizes.setdefault(size, len(self.sizes))
        return place, self._lengths.setdefault(size.value, len(self._lengths)), size.value == 1

    def _number(self, number: Number) -> tuple:
        return number.factor, tuple(sorted(self._size(size) for size in number.sizes))

    def _steps(self, value: Value) -> tuple:
        return tuple(self._number(step) for step in self._layouts.of(value))

    def _operation(self, operation: Operation) -> tuple:
        name = operation.traits.name
        outputs = tuple(self._value(value) for value in operation.outputs if value is not None)
        inputs = tuple(self._value(value) for value in operation.inputs)
        rest: Any
        if name in views.RESHAPES:
            rest = tuple(views.aligned(operation))
        elif name in SHAPES_IN_RESULT:
            rest = ()
        elif name in ("slice", "narrow", "select", "unbind"):
            source_ = operation.inputs[0]
            dim = views.dimension(operation, 1, len(source_.shape))
            starts = [views.start(operation, value) for value in operation.outputs]
            table, one = views.is_table_part(operation), name in ("select", "unbind")
            fixed = source_.sizes[dim].static and not table
            rest = (
                dim,
                table,
                [
                    start if fixed or not (start or one or table) else self._size(self._layouts.start(operation, start))
                    for start in starts
                ],
                operation.args[4:],
            )
        elif name in ("chunk", "split", "split_with_sizes"):
            rest = views.dimension(operation, 2, len(operation.inputs[0].shape))
        else:
            rest = replaced((operation.args, operation.kwargs), Value, lambda value: f"v{self.values[value]}")
        return operation.func, operation.kind, outputs, inputs, repr(rest)


_LOCK = threading.Lock()
_KNOWN: dict[tuple, Source | str] = {}  # a kernel with places in the structure, or why there is none


def planned(outputs: Sequence[Value], inside: Mapping[Value, Operation], layouts: Layouts) -> Launch:
    """The launch that computes ``outputs``. Raises ``NoKernel``."""
    structure = _Structure(outputs, inside, layouts)
    known = _KNOWN.get(structure.key)
    if isinstance(known, str):
        raise NoKernel(known)
    if known is None:
        try:
            made = source(outputs, inside, layouts, structure.large)
        except NoKernel as reason:
            with _LOCK:
                _KNOWN[structure.key] = str(reason)
            raise
        with _LOCK:
            _KNOWN[structure.key] = _numbered(made, structure)
        return Launch(made)
    return Launch(_filled(known, structure))


def _numbered(made: Source, structure: _Structure) -> Source:
    """``made`` with places in the structure instead of values and sizes."""
    values, sizes = structure.values, structure.sizes
    return dataclasses.replace(
        made,
        row_sizes=tuple(_place(size, sizes) for size in made.row_sizes),
        column_size=_place(made.column_size, sizes),
        operands=tuple(values[value] for value in made.operands),
        outputs=tuple(values[value] for value in made.outputs),
        integers=tuple(tuple(_place(size, sizes) for size in each) for each in made.integers),
    )


def _place(size: Size, sizes: dict[Size, int]) -> int | Size:
    """Sizes that the loops made themselves are of the model, and stay."""
    return size if size.static else sizes[size]


def _filled(known: Any, structure: _Structure) -> Source:
    values, sizes = list(structure.values), list(structure.sizes)

    def size(place: int | Size) -> Size:
        return sizes[place] if isinstance(place, int) else place

    return dataclasses.replace(
        known,
        row_sizes=tuple(size(each) for each in known.row_sizes),
        column_size=size(known.column_size),
        operands=tuple(values[each] for each in known.operands),
        outputs=tuple(values[each] for each in known.outputs),
        integers=tuple(tuple(size(each) for each in places) for places in known.integers),
    )
