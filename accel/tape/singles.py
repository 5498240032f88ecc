"""What one picture or one frame hides: a reshape that is a view only because something is one now.

At another size it copies. Then kernels read what was copied, and others than those of the first size would be needed.
So it copies at every size. That costs one more kernel where eager has none, of a single picture or frame.
"""

from collections.abc import Iterable

import torch

from . import group
from .layout import Layouts, contiguous
from .traits import aten, traits
from .values import Operation, Tape, Value, replaced

MAY_COPY = frozenset(("reshape", "flatten", "reshape_as"))
# Calls whose results lie the same way wherever their arguments lie.
STEADY = frozenset("linear addmm mm bmm matmul layer_norm rms_norm native_layer_norm".split())


def copy_what_others_copy(tape: Tape, layouts: Layouts) -> None:
    """Makes each reshape a copy that is one at other sizes of the call."""
    readers: dict[Value, list[Operation]] = {}
    for operation in tape.operations:
        for value in operation.inputs:
            readers.setdefault(value, []).append(operation)
    kept = {value.root for value in tape.outputs} | {
        operation.writes.root for operation in tape.operations if operation.writes is not None
    }
    for operation in tape.operations:
        if operation.opaque or traits(operation.func).name not in MAY_COPY:
            continue
        result = operation.outputs[0]
        if result.base is None or result.root in kept or not layouts.is_view_by_chance(operation):
            continue
        views = _views_of(result, readers)
        if views is not None:
            _copy(operation, views, layouts)


def _views_of(value: Value, readers: dict[Value, list[Operation]]) -> list[Operation] | None:
    """The views of ``value`` in order; None if somebody reads one of them who minds how it lies."""
    found: list[Operation] = []
    for operation in readers.get(value, ()):
        kind = group.classify(operation)
        if kind == group.VIEW:
            below = [_views_of(result, readers) for result in operation.outputs if result is not None]
            if any(each is None for each in below):
                return None
            found += [operation, *(view for each in below for view in each)]
        elif kind == group.CALL and (operation.opaque or traits(operation.func).name not in STEADY):
            return None
    return found


def _copy(operation: Operation, views: Iterable[Operation], layouts: Layouts) -> None:
    result = operation.outputs[0]
    operation.func, operation.kwargs = aten._reshape_copy.default, {}
    operation.args = (operation.inputs[0], list(result.shape))
    operation.inputs = operation.inputs[:1]
    result.base, result.stride = None, contiguous(result.shape)
    layouts.forget(result)
    for view in views:
        source = view.inputs[0]
        like = torch.empty_strided(source.shape, source.stride, dtype=source.dtype, device="meta")
        made = view.func(*replaced(view.args, Value, lambda value, like=like: like), **view.kwargs)
        for value, tensor in zip(view.outputs, made if isinstance(made, (tuple, list)) else (made,), strict=True):
            if value is not None:
                value.base, value.stride = result, tensor.stride()
                layouts.forget(value)
