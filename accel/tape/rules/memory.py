"""One tensor that is written in place, as the values that it holds one after the other (see ``slices``)."""

from collections.abc import Collection, Sequence
from typing import Any

from .. import aliasing, group, views
from ..layout import dense, lie_alike, outermost_first
from ..rows import MAX_JOINED
from ..traits import aten
from ..values import Operation, Tape, Value, replaced
from . import edits

WHOLE = ()
Region = tuple[int, int, int] | tuple[()] | None  # (dimension, from, to); None: neither a slice nor the whole
MOST = 16  # slices of one tensor that are worth a join
COPIES = (aten.clone.default, aten._to_copy.default)


class Doubtful(Exception):
    """This tensor stays as it is."""


def functional(operation: Operation) -> tuple[Any, tuple, dict[str, Any], list[Value]] | None:
    """(function, arguments, named ones, inputs) of what gives the new value of what an operation writes into."""
    if operation.traits.name != "copy_":
        functional = aliasing.functional_of(operation)
        return functional and (functional, operation.args, operation.kwargs, operation.inputs)
    target, source = operation.args[:2]
    if source.shape != target.shape:
        return None
    here, there = ({"dtype": value.dtype, "device": value.device} for value in (target, source))
    kwargs = {name: here[name] for name in here if here[name] != there[name]}
    return aten._to_copy.default if kwargs else aten.clone.default, (source,), kwargs, [source]


class Memory:
    """One tensor of a tape that is written in place, followed from its first operation to its last.

    before: operations that are added, by the place of the one that they come before.
    """

    def __init__(self, tape: Tape, root: Value, written: Collection[Value]) -> None:
        self.before: dict[int, list[Operation]] = {}
        self._tape, self._root, self._written = tape, root, written
        self._undo: list[tuple[Any, str, Any]] = []
        self._place = 0
        self._regions: dict[Value, Region] = {root: WHOLE}
        self._recorded: dict[Value, tuple[int, ...]] = {}  # strides of what was a view when it was recorded
        self._whole, self._dim = root, 0  # what the memory holds, but for what was written since:
        self._parts: dict[tuple[int, int], Value] = {}
        self._cuts: dict[tuple, Value] = {}
        self._stored: set[Value] = set()  # what lies in memory as a whole, because a call reads it
        self._writes = 0  # how many there were
        self._seen: dict[Value, int] = {}  # how many when a view was made

    def follow(self, places: Sequence[int]) -> None:
        """Rewrites the operations at ``places``, which are all that touch it. Raises ``Doubtful``."""
        root = self._root
        if root.leaf is not None or root.origin is None or not root.numel:
            raise Doubtful
        if not lie_alike(root.shape, root.stride, dense(root.shape, outermost_first(root.stride))):
            raise Doubtful
        for self._place in places:
            operation = self._tape.operations[self._place]
            if operation.writes is not None and operation.writes in self._regions:
                self._write(operation)
            elif any(value is not None and value.base is root for value in operation.outputs):
                self._view(operation)
            else:
                self._read(operation)
        self._place = len(self._tape.operations)
        last = {value: self._as_recorded(value) for value in self._tape.outputs if value in self._regions}
        self._set(self._tape, "output", replaced(self._tape.output, Value, lambda value: last.get(value, value)))

    def undo(self) -> None:
        """Everything is as it was."""
        for owner, name, old in reversed(self._undo):
            setattr(owner, name, old)

    def _set(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    # What the memory holds ------------------------------------------------------------------------------------------

    def _now(self, value: Value) -> Value:
        """What a tensor of this memory holds now, however that lies."""
        region = self._regions[value]
        if region is None:
            if self._seen[value] != self._writes:
                raise Doubtful
            return value
        if region == WHOLE:
            return self._joined()
        d, start, stop = region
        if self._parts and d != self._dim:
            self._joined()
        if (start, stop) in self._parts:
            return self._parts[start, stop]
        if any(start < end and begin < stop for begin, end in self._parts):
            self._joined()
        return value if self._whole is self._root else self._cut(d, start, stop)

    def _as_recorded(self, value: Value, exactly: bool = False) -> Value:
        """The same, lying as it was recorded. exactly: along what is 1 as well, on which a sum's order depends."""
        found, region = self._now(value), self._regions[value]
        stride = self._recorded.get(value, value.stride)
        if (
            found.stride == stride
            or region in (WHOLE, None)
            or not exactly
            and lie_alike(value.shape, found.stride, stride)
        ):
            return found
        self._joined()
        return self._cut(*region)

    def _joined(self) -> Value:
        """The whole, with all that was written."""
        if not self._parts:
            return self._whole
        parts, place, length = [], 0, self._root.shape[self._dim]
        gaps = False
        for (start, stop), part in sorted(self._parts.items()):
            if start > place:
                gaps = True
                parts.append(self._cut(self._dim, place, start))
            parts.append(part)
            place = stop
        if place < length:
            gaps = True
            parts.append(self._cut(self._dim, place, length))
        if gaps and (self._whole in self._stored or not _is_ours(self._whole.origin)):  # the rest would be copied, too
            raise Doubtful
        if len(parts) > MAX_JOINED and not (len(parts) <= MOST and _are_alike(parts)) and not _are_copies(parts):
            raise Doubtful
        self._whole, self._parts = parts[0] if len(parts) == 1 else self._join(parts), {}
        return self._whole

    def _join(self, parts: list[Value]) -> Value:
        whole = self._root.again(self._root.number, None)
        whole.origin = Operation(aten.cat.default, (parts, self._dim), {}, list(parts), [whole])
        edits.lay(whole, self._root.stride)
        self.before.setdefault(self._place, []).append(whole.origin)
        return whole

    def _cut(self, d: int, start: int, stop: int) -> Value:
        """A slice of the whole without its parts."""
        whole = self._whole
        if (start, stop) == (0, whole.shape[d]):
            return whole
        key = whole, d, start, stop
        if key not in self._cuts:
            shape = (*whole.shape[:d], stop - start, *whole.shape[d + 1 :])
            made = self._cuts[key] = whole.part(shape, ())
            made.order = None
            made.origin = Operation(aten.slice.Tensor, (whole, d, start, stop), {}, [whole], [made])
            self.before.setdefault(self._place, []).append(made.origin)
        return self._cuts[key]

    # Operations -----------------------------------------------------------------------------------------------------

    def _replace(self, operation: Operation, new: dict[Value, Value]) -> None:
        if any(value in new for value in operation.inputs):
            for name in ("args", "kwargs", "inputs"):
                given = replaced(getattr(operation, name), Value, lambda value: new.get(value, value))
                self._set(operation, name, given)
            self._set(operation, "runs", None)

    def _read(self, operation: Operation) -> None:
        """It makes something of its own."""
        mine = [value for value in dict.fromkeys(operation.inputs) if value in self._regions]
        new = {value: self._now(value) for value in mine}
        fuses = group.probably_fuses(operation)
        if not fuses:
            self._stored.update(value.root for value in new.values())
        same = all(self._recorded.get(value, value.stride) == now.stride for value, now in new.items())
        args = operation.args, operation.kwargs, operation.inputs
        self._replace(operation, new)
        if not same and not ((fuses or operation.writes is not None) and self._lies_as_recorded(operation)):
            for name, old in zip(("args", "kwargs", "inputs"), args, strict=True):
                self._set(operation, name, old)
            self._replace(operation, {value: self._as_recorded(value, exactly=True) for value in mine})

    def _lies_as_recorded(self, operation: Operation) -> bool:
        if operation.writes is not None:
            return not operation.opaque and operation.func._schema.name.startswith("aten::")
        made = edits.made_of(operation)
        return made is not None and lie_alike(made.shape, made.stride(), operation.outputs[0].stride)

    def _view(self, operation: Operation) -> None:
        source = operation.inputs[0]
        others = [value for value in dict.fromkeys(operation.inputs[1:]) if value in self._regions]
        if operation.opaque or source not in self._regions or source in others:
            raise Doubtful
        for value in operation.outputs:
            if value is not None:
                self._regions[value] = self._region(operation, value)
                self._seen[value] = self._writes
        new = {value: self._as_recorded(value) for value in others}
        if any(value is not None and self._regions[value] is None for value in operation.outputs):
            now = new[source] = self._as_recorded(source)
            for value in operation.outputs:
                if value is not None and value.base is self._root:
                    self._set(value, "base", now.root)
        self._replace(operation, new)

    def _region(self, operation: Operation, value: Value) -> Region:
        """Which part of the memory a view is."""
        source, name = operation.inputs[0], operation.traits.name
        region = self._regions[source]
        if region is None or value.base is not self._root:
            return None
        if name in views.SAME:
            return region if value.shape == source.shape and value.dtype == source.dtype else None
        part = views.part(operation, value)
        if part is None or len(value.shape) != len(source.shape):
            return None
        if value.shape == source.shape:
            return region
        d, start, stop = part
        if region == WHOLE:
            return part
        return (d, region[1] + start, region[1] + stop) if region[0] == d else None

    def _write(self, operation: Operation) -> None:
        target, result = operation.writes, operation.outputs[0]
        region = self._regions[target]
        if region is None or operation.opaque or not target.numel or len(operation.outputs) != 1:
            raise Doubtful
        others = [value for value in dict.fromkeys(operation.inputs) if value in self._regions and value is not target]
        new = {value: self._now(value) for value in others}
        if operation.traits.name == "copy_":
            self._replace(operation, new)
            self._widen(operation)
        else:
            self._replace(operation, new | {target: self._now(target)})
        call = functional(operation)
        if call is None:
            raise Doubtful
        for name, value in zip(("func", "args", "kwargs", "inputs"), call, strict=True):
            self._set(operation, name, value)
        self._set(operation, "writes", None)
        if region != WHOLE and not _is_ours(operation):  # and a join would copy it
            raise Doubtful
        self._recorded[result] = target.stride
        for name, value in (("base", None), ("order", None), ("stride", result.stride)):
            self._set(result, name, value)
        edits.lay(result, dense(result.shape, outermost_first(self._root.stride)))
        self._keep(result, region)

    def _widen(self, operation: Operation) -> None:
        """What is copied is as large as what it is copied over."""
        target, source = operation.args[:2]
        if source.shape == target.shape:
            return
        if source.root in self._written:
            raise Doubtful
        wide = source.part(target.shape, ())
        wide.origin = Operation(aten.expand.default, (source, list(target.shape)), {}, [source], [wide])
        wide.stride, wide.order = edits.made_of(wide.origin).stride(), None
        self.before.setdefault(self._place, []).append(wide.origin)
        self._replace(operation, {source: wide})

    def _keep(self, result: Value, region: Region) -> None:
        """``result`` is what this part of the memory holds from now on."""
        self._regions[result] = region
        self._writes += 1
        if region == WHOLE:
            self._whole, self._parts = result, {}
            return
        d, start, stop = region
        if self._parts and (d != self._dim or self._overlaps(start, stop)):
            self._joined()
        self._dim, self._parts[start, stop] = d, result

    def _overlaps(self, start: int, stop: int) -> bool:
        return any(a < stop and start < b and (a, b) != (start, stop) for a, b in self._parts)


def _is_ours(operation: Operation | None) -> bool:
    """Whether a kernel makes it, which may as well make a part of a join."""
    return operation is not None and group.probably_fuses(operation)


def _are_alike(parts: Sequence[Value]) -> bool:
    """Whether one operation makes all of them, so that it may make the whole."""
    return len({part.origin and part.origin.func for part in parts}) == 1


def _are_copies(parts: Sequence[Value]) -> bool:
    return all(part.origin is not None and part.origin.func in COPIES for part in parts)
