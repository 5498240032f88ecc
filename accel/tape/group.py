"""Decides which operations become one kernel: memory-bound neighbours on the tape.

A group takes in what reads its values, until something that is no part of it needs one of them. Views belong to the
group whose values they turn; they cost nothing there.
"""

from collections.abc import Sequence
from operator import itemgetter

import torch

from . import pointwise, quantisers, views
from .layout import Layouts
from .lower import COPIES
from .rows import LENGTH, MAX_JOINED
from .terms import FLOATS
from .traits import NORMS
from .values import Operation, Tape, Value

LONG_ROW = 1024  # torch gives each row of a norm to a block of threads, which is too many for a head of 128 channels
CALL, VIEW, FUSE = "call", "view", "fuse"


class Group(list):
    """Operations, in recorded order. place: of the last one on the tape."""

    closed, place = False, 0


def classify(operation: Operation) -> str:
    """Says how an operation may run: as a view of memory, inside a kernel, or as a call."""
    like = operation.like
    if operation.alike and operation.func is like.func and like.kind and _bases(operation) == _bases(like):
        return like.kind
    if operation.opaque or operation.writes is not None or not operation.inputs:
        return CALL
    first = operation.outputs[0]
    if first is None or any(value is not None and value.numel == 0 for value in operation.outputs):
        return CALL
    if all(value is None or value.base is not None for value in operation.outputs):
        return VIEW if is_view(operation) else CALL
    return FUSE if _fusible(operation, operation.traits.name) else CALL


def is_view(operation: Operation) -> bool:
    """Whether all that an operation gives is memory of its input."""
    if operation.opaque or operation.writes is not None or any(v is not None and not v.base for v in operation.outputs):
        return False
    known = operation.traits
    return known.view or known.maybe_view


def _bases(operation: Operation) -> list[bool]:
    return [value is None or value.base is None for value in operation.outputs]


def _fusible(operation: Operation, name: str) -> bool:
    if quantisers.is_quantiser(operation):
        return quantisers.fits(operation)
    output, args, kwargs = operation.outputs[0], operation.args, operation.kwargs
    tensors = [value for value in operation.inputs if value.scalar() is None]
    plain = all(value.dtype in FLOATS and value.device == output.device for value in [output, *tensors])
    if not plain or len(operation.outputs) != 1 or not tensors:
        return False
    if name in views.RESHAPES:
        return True
    if name in COPIES:
        return not kwargs.get("memory_format") or kwargs["memory_format"] in (
            torch.contiguous_format, torch.preserve_format
        )  # fmt: skip
    if name in NORMS:
        return len(args[1]) == 1 and args[0].sizes[-1].static
    if name == LENGTH:  # the Euclidean one of rows, which stay as long as one number
        along = args[2] if len(args) > 3 and args[3] and args[1] == 2 and not kwargs else None
        return isinstance(along, (list, tuple)) and len(along) == 1 and args[0].sizes[along[0]].static
    if name == "mean":
        dims = args[1] if len(args) > 1 else None
        one = isinstance(dims, (list, tuple)) and len(dims) == 1
        return one and not kwargs.get("dtype") and args[0].sizes[dims[0]].static
    if name in ("cat", "stack"):
        per_image = name == "stack" and views.dimension(operation, 1, len(output.shape)) == 0  # as many as images
        return not per_image and len(args[0]) <= MAX_JOINED and all(part.dtype == output.dtype for part in args[0])
    return pointwise.simple(name, operation.func._overloadname, args, kwargs) is not None


def probably_fuses(operation: Operation) -> bool:
    """Whether a kernel of ours will probably compute the result; asked by rules, before sizes are known."""
    if operation.opaque or operation.writes is not None:
        return False
    name, overload = operation.traits.name, operation.func._overloadname
    if name in COPIES | NORMS | views.RESHAPES or name == "cat":
        return True
    return pointwise.simple(name, overload, operation.args, operation.kwargs) is not None


def grouped(tape: Tape) -> list[Operation | Group]:
    """The operations of ``tape`` and groups of them, in an order in which they can run.

    A group runs where its last operation was recorded, and not only where its values are needed, because until then it
    keeps alive what it reads. Of a lean tape a group also ends before a call, if what it makes is smaller than that.
    """
    steps: list[tuple[int, Operation | Group]] = []
    place = 0
    owner: dict[Value, Group] = {}
    opened: list[Group] = []

    def close(group: Group) -> None:
        if not group.closed:
            group.closed = True
            opened[:] = [other for other in opened if other is not group]
            steps.append((group.place, group))

    def group_of(value: Value) -> Group | None:
        group = owner.get(value)
        return group if group is not None and not group.closed else None

    for place, operation in enumerate(tape.operations):
        operation.kind = classify(operation)
        found = [group for value in operation.inputs if (group := group_of(value)) is not None]
        joined = list({id(group): group for group in found}.values())
        if operation.kind == CALL:
            done = opened[:] if operation.writes is not None else joined
            for group in [*done, *filter(_shrinks, opened)] if tape.lean else done[:]:
                close(group)
            steps.append((place, operation))
            continue
        if operation.kind == VIEW and not joined:
            steps.append((place, operation))
            continue
        group = joined[0] if joined else Group()
        if not joined:
            opened.append(group)
        for other in joined[1:]:
            group += other
            other.closed = True
            opened[:] = [each for each in opened if each is not other]
        if len(joined) > 1:
            group.sort(key=_place)
            owner.update({value: group for each in group for value in each.outputs if value is not None})
        group.append(operation)
        group.place = place
        owner.update({value: group for value in operation.outputs if value is not None})
    for group in opened[:]:
        close(group)
    return [step for _, step in sorted(steps, key=itemgetter(0))]


def _shrinks(group: Group) -> bool:
    """Whether a group's results take less memory than what it reads, which may be free once it has run."""
    made = {value for operation in group for value in operation.outputs if value is not None}
    read = {value for operation in group for value in operation.inputs}
    held = {value.root for value in read - made} - made
    results = sum(_bytes(value) for value in made - read if value.base is None)
    return results < sum(_bytes(value) for value in held if value.leaf is None)


def _bytes(value: Value) -> int:
    return value.numel * value.dtype.itemsize


def _place(operation: Operation) -> int:
    return next(value.number for value in operation.outputs if value is not None)


def wanted(group: Sequence[Operation], used_outside: set[Value]) -> tuple[list[Value], list[Operation]]:
    """(the values that a group's kernels must store, the views of them that are made afterwards)."""
    inside = {value: operation for operation in group for value in operation.outputs if value is not None}
    stored: dict[Value, None] = {}
    after: set[int] = set()
    for used in filter(used_outside.__contains__, inside):
        left = [used]
        while left:
            value = left.pop()
            operation = inside.get(value)
            if operation is not None and operation.kind == VIEW:
                after.add(id(operation))
                left += operation.inputs  # of which another one may say its form
            elif operation is not None:
                stored[value] = None
    return list(stored), [operation for operation in group if id(operation) in after]


def is_best_alone(operation: Operation, layouts: Layouts) -> bool:
    """Whether torch's own kernel does as well as one of ours that holds nothing else; it needs no compilation.

    torch reads memory in order fast. Broadcast or strided arguments it reads element by element, or copies first. One
    argument that was cropped is still read row by row; at another size nothing may be cut off.
    """
    output, name = operation.outputs[0], operation.traits.name
    if is_copy(operation) or quantisers.is_quantiser(operation):
        return True
    tensors = [value for value in operation.inputs if value.scalar() is None]
    if len(tensors) == 1 and name not in NORMS:
        return _is_whole(tensors[0], output) and layouts.has_rows(tensors[0])
    if not all(map(layouts.is_straight, tensors)):
        return False
    if name in NORMS:
        return output.shape[-1] >= LONG_ROW
    if name in ("cat", "stack"):
        return True
    return all(_is_whole(value, output) for value in tensors)


def _is_whole(value: Value, output: Value) -> bool:
    """Whether ``value`` has all of the result's elements, at every size of the call: a weight has none per picture."""
    if value.shape != output.shape:
        return False
    pairs = zip(value.sizes, output.sizes, strict=True)
    spread = any(own.static and own.value == 1 and not other.static for own, other in pairs)
    return not (spread and views.is_table(value))


def is_copy(operation: Operation) -> bool:
    """Whether it only moves numbers. Where they lie well already, at another size, it is nothing at all."""
    name = operation.traits.name
    return name in COPIES or name in views.RESHAPES


def is_heavy(operation: Operation) -> bool:
    """Whether a kernel is best begun before it: a sum over rows, a join, a layer's input rounded."""
    return operation.traits.name in NORMS | quantisers.NAMES | {"mean", LENGTH, "cat", "stack"}
