"""Keeps pictures and videos channels-last in memory, from the first convolution to the last.

There cuDNN has its fastest kernels, tokens are a view of a picture, and GroupNorm reads memory in one direction. The
recorded forward has channels first. This goes through the tape once and says how each value lies instead: results of
convolutions and norms channels last, what is computed element by element of them likewise, views as torch makes them of
such memory. A copy that only turned pictures into rows, or rows into pictures, becomes a view. Whoever minds, and what
the forward gives back, gets a copy that lies as it was recorded.

Weights of convolutions may lie channels last as well (``Tape.permuted``): who runs the program sees to that.
"""

import math
from typing import Any

import torch

from ...kernels import operations as ours
from .. import views
from ..layout import contiguous, dense, outermost_first
from ..singles import is_steady
from ..traits import ELEMENTWISE, aten, by_name
from ..values import Operation, Tape, Value, Weight, replaced
from . import edits

LESS_EXACT = (
    "Convolutions run with channels last in memory, where cuDNN takes other algorithms: their sums are in another "
    "order, and as exact. GroupNorm sums in float32 in another order than PyTorch's kernel, and as exactly"
)
CONVOLUTIONS = (aten.conv2d.default, aten.conv3d.default, aten.cudnn_convolution.default)
FEWEST = 4  # convolutions: a model that only cuts its picture into patches has one or two
RANKS = (4, 5)  # of pictures [N, C, H, W] and videos [N, C, T, H, W]
ORDER = (0, 2, 3, 1)  # of pictures
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
JOINS = frozenset(("cat", "stack"))
# They keep their arguments' layout, or are made to.
ALIKE = ELEMENTWISE | JOINS | {"clone", "to", "_to_copy", "float", "type_as"}
RESAMPLED = frozenset("upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d avg_pool2d max_pool2d".split())
PADS = frozenset(("pad", "constant_pad_nd"))
GATHERED = ("replicate", "reflect")  # what pads are made of


def lay_out(tape: Tape) -> str:
    """Convolutions and GroupNorms of pictures and videos, and all between them. Sums in another order than eager."""
    if sum(map(_is_convolution, tape.operations)) < FEWEST:
        return ""
    written = (operation.writes.root for operation in tape.operations if operation.writes is not None)
    if any(len(value.shape) > 3 for value in written):  # whoever looks at that memory must see it
        return ""
    _Pass(tape).run()
    return LESS_EXACT


def _is_convolution(operation: Operation) -> bool:
    if operation.opaque or operation.func not in CONVOLUTIONS or len(operation.args) < 2:
        return False
    x, weight = operation.args[:2]
    return len(x.shape) == len(weight.shape) and x.dtype in FLOATS and weight.dtype == x.dtype and x.numel > 0


def _is_norm(operation: Operation) -> bool:
    if operation.opaque or operation.func is not aten.group_norm.default:
        return False
    x = operation.args[0]
    return len(x.shape) in RANKS and x.dtype in FLOATS and x.numel > 0


def last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of pictures [N, C, H, W] or videos [N, C, T, H, W] with channels last."""
    return dense(shape, _order(len(shape)))


def _order(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def _is_pixel(value: Value) -> bool:
    """Whether it has one pixel, and its strides do not say how it lies: torch takes it for either."""
    return math.prod(value.shape[2:]) == 1


class _Pass:
    """One walk through a tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._found: list[Operation] = []
        self._recorded: dict[Value, tuple[int, ...]] = {}  # strides of what lies elsewhere, or otherwise, by now
        self._last: set[Value] = set()  # pictures and videos with channels last
        self._copies: dict[Value, Value] = {}  # as they were recorded
        self._forms: dict[tuple, Any] = {}

    def run(self) -> None:
        """Rewrites the tape."""
        tape, loose = self._tape, set()
        for operation in tape.operations:
            if _is_convolution(operation):
                self._convolution(operation)
            elif _is_norm(operation):
                self._norm(operation)
            else:
                self._follow(operation)
            self._found.append(operation)
        given_back = {value: self._restored(value) for value in tape.outputs if value in self._recorded}
        tape.output = replaced(tape.output, Value, lambda value: given_back.get(value, value))
        for operation in self._found:
            if operation.func in ours.CONVOLUTIONS and isinstance(operation.args[1].leaf, Weight):
                tape.permuted.add(operation.args[1])
        for operation in self._found:
            if operation.func not in ours.CONVOLUTIONS:
                loose.update(operation.inputs)
        tape.permuted -= loose
        tape.operations[:] = self._found

    # Operations that there is another one for ---------------------------------------------------------------------

    def _convolution(self, operation: Operation) -> None:
        given = by_name(operation.func, operation.args, operation.kwargs)
        x, weight, bias = *operation.args[:2], given.get("bias")
        sides = len(x.shape) - 2
        lists = [given.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
        args = (x, weight, bias, *(_for_each(side, sides) for side in lists), given.get("groups", 1))
        by_cudnn = operation.func is aten.cudnn_convolution.default
        func, args = (ours.conv2d_last, args) if sides == 2 else (ours.conv3d_last, (*args, by_cudnn))
        edits.become(operation, func, args, (x, weight, bias))
        self._lies_last(operation.outputs[0], x)

    def _norm(self, operation: Operation) -> None:
        given = dict(zip(("x", "groups", "weight", "bias", "eps"), operation.args, strict=False)) | operation.kwargs
        x, weight, bias, groups = (
            operation.args[0],
            given.get("weight"),
            given.get("bias"),
            given.get("num_groups", given.get("groups")),
        )
        args = (x, weight, bias, groups, given.get("eps", 1e-5), None, False, [])
        edits.become(operation, ours.group_norm_last, args, (x, weight, bias))
        self._lies_last(operation.outputs[0], x)

    def _lies_last(self, value: Value, source: Value) -> None:
        """``value``, which is made of ``source``. A recorded picture of one pixel lay as its source did."""
        stride = last(value.shape)
        as_source = _is_pixel(value) and self._recorded.get(source, source.stride) == last(source.shape)
        self._recorded.setdefault(value, stride if as_source else value.stride)
        value.stride, value.order = stride, _order(len(value.shape))
        self._last.add(value)

    # All others ---------------------------------------------------------------------------------------------------

    def _follow(self, operation: Operation) -> None:
        name = "" if operation.opaque else operation.traits.name
        if _turns_rows(operation, name) and self._is_last(operation.inputs[0]):
            self._alias(operation)
            return
        if not any(value in self._recorded for value in operation.inputs):
            return
        known = not operation.opaque and operation.func._schema.name.startswith("aten::")
        if operation.writes is not None or not known:
            self._as_recorded(operation)
        elif operation.traits.view or (operation.traits.maybe_view and name not in ALIKE):
            self._view(operation)
        elif name in ALIKE and len(operation.outputs) == 1 and (name != "stack" or _stacks_sides(operation)):
            self._alike(operation, operation.outputs[0])
        elif name in PADS and _mode(operation) in GATHERED and operation.inputs[0] in self._last:
            x, pad = operation.inputs[0], by_name(operation.func, operation.args, operation.kwargs)["pad"]
            edits.become(operation, ours.pad_last, (x, list(pad), _mode(operation)), (x,))
            self._lies_last(operation.outputs[0], x)
        elif _keeps_layout(operation, name) and len(operation.outputs) == 1 and operation.inputs[0] in self._last:
            self._lies_last(operation.outputs[0], operation.inputs[0])
        elif not is_steady(operation):
            self._as_recorded(operation)

    def _is_last(self, value: Value) -> bool:
        """Whether pictures lie with channels last: some were turned, others are rows by another name."""
        if value in self._last:
            return True
        operation = value.origin
        rank = len(value.shape)
        if operation is None or operation.opaque or rank not in RANKS:
            return False
        rows = operation.inputs[0]
        straight = rows not in self._recorded and rows.stride == contiguous(rows.shape)
        return straight and views.permutation(operation, rank) == [0, rank - 1, *range(1, rank - 1)]

    def _alias(self, operation: Operation) -> None:
        """A copy that put channels first is none."""
        source, output = operation.inputs[0], operation.outputs[0]
        edits.become(operation, aten.alias.default, (source,), (source,))
        self._recorded.setdefault(output, output.stride)
        output.stride, output.base = source.stride, source.root
        self._last.add(output)

    def _alike(self, operation: Operation, output: Value) -> None:
        """Element by element: its result lies as the pictures that it is made of."""
        joins = operation.traits.name in JOINS
        made_of = [v for v in operation.inputs if v in self._last and (joins or v.shape == output.shape)]
        if output.base is not None:  # ``to`` of what has that dtype already
            self._view(operation)
        elif made_of and (len(output.shape) in RANKS or operation.traits.name == "stack"):
            self._lies_last(output, made_of[0])
        else:
            output.order = outermost_first(output.stride)

    def _view(self, operation: Operation) -> None:
        """A view, or what is one of some memory, as torch makes it of the memory that there is."""
        form = edits.form_of(operation)
        if form not in self._forms:
            self._forms[form] = _made(operation)
        made = self._forms[form]
        if made is None:
            self._as_recorded(operation)
            return
        source = operation.inputs[0]
        stayed = _is_pixel(source) and self._recorded.get(source) == source.stride
        for output, (stride, shares) in zip(operation.outputs, made, strict=True):
            base = source.root if shares else None
            if not stayed and (stride != output.stride or base is not output.base):
                self._recorded.setdefault(output, output.stride)
            output.stride, output.base = stride, base
        if source in self._last and operation.traits.name in views.SAME:
            self._last.update(operation.outputs)
        else:
            self._last.update(output for output in operation.outputs if output in self._recorded and _is_part(output))

    def _as_recorded(self, operation: Operation) -> None:
        """An operation that gets what it got when it was recorded."""
        edits.replace_inputs(
            operation, {value: self._restored(value) for value in operation.inputs if value in self._recorded}
        )

    def _restored(self, value: Value) -> Value:
        """A copy of ``value`` that lies as it was recorded."""
        stride = self._recorded[value]
        if stride == value.stride:
            return value
        copy = self._copies.get(value)
        if copy is None:
            copy = self._copies[value] = Value.made(value.shape, stride, value.dtype, value.device)
            copy.order = outermost_first(stride)
            copy.stride = dense(value.shape, copy.order)
            copy.origin = Operation(
                aten.clone.default, (value,), {"memory_format": torch.contiguous_format}, [value], [copy]
            )
            self._found.append(copy.origin)
        return copy


def _is_part(value: Value) -> bool:
    """Whether a view lies as pictures or videos with channels last, some of them left out perhaps."""
    if len(value.shape) not in RANKS or value.shape[1] == 1 or value.stride[1] != 1:
        return False
    steps = [value.stride[d] for d in _order(len(value.shape)) if value.shape[d] != 1]
    return steps == sorted(steps, reverse=True) and 0 not in steps


def _stacks_sides(operation: Operation) -> bool:
    """Whether videos are stacked along a side: behind their channels."""
    rank = len(operation.outputs[0].shape)
    return rank == max(RANKS) + 1 and views.dimension(operation, 1, rank) > 1


def _for_each(numbers: Any, sides: int) -> list[int]:
    found = [numbers] if isinstance(numbers, int) else list(numbers)
    return found * sides if len(found) == 1 else found


def _turns_rows(operation: Operation, name: str) -> bool:
    """Whether it copies pictures so that channels come first."""
    if name not in ("contiguous", "clone") or operation.writes is not None or operation.outputs[0].base is not None:
        return False
    wanted = operation.kwargs.get("memory_format", torch.contiguous_format if name == "contiguous" else None)
    return wanted is torch.contiguous_format and len(operation.args) == 1 and len(operation.inputs[0].shape) in RANKS


def _keeps_layout(operation: Operation, name: str) -> bool:
    """Whether torch's kernel gives what lies as its argument does, though of other sides."""
    return name in RESAMPLED or (name in PADS and _mode(operation) == "constant")


def _mode(pad: Operation) -> str:
    return by_name(pad.func, pad.args, pad.kwargs).get("mode", "constant")


def _made(operation: Operation) -> list[tuple[tuple[int, ...], bool]] | None:
    """(stride, whether it shares its argument's memory) of each result; None if torch makes no such view."""
    values = operation.inputs
    like = {value: value.empty("meta") for value in values}
    args, kwargs = replaced((operation.args, operation.kwargs), Value, like.__getitem__)
    kwargs.pop("device", None)
    try:
        with torch.inference_mode():
            made = operation.func(*args, **kwargs)
    except (RuntimeError, ValueError):  # torch's words for it
        return None
    made = made if isinstance(made, (tuple, list)) else (made,)
    return [(each.stride(), torch._C._is_alias_of(each, like[values[0]])) for each in made]
