"""Writes one Triton kernel for values of one shape: its loops, its source, and the arguments of a launch.

Sizes of the call are arguments, never text. A block is R rows of BC columns; both follow from sizes of the model alone.
Where several heads read the same row of a table, a program takes all heads of a token (the tile), so that it reads the
row once.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import quantisers
from .group import is_copy
from .index import NOTHING, UNIT, Axis, Digit, Index, Number, along
from .layout import Layouts, order_of
from .lower import Lowering
from .rows import LENGTH, summed
from .terms import STORED, NoKernel, Term
from .values import ONE, Operation, Size, Value

NARROW = 64  # columns: fewer, and a row takes in the dimension before
WIDEST_ROW = 16384  # that one program sums
BLOCK = 4096  # elements that four warps hold
FILLED = 0.9  # of a block, and hardly a lane is idle
COLUMNS = 1024  # of a block, where nothing is summed
LOOSE_COLUMNS = 256  # of a block, where they are a size of the call
TILE_ROWS, TILE_COLUMNS = (4, 64), 256
REDUCTIONS = frozenset(("layer_norm", "rms_norm", "mean", LENGTH, quantisers.BY_ROWS))
LONG_CODE = re.compile(r"tl\.(sin|cos)\(")  # for each element of a thread: the compiler takes a second for 32 of them
LONG_LINES = 80  # of joins within joins, say: with 32 elements per thread, ptxas took 12 s for 118 lines, 75 for 300
MOST_WORK = 5000  # lines times elements per thread: a row that is summed cannot be cut; 72 lines with 64 took 1 s


@dataclass(frozen=True)
class Source:
    """A kernel and the form of its launch, with the values and sizes of the group that it was made from."""

    text: str
    name: str
    rows: int  # R
    columns: int  # BC
    warps: int
    tile: bool  # a block is all rows of one dimension, not R of all rows
    row_sizes: tuple[Size, ...]  # whose product is the number of rows, or of tiles
    column_size: Size
    operands: tuple[Value, ...]
    outputs: tuple[Value, ...]
    integers: tuple[tuple[Size, ...], ...]  # each argument is a product
    floats: tuple[float, ...]
    large: bool  # it counts in 64 bits


@dataclass
class _Loops:
    """How the elements of the results are gone through."""

    lead: list[Axis]
    column: Axis
    index: tuple[Index, ...]  # of an element of the results
    tile: Axis | None = None


@dataclass(frozen=True)
class _Result:
    """One result: its variable, where its element lies, and which elements of the block store it, if not all."""

    term: Term
    place: str
    stores: str = ""


def source(
    outputs: Sequence[Value], inside: Mapping[Value, Operation], layouts: Layouts, large: bool = False
) -> Source:
    """The kernel that computes ``outputs`` through the operations of ``inside``.

    All of them have the first one's shape, but for scales of rows that are rounded (``quantisers``).

    large: it counts in 64 bits, for values that are (``Value.is_large``). Raises ``NoKernel`` with the reason.
    """
    width = _width(outputs, inside)
    loops = _loops(outputs[0], layouts, width, None)
    lowering, results = _lowered(outputs, inside, layouts, loops)
    heads = _heads(outputs[0], layouts, width, lowering)
    tile = heads or _tile(loops, lowering)
    if tile is not None:
        loops = _loops(outputs[0], layouts, 0 if heads else width, tile)
        lowering, results = _lowered(outputs, inside, layouts, loops)
    return _assembled(outputs, inside, loops, lowering, results, large)


def _computed(outputs: Sequence[Value], inside: Mapping[Value, Operation]) -> Iterator[Operation]:
    """The operations of a group that make ``outputs``, from the last one on; once for each of their values."""
    seen: set[Value] = set()
    stack = list(outputs)
    while stack:
        value = stack.pop()
        operation = inside.get(value)
        if operation is None or value in seen:
            continue
        seen.add(value)
        yield operation
        stack += operation.inputs


def _width(outputs: Sequence[Value], inside: Mapping[Value, Operation]) -> int:
    """The length of the rows that are summed; 0 where none is."""
    widths: set[int] = set()
    for operation in _computed(outputs, inside):
        if operation.traits.name in REDUCTIONS:
            widths.add(operation.args[0].shape[summed(operation)])
    if len(widths) > 1:
        raise NoKernel("sums over rows of several lengths")
    width = widths.pop() if widths else 0
    if width > WIDEST_ROW:
        raise NoKernel(f"rows of more than {WIDEST_ROW}")
    return width


def _loops(value: Value, layouts: Layouts, width: int, tile: str | None) -> _Loops:
    sizes, steps = value.sizes, layouts.of(value)
    dims = [d for d in order_of(steps) if sizes[d] is not ONE]
    index: list[Index] = [NOTHING] * len(sizes)
    kind = "row" if tile is None else "scalar"
    place, whole = _inner(dims, sizes, width)
    inner, total = dims[place:], math.prod(sizes[d].value for d in dims[place:])
    loose = len(inner) == 1 and not sizes[inner[0]].static
    count = width or total
    column = Axis("c", sizes[inner[0]] if loose else Size(count, static=True), "column")
    lead = [Axis(f"i{d}", sizes[d], "row" if f"i{d}" == tile else kind) for d in dims[:place]]
    for axis, d in zip(lead, dims[:place], strict=True):
        index[d] = along(axis)
    below = total
    for position, d in enumerate(inner):
        if loose:
            index[d] = along(column)
            break
        below //= sizes[d].value
        if position == 0 and not whole:  # a part of this dimension: its blocks become rows
            size = Size(total // count, static=True)
            extra = Axis(f"i{d}", size, "row" if f"i{d}" == tile else kind)
            lead.append(extra)
            part = count // below
            index[d] = along(extra).times(Number(part)) + Index(((UNIT, Digit(column, below, part)),))
        else:
            index[d] = Index(((UNIT, Digit(column, below, sizes[d].value)),))
    return _Loops(lead, column, tuple(index), next((axis for axis in lead if axis.name == tile), None))


def _inner(dims: Sequence[int], sizes: Sequence[Size], width: int) -> tuple[int, bool]:
    """(how many of ``dims`` are rows, whether the others are whole rows of ``width``)."""
    place, total = len(dims), 1
    if not width:
        while place > 0 and total < NARROW and (sizes[dims[place - 1]].static or place == len(dims)):
            place -= 1
            total *= sizes[dims[place]].value
            if not sizes[dims[place]].static:
                break
        return place, True
    while total < width:
        place -= 1
        if place < 0 or not sizes[dims[place]].static:
            raise NoKernel("what is summed is no row of the result")
        total *= sizes[dims[place]].value
    if total == width:
        return place, True
    below = total // sizes[dims[place]].value
    if total % width or width % below:
        raise NoKernel("what is summed does not fit the rows of the result")
    return place, False


def _lowered(
    outputs: Sequence[Value], inside: Mapping[Value, Operation], layouts: Layouts, loops: _Loops
) -> tuple[Lowering, list[_Result]]:
    lowering = Lowering(layouts, inside, loops.column, loops.tile)
    place = lowering.text(lowering.offset(outputs[0], loops.index), "o")  # all of one shape lie alike
    first = "(c == 0)" if loops.tile is None else "(r == 0) & (c == 0)"
    results: list[_Result] = []
    for value in outputs:
        if quantisers.rounded_with(value, inside) is value:
            results.append(_Result(lowering.value(value, loops.index), place))
        else:  # a number for each row
            row = (*loops.index[:-1], NOTHING)
            results.append(_Result(lowering.value(value, row), lowering.text(lowering.offset(value, row), "s"), first))
    return lowering, results


def _tile(loops: _Loops, lowering: Lowering) -> str | None:
    """The rows that a program takes together, because what it reads for one of them serves all."""
    if not loops.column.size.static or loops.column.size.value > TILE_COLUMNS or len(loops.lead) < 2:
        return None
    best, most = None, 0
    for axis in loops.lead:
        if not axis.size.static or not TILE_ROWS[0] <= axis.size.value <= TILE_ROWS[1]:
            continue
        shared = [place.axes() for place, _ in lowering.loads]
        count = sum(axis not in axes and loops.column in axes and len(axes) > 1 for axes in shared)
        if count > most:
            best, most = axis.name, count
    return best


def _heads(value: Value, layouts: Layouts, width: int, lowering: Lowering) -> str | None:
    """The heads in a row that is summed as a whole, where each of them reads the same part of a table.

    As rows of a tile they read it once.
    """
    if not width:
        return None
    dims = [d for d in order_of(layouts.of(value)) if value.sizes[d] is not ONE]
    below, _ = _inner(dims, value.sizes, 0)
    if below < 1 or not all(value.sizes[d].static for d in dims[below - 1 :]):
        return None
    count, columns = value.sizes[dims[below - 1]].value, math.prod(value.sizes[d].value for d in dims[below:])
    fits = TILE_ROWS[0] <= count <= TILE_ROWS[1] and NARROW <= columns <= TILE_COLUMNS
    if not fits or count * columns != width or _power(count) * _power(columns) > 2 * BLOCK:
        return None
    for place, _ in lowering.loads:
        digits = [atom for _, atom in place.terms if isinstance(atom, Digit) and atom.axis is lowering.column]
        if len(place.axes()) > 1 and digits and all(d.mod and d.div * d.mod <= columns for d in digits):
            return f"i{dims[below - 1]}"
    return None


def _assembled(
    outputs: Sequence[Value], inside: Mapping[Value, Operation], loops: _Loops, lowering: Lowering,
    results: Sequence[_Result], large: bool,
) -> Source:  # fmt: skip
    column, tile = loops.column.size, loops.tile
    power = _power(column.value) if column.static else 0
    is_long = len(lowering.lines) > LONG_LINES or any(LONG_CODE.search(line) for line in lowering.lines)
    block = BLOCK // 8 if is_long else BLOCK
    filled = lowering.reduces and _is_filled(column.value, tile.size.value if tile is not None else 1)
    if filled:
        block = min(block, BLOCK // 2)
    if not column.static:
        columns, rows = LOOSE_COLUMNS, block // LOOSE_COLUMNS
    elif tile is not None:
        columns, rows = power, _power(tile.size.value)
    else:
        columns = power if lowering.reduces else min(power, COLUMNS, block)
        rows = max(1, min(32, block // columns))
    single = lowering.reduces or tile is not None  # one block holds all columns
    warps = _warps(rows, columns, filled)
    if len(lowering.lines) * rows * columns > MOST_WORK * 32 * warps:
        raise NoKernel("a kernel of too many lines")
    body = _head(loops, lowering, single, large)
    body += lowering.lines
    for k, (result, value) in enumerate(zip(results, outputs, strict=True)):
        mask = " & ".join(["rmask", "cmask", result.stores] if result.stores else ["rmask", "cmask"])
        body.append(
            f"tl.store(o{k} + ({result.place} + r * 0 + c * 0), ({result.term.name} + tl.zeros((R, BC), tl.float32))"
            f".to({STORED[value.dtype]}), mask={mask})"
        )
    integers = [f"n{k}" for k in range(len(lowering.integers))] + ["rows"] + ([] if column.static else ["C"])
    parameters = [f"p{k}" for k in range(len(lowering.operands))] + [f"o{k}" for k in range(len(outputs))]
    parameters += integers + [f"f{k}" for k in range(len(lowering.floats))]
    parameters += ["R: tl.constexpr", "BC: tl.constexpr"]
    name = _name(outputs, inside)
    text = f"@triton.jit(do_not_specialize={integers!r})\ndef {name}({', '.join(parameters)}):\n    "
    text += "\n    ".join(body) + "\n"
    others = tuple(axis.size for axis in loops.lead if axis is not tile)
    return Source(
        text, name, rows, columns, warps, tile is not None, others, column,
        tuple(lowering.operands), tuple(outputs), tuple(lowering.integers), tuple(lowering.floats), large,
    )  # fmt: skip


def _head(loops: _Loops, lowering: Lowering, single: bool, large: bool) -> list[str]:
    """The lines that give each loop variable its value."""
    column, tile, wide = loops.column.size, loops.tile, ".to(tl.int64)" if large else ""
    lines = [f"C = {column.value}"] if column.static else []
    first = "" if single else "tl.program_id(0) % parts * BC + "
    if single:
        lines += [f"block = tl.program_id(0){wide}"]
    else:
        lines += ["parts = tl.cdiv(C, BC)", f"block = tl.program_id(0){wide} // parts"]
    lines.append(f"c = {first}tl.arange(0, BC)[None, :]{wide}")
    if lowering.pairs:
        lines += [f"cc = {first and f'({first}0) * 2 + '}tl.arange(0, 2 * BC)[None, :]", "ccmask = cc < 2 * C"]
    if tile is not None:
        lines += [f"r = tl.arange(0, R)[:, None]{wide}", f"rmask = r < {tile.size.value}"]
        lines += [f"{tile.name} = r", "rest = block"]
    else:
        lines += ["r = (block * R + tl.arange(0, R))[:, None]", "rmask = r < rows", "rest = r"]
    lines.append("cmask = c < C")
    axes = [axis for axis in loops.lead if axis is not tile]
    for axis in reversed(axes[1:]):
        size = lowering.named(Number(axis.size.value) if axis.size.static else Number(1, (axis.size,)))
        lines += [f"{axis.name} = rest % {size}", f"rest = rest // {size}"]
    if axes:
        lines.append(f"{axes[0].name} = rest")
    return [f"n{k} = n{k}{wide}" for k in range(len(lowering.integers)) if large] + lines


def _name(outputs: Sequence[Value], inside: Mapping[Value, Operation]) -> str:
    """What the kernel does, for profiles. Copies are left out: at another size the same kernel may have none."""
    names: list[str] = []
    for operation in _computed(outputs, inside):
        if operation.kind == "fuse" and not is_copy(operation):
            names.append(operation.traits.name)
    return "fused_" + ("_".join(reversed(list(dict.fromkeys(names))[:6])) or "copy")


def _is_filled(columns: int, rows: int) -> bool:
    """Whether a block of so many columns, or of a tile's rows of them, is half or all of BLOCK and leaves little idle.

    One of 2048 columns is, and 30 heads of 128; 3072 or 5120 columns and 24 heads are not.
    """
    whole = _power(columns) * _power(rows)
    return BLOCK // 2 <= whole <= BLOCK and columns * rows >= FILLED * whole


def _warps(rows: int, columns: int, filled: bool) -> int:
    """Measured on an H200: 4 hold up to 64 elements a thread. Sums over filled blocks are faster with 16."""
    return 8 if rows * columns > (BLOCK // 2 if filled else 2 * BLOCK) else 4


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
