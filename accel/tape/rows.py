"""Lines of a kernel that need whole rows, or several parts: norms and means, pairs of neighbours, joins."""

import torch

from . import views
from .index import NOTHING, UNIT, Digit, Index, Number, at, number
from .kernel_lines import KernelLines
from .terms import Indices, Mask, NoKernel, Term
from .values import Operation, Value

MAX_JOINED = 4
LENGTH = "linalg_vector_norm"
MEAN_DIMS, LENGTH_DIMS = 1, 2  # the argument that says what is summed


def joined(kernel: KernelLines, operation: Operation, name: str, value: Value, index: Indices, mask: Mask) -> Term:
    """``cat`` or ``stack``: of the parts, the one that lies there."""
    parts = operation.args[0]
    if len(parts) > MAX_JOINED:
        raise NoKernel("a join of many parts")
    d = views.dimension(operation, 1, len(value.shape))
    place, start, result = index[d], NOTHING, None
    for part in parts:
        length = UNIT if name == "stack" else number(part.sizes[d])
        end = start + at(length)
        lies = _lies(place, start, end)
        if lies is False:  # its rows would be read beside its memory
            start = end
            continue
        condition = None if lies else _between(kernel, place, start, end)
        inner = Mask((*mask.conditions, condition)) if condition else mask
        if name == "stack":
            shifted = index[:d] + index[d + 1 :]
        else:
            back = Index((), tuple(Number(-o.factor, o.sizes) for o in start.offsets))
            shifted = (*index[:d], place + back, *index[d + 1 :])
        term = kernel.value(part, shifted, inner)
        if result is None or condition is None:
            result = term
        else:
            axes = condition.axes | term.axes | result.axes
            result = kernel.let(f"tl.where({condition.name}, {term.name}, {result.name})", axes)
        start = end
    if result is None:  # a join around this one asks for what it never gives
        return kernel.let("c * 0.0", frozenset("c"))
    return kernel.rounded(result, value.dtype)


def _lies(place: Index, start: Index, end: Index) -> bool | None:
    """Whether ``place`` lies from ``start`` to ``end``; None if that differs by column, row or size."""
    span, first, behind = place.span, start.span, end.span
    if span is None or first is None or behind is None:
        return None
    if span.stop <= first.start or span.start >= behind.start:
        return False
    return True if first.start <= span.start and span.stop <= behind.start else None


def _between(kernel: KernelLines, place: Index, start: Index, end: Index) -> Term:
    text, axes = kernel.text(place), kernel.axes(place)
    low = f"({text} >= {kernel.text(start)}) & " if start.offsets else ""
    key = "between", place, start, end
    if key not in kernel.memo:
        kernel.memo[key] = kernel.let(f"{low}({text} < {kernel.text(end)})", axes)
    return kernel.memo[key]


def _whole(mask: Mask) -> Mask:
    """Where whole rows are asked for: a sum needs all of a row, whichever part of it a join takes."""
    whole = mask.of_rows()
    if whole is None:
        raise NoKernel("a sum of rows in a join of parts of rows")
    return whole


def whole_row(
    kernel: KernelLines, source: Value, lead: Indices, mask: Mask, dim: int = -1
) -> tuple[Term, frozenset[str]]:
    """All of a row of ``source``, zero beyond its end, and the axes of the block that it lies along.

    dim: the dimension that rows lie along. lead: the index without it.
    """
    dim %= len(source.sizes)
    width = source.sizes[dim]
    if any("c" in kernel.axes(place) for place in lead) or not width.static:
        raise NoKernel("a sum along something else than the columns")
    columns, tile = kernel.column.size, kernel.tile
    place = Index(((UNIT, Digit(kernel.column, 1, columns.value)),))
    masks, axes = "cmask", frozenset("c")
    if tile is not None and tile.size.static and width.value == tile.size.value * columns.value:
        if "r" in mask.axes or any("r" in kernel.axes(place) for place in lead):
            raise NoKernel("a sum along rows as well")
        place = Index(((Number(columns.value), Digit(tile, 1, tile.size.value)), *place.terms))
        masks, axes = "cmask & rmask", frozenset("cr")
    elif width.value != columns.value:
        raise NoKernel("rows of several lengths")
    kernel.reduces = True
    term = kernel.value(source, (*lead[:dim], place, *lead[dim:]), mask)
    return kernel.let(f"tl.where({masks}, {term.name}, 0.0)", term.axes | axes), axes


def reduced(function: str, text: str, axes: frozenset[str]) -> str:
    """``function``, of Triton, of a block along these axes."""
    return f"{function}({function}({text}, axis=1), axis=0)" if "r" in axes else f"{function}({text}, axis=1)[:, None]"


def _sum(text: str, axes: frozenset[str]) -> str:
    return reduced("tl.sum", text, axes)


def norm(kernel: KernelLines, operation: Operation, name: str, index: Indices, mask: Mask) -> Term:
    """A norm over the last dimension."""
    args, kwargs = operation.args, operation.kwargs
    source, width = args[0], args[1]
    if len(width) != 1:
        raise NoKernel("a norm over several dimensions")
    layer = name == "layer_norm"
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    bias = (args[3] if len(args) > 3 else kwargs.get("bias")) if layer else None
    eps = args[4 if layer else 3] if len(args) > (4 if layer else 3) else kwargs.get("eps", 1e-5 if layer else None)
    if eps is None:
        eps = torch.finfo(torch.float32).eps  # as torch's kernel, whatever the dtype of its input
    lead, whole = index[:-1], _whole(mask)
    key = "norm", operation.outputs[0], lead, whole
    if key not in kernel.memo:
        kernel.memo[key] = _moments(kernel, source, lead, whole, width[0], eps, layer)
    mean, scale = kernel.memo[key]
    x = kernel.value(source, index, mask)
    axes = x.axes | scale.axes
    text = f"({x.name} - {mean.name}) * {scale.name}" if mean is not None else f"{x.name} * {scale.name}"
    term, near = kernel.let(text, axes), mask.along(kernel.axes(index[-1]))
    for parameter, sign in ((weight, "*"), (bias, "+")):
        if parameter is not None:
            other = kernel.value(parameter, (index[-1],), near)
            term = kernel.let(f"{term.name} {sign} {other.name}", term.axes | other.axes)
    return term


def _moments(
    kernel: KernelLines, source: Value, lead: Indices, mask: Mask, width: int, eps: float, centred: bool
) -> tuple[Term | None, Term]:
    x, along = whole_row(kernel, source, lead, mask)
    axes = x.axes - along
    mean = None
    if centred:
        mean = kernel.let(f"{_sum(x.name, along)} / {width}", axes)
        masks = "cmask & rmask" if "r" in along else "cmask"
        x = kernel.let(f"tl.where({masks}, {x.name} - {mean.name}, 0.0)", x.axes)
    return mean, kernel.let(f"tl.rsqrt({_sum(f'{x.name} * {x.name}', along)} / {width} + {eps!r})", axes)


def summed(operation: Operation) -> int:
    """The dimension that a norm, a mean or a length sums along."""
    name, rank = operation.traits.name, len(operation.args[0].shape)
    dims = operation.args[MEAN_DIMS if name == "mean" else LENGTH_DIMS] if name in ("mean", LENGTH) else (-1,)
    return dims[0] % rank


def mean(kernel: KernelLines, operation: Operation, index: Indices, mask: Mask) -> Term:
    """The mean along a dimension."""
    x, along, key = _summed(kernel, operation, index, mask)
    if key not in kernel.memo:
        width = operation.args[0].shape[summed(operation)]
        kernel.memo[key] = kernel.let(f"{_sum(x.name, along)} / {width}", x.axes - along)
    return kernel.memo[key]


def length(kernel: KernelLines, operation: Operation, index: Indices, mask: Mask) -> Term:
    """The Euclidean norm along a dimension."""
    x, along, key = _summed(kernel, operation, index, mask)
    if key not in kernel.memo:
        kernel.memo[key] = kernel.let(f"tl.sqrt_rn({_sum(f'{x.name} * {x.name}', along)})", x.axes - along)
    return kernel.memo[key]


def _summed(
    kernel: KernelLines, operation: Operation, index: Indices, mask: Mask
) -> tuple[Term, frozenset[str], tuple]:
    """(the row that is summed for the result at ``index``, the axes that it lies along, a name for the sum)."""
    source, dim = operation.args[0], summed(operation)
    kept = len(operation.outputs[0].shape) == len(source.shape)
    lead, whole = (*index[:dim], *index[dim + 1 :]) if kept else index, _whole(mask)
    key = "row", source, dim, lead, whole
    if key not in kernel.memo:
        kernel.memo[key] = whole_row(kernel, source, lead, whole, dim)
    return *kernel.memo[key], ("sum", operation.outputs[0], lead, whole)


def pair(kernel: KernelLines, value: Value, index: Indices, mask: Mask) -> Term | None:
    """The even or the odd one of each two neighbours, spread over both: from whole rows, not by gathering.

    Rotary embeddings of interleaved pairs ask for x[2 * (c // 2)] and x[2 * (c // 2) + 1].
    """
    if not index or len(index[-1].terms) != 1:
        return None
    (coefficient, atom), column = index[-1].terms[0], kernel.column
    odd = index[-1].offsets
    half = isinstance(atom, Digit) and atom.axis is column and (atom.div, coefficient) == (2, Number(2))
    if not half or odd not in ((), (UNIT,)) or atom.mod * 2 != column.size.value:
        return None
    everywhere = mask.of_rows()
    if value.sizes[-1].value != column.size.value or any("c" in kernel.axes(place) for place in index[:-1]):
        return None
    if everywhere is None:
        return None
    whole = kernel.value(value, (*index[:-1], Index(((UNIT, Digit(column, 1, column.size.value)),))), everywhere)
    key = "pair", whole
    if key not in kernel.memo:
        rows = "R" if "r" in whole.axes else "1"
        halves = kernel.apart(f"tl.reshape({whole.name}, [{rows}, BC // 2, 2])", whole.axes)
        kernel.memo[key] = [
            kernel.let(f"tl.reshape(tl.join({half.name}, {half.name}), [{rows}, BC])", half.axes) for half in halves
        ]
    return kernel.memo[key][bool(odd)]
