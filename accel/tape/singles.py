"""Handles sizes of 1: an operation that copies at other sizes is a view, or nothing at all, for one picture or frame.

Then kernels would read the copy at one size and its source at another, and be different ones. So a reshape that is a
view only by chance copies at every size, which costs one more kernel for a single picture or frame. And a copy that
only closes gaps between rows, of which there are none in one row, is left out: kernels read across gaps. Of a lean tape
it stays, or it would keep what it copies a part of.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import group
from .layout import Layouts, contiguous
from .traits import aten
from .values import Operation, Readers, Tape, Value, replaced

CLOSING = frozenset(("contiguous", "clone"))
MAY_COPY = frozenset(("reshape", "flatten", "reshape_as"))
STEADY = frozenset("linear addmm mm bmm matmul layer_norm rms_norm native_layer_norm".split())


@dataclass
class Single:
    """What was done to an operation: it copies now, or it is left out. func: what it was; views: what moved with it."""

    operation: Operation
    func: Any
    copied: bool
    views: list[Operation]

    @property
    def moved(self) -> list[Value]:
        """The values that lie elsewhere now."""
        return [value for each in (self.operation, *self.views) for value in each.outputs if value is not None]


def copy_what_others_copy(tape: Tape, layouts: Layouts) -> list[Single]:
    """Makes each reshape a copy that is one at other sizes of the call; what was done."""
    done: list[Single] = []
    readers = tape.readers()
    kept = {value.root for value in tape.outputs} | {
        operation.writes.root for operation in tape.operations if operation.writes is not None
    }
    for operation in tape.operations:
        if operation.opaque or not operation.outputs or operation.outputs[0] is None:
            continue
        name, result = operation.traits.name, operation.outputs[0]
        if result.root in kept or name not in MAY_COPY | CLOSING:
            continue
        if name in MAY_COPY and result.base is not None and layouts.is_view_by_chance(operation):
            views = _views_of(result, readers, True)
            if views is not None:
                done.append(Single(operation, operation.func, True, views))
                _copy(operation, views, layouts)
        elif name in CLOSING and tape.lean and result.numel < operation.inputs[0].root.numel:
            continue  # a part is copied so that the whole can be freed
        elif name in CLOSING and _closes_gaps(operation) and operation.inputs[0].root not in kept:
            views = _views_of(result, readers, False)
            func = operation.func
            if views is not None and _leave_out(operation, views, layouts):
                done.append(Single(operation, func, False, views))
    return done


def again(operation: Operation, copied: bool, views: list[Operation]) -> bool:
    """Does at another size what was done to an operation and its views; whether it could be done."""
    if copied:
        _copy(operation, views, Layouts())
        return True
    return _closes_gaps(operation) and _leave_out(operation, views, Layouts())


def is_steady(operation: Operation) -> bool:
    """Whether a call's results lie the same way wherever its arguments lie."""
    return not operation.opaque and operation.traits.name in STEADY


def _closes_gaps(operation: Operation) -> bool:
    """Whether it copies rows to the next row, and changes neither their order nor what is in them."""
    source, result = operation.inputs[0], operation.outputs[0]
    if result.base is not None or source.is_constant or operation.kwargs or len(operation.args) > 1:
        return False
    solid = [stride for n, stride in zip(source.shape, source.stride, strict=True) if n != 1]
    return 0 not in solid and solid[-1:] == [1] and source.shape[-1] != 1 and solid == sorted(solid, reverse=True)


def _views_of(value: Value, readers: Readers, calls: bool) -> list[Operation] | None:
    """The views of ``value`` in order; None if somebody reads one of them who minds how it lies.

    calls: whether calls may read it, of the kind that does not mind.
    """
    found: list[Operation] = []
    for operation in readers.get(value, ()):
        if operation.inputs[0] is not value and group.is_view(operation):
            continue  # it wants the shape alone: ``expand_as``
        kind = group.classify(operation)
        if kind == group.VIEW:
            below = [_views_of(result, readers, calls) for result in operation.outputs if result is not None]
            if any(each is None for each in below):
                return None
            found += [operation, *(view for each in below for view in each)]
        elif kind == group.CALL and not (calls and is_steady(operation)):
            return None
    return found


def _copy(operation: Operation, views: Iterable[Operation], layouts: Layouts) -> None:
    result = operation.outputs[0]
    operation.func, operation.kwargs = aten._reshape_copy.default, {}
    operation.args = (operation.inputs[0], list(result.shape))
    operation.inputs = operation.inputs[:1]
    strides = strides_below(result, contiguous(result.shape), views)
    assert strides is not None, "memory in order can be viewed in any way"
    _move(result, None, strides, layouts)


def _leave_out(operation: Operation, views: Iterable[Operation], layouts: Layouts) -> bool:
    source, result = operation.inputs[0], operation.outputs[0]
    strides = strides_below(result, source.stride, views)
    if strides is None:
        return False
    operation.func, operation.args = aten.alias.default, (source,)
    _move(result, source.root, strides, layouts)
    return True


def _move(result: Value, base: Value | None, strides: dict[Value, tuple[int, ...]], layouts: Layouts) -> None:
    for value, stride in strides.items():
        value.base, value.stride = result if base is None else base, stride
        layouts.forget(value)
    result.base = base


def strides_below(
    result: Value, stride: tuple[int, ...], views: Iterable[Operation]
) -> dict[Value, tuple[int, ...]] | None:
    """The strides of ``result`` and of views of it, if it has this one; None if one of them would be a copy."""
    found = {result: stride}
    for view in views:
        source = view.inputs[0]
        like = torch.empty_strided(source.shape, found[source], dtype=source.dtype, device="meta")
        try:
            made = view.func(*replaced(view.args, Value, lambda value, like=like: like), **view.kwargs)
        except RuntimeError:  # torch's word for it
            return None
        for value, tensor in zip(view.outputs, made if isinstance(made, (tuple, list)) else (made,), strict=True):
            if value is not None:
                found[value] = tensor.stride()
                if not torch._C._is_alias_of(tensor, like):
                    return None
    return found
