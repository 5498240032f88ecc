"""What is written through a view becomes a separate value, where it is read through that view alone from then on.

Queries, say, which are turned in place where they lie, beside keys and values in the result of one product. What is
read besides must lie apart: in another part of the same tensor.
"""

from collections.abc import Sequence
from typing import Any

from .. import group, views
from ..layout import dense, lie_alike, outermost_first
from ..singles import strides_below
from ..traits import ATTENTIONS
from ..values import Operation, Tape, Value
from . import edits
from .memory import functional

Strides = dict[Value, tuple[int, ...]]  # how values lie


class SharedMemory:
    """Which values of a tape share memory, and from where to where on it they are read."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._made: dict[Value, int] = {}
        self._readers: dict[Value, list[int]] = {}
        self._last_read: dict[Value, int] = {}
        self._outputs = set(tape.outputs)
        self._families: dict[Value, list[Value]] = {}  # by the value that owns the memory
        for place, operation in enumerate(tape.operations):
            for value in dict.fromkeys(operation.inputs):
                self._readers.setdefault(value, []).append(place)
                self._last_read[value] = place
            self._made.update((value, place) for value in operation.outputs if value is not None)
        self._last_read.update(dict.fromkeys(self._outputs, len(tape.operations)))
        for value in self._made:
            self._families.setdefault(value.root, []).append(value)

    def behind(self, target: Value, place: int, now: Value) -> list[Value] | None:
        """Later views of what the operation at ``place`` writes into ``target``; None where it is read otherwise.

        now: what stands for it from then on: the operation's result, or ``target``.
        """
        if target.root.leaf is not None:
            return None
        family = self._families.get(target.root, [])
        if any(
            self._made[value] < place < self._last_read.get(value, -1)
            and value is not now
            and not _lie_apart(value, target)
            for value in family
        ):
            return None
        found: list[Value] = []
        for value in family:
            if self._made[value] > place and _source(value) in (now, *found):
                found.append(value)
        return found

    def strides(self, value: Value, place: int, stride: tuple[int, ...], behind: Sequence[Value]) -> Strides | None:
        """How ``value`` and views ``behind`` it lie if it has this stride; None if whoever reads them then minds."""
        makers = list({id(each.origin): each.origin for each in behind}.values())
        if any(maker.writes is not None for maker in makers):
            return None
        found = strides_below(value, stride, makers)
        if found is None or not self._outputs.isdisjoint(found):
            return None
        for each in {each for value in found for each in self._readers.get(value, ()) if each > place}:
            reader = self._tape.operations[each]
            if not any(reader is maker for maker in makers) and not _bears(reader, found):
                return None
        return found

    def separate(self, target: Value, result: Value, behind: Sequence[Value]) -> None:
        """``result``, which was a part of ``target``'s memory, has its own, and so have the views ``behind`` it."""
        family = self._families.pop(target.root, [])
        self._families[target.root] = [value for value in family if value is not result and value not in behind]
        result.base = None
        for value in behind:
            value.base = result
        self._families[result] = [result, *behind]

    def make_new(self, place: int, function: Any, targets: Sequence[Value]) -> bool:
        """Has the operation at ``place`` be ``function``, which gives new tensors in place of what was written into.

        False, and nothing has changed, where somebody reads that otherwise.
        """
        operation, parts = self._tape.operations[place], []
        strides: Strides = {}
        for target in targets:
            now = operation.outputs[0] if target is operation.writes else target
            behind = self.behind(target, place, now)
            stride = dense(target.shape, outermost_first(target.stride))
            lie = None if behind is None else self.strides(now, place, stride, behind)
            if lie is None:
                return False
            strides |= lie
            parts.append((target, now, behind))
        later = {target: target.twin() for target, now, _ in parts if now is target}
        operation.func, operation.writes = function, None
        operation.outputs = [later.get(now, now) for _, now, _ in parts]
        for target, result in later.items():
            self._readers[result] = [each for each in self._readers.get(target, ()) if each > place]
            for each in self._readers[result]:
                edits.replace_inputs(self._tape.operations[each], later)
        for (target, _, behind), result in zip(parts, operation.outputs, strict=True):
            result.origin, self._made[result] = operation, place
            self.separate(target, result, behind)
        for value, stride in strides.items():
            later.get(value, value).stride = stride
        return True


def to_values(tape: Tape) -> None:
    """Operations of torch's alone. Exact."""
    memory = SharedMemory(tape)
    for place, operation in reversed(list(enumerate(tape.operations))):  # one write after the other into one tensor
        target = operation.writes
        if target is None or operation.opaque or len(operation.outputs) != 1:
            continue
        result = operation.outputs[0]
        behind, call = memory.behind(target, place, result), functional(operation)
        if behind is None or call is None:
            continue
        form = operation.func, operation.args, operation.kwargs, operation.inputs
        operation.func, operation.args, operation.kwargs, operation.inputs = call
        operation.writes = None
        like = edits.made_of(operation)
        strides: Strides | None = None
        if like is not None and like.dtype == target.dtype:
            alike = lie_alike(target.shape, like.stride(), target.stride)
            strides = {} if alike else memory.strides(result, place, like.stride(), behind)
        if strides is None:
            operation.func, operation.args, operation.kwargs, operation.inputs = form
            operation.writes = target
            continue
        memory.separate(target, result, behind)
        for value, stride in strides.items():
            value.stride = stride


def _source(value: Value) -> Value:
    """What a value is a view of."""
    return value.origin.writes or value.origin.inputs[0]


def _bears(operation: Operation, strides: Strides) -> bool:
    """Whether the result of what reads these values is the same, and lies as it was recorded."""
    if group.probably_fuses(operation):
        return True
    if operation.opaque or operation.traits.name not in ATTENTIONS:
        return False
    query, out = operation.inputs[0], operation.outputs[0]  # it lies as its queries do
    order = outermost_first(strides.get(query, query.stride))
    return out is not None and lie_alike(out.shape, out.stride, dense(out.shape, order))


def _lie_apart(one: Value, other: Value) -> bool:
    """Whether two values of one memory have no element in common, as two parts of a tensor have none."""
    here, there = _parts(one), _parts(other)
    for source in here.keys() & there.keys():
        (d, start, stop), (e, begin, end) = here[source], there[source]
        if d == e and (stop <= begin or end <= start) and not _repeats(source):
            return True
    return False


def _parts(value: Value) -> dict[Value, tuple[int, int, int]]:
    """In which part of which tensors a value lies: (dimension, from, to)."""
    found = {}
    while value.base is not None:
        source = _source(value)
        part = views.part(value.origin, value) if value.origin.writes is None else None
        if part is not None:
            found[source] = part
        value = source
    return found


def _repeats(value: Value) -> bool:
    """Whether elements of it may lie at one place, as those of an expanded tensor do."""
    reach = 0
    for step, size in sorted(zip(value.stride, value.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False
