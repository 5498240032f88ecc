"""The tape of a skipped step in the making: operations of a whole forward on other values, and features as inputs."""

from collections.abc import Callable, Collection, Mapping

import torch

from . import aliasing
from .layout import contiguous
from .middle import NotCut
from .values import Input, Operation, Tape, Value, replaced

aten = torch.ops.aten


class Copies:
    """Operations on other values. leaf: what stands for a value that no copied operation makes."""

    def __init__(
        self, leaf: Callable[[Value], Value], continues: Mapping[Value, Value] | None = None,
        copied: Collection[Value] = (),
    ) -> None:  # fmt: skip
        self.operations: list[Operation] = []
        self.values: dict[Value, Value] = {}
        self._leaf, self._continues, self._copied = leaf, continues or {}, copied
        self._made: dict[int, Operation] = {}

    def own(self, value: Value) -> Value:
        """What stands for ``value``."""
        found = self.values.get(value)
        if found is None:
            start = self._continues.get(value)
            found = self._leaf(value) if start is None else self.own(start)
            if value in self._copied:
                found = self.add(aten.clone.default, (found,), found)
            self.values[value] = found
        return found

    def add(self, func: object, args: tuple[Value, ...], like: Value, **named: object) -> Value:
        """The result, of the form of ``like``, of one more operation."""
        made = like.again(like.number, None)
        made.origin = operation = Operation(func, args, named, list(args), [made])
        self.operations.append(operation)
        return made

    def copy(self, operation: Operation) -> None:
        """The operation on the values that stand for its own."""
        args, kwargs = (replaced(given, Value, self.own) for given in (operation.args, operation.kwargs))
        inputs = [self.own(value) for value in operation.inputs]
        writes = operation.writes and self.own(operation.writes)
        like = self._made.get(id(operation.like)) if operation.like is not None else None
        made = Operation(operation.func, args, kwargs, inputs, writes=writes, opaque=operation.opaque, like=like)
        source = writes or next(iter(inputs), None)
        for value in operation.outputs:
            if value is None:
                made.outputs.append(None)
                continue
            self.values[value] = new = value.again(value.number, None if value.base is None else source.root)
            new.origin = made
            made.outputs.append(new)
        self._made[id(operation)] = made
        self.operations.append(made)


class Rest:
    """The tape of a skipped step in the making. Its inputs: the call's, the features, then the options.

    continues: what goes on where a value of the whole tape is not made.
    """

    def __init__(
        self, tape: Tape, given: int, features: int, continues: Mapping[Value, Value] | None = None,
        copied: Collection[Value] = (),
    ) -> None:  # fmt: skip
        self._tape, self._given, self._count = tape, given, features
        self._leaves: dict[Value, Value] = {}
        self._inputs = [self._leaf(value) for value in tape.inputs]
        self._features: list[Value] = []
        self.copies = Copies(self._leaf, continues or {}, copied)

    def _leaf(self, value: Value) -> Value:
        if value.leaf is None:
            raise NotCut("what its blocks keep for each other is read after them")
        if value not in self._leaves:
            copied = value.again(value.number, value.base and self._leaf(value.base))
            index = value.leaf.index if isinstance(value.leaf, Input) else -1
            copied.leaf = value.leaf if index < self._given else Input(index + self._count)
            self._leaves[value] = copied
        return self._leaves[value]

    def feature(self, like: Value) -> Value:
        """The next input: a feature of this form."""
        value = like.again(like.number, None)
        value.leaf, value.stride = Input(self._given + len(self._features)), contiguous(like.shape)
        self._features.append(value)
        return value

    def tape(self) -> Tape:
        """What was copied so far, as a forward."""
        inputs, output = self._inputs, replaced(self._tape.output, Value, self.copies.own)
        inputs = [*inputs[: self._given], *self._features, *inputs[self._given :]]
        made = Tape(self.copies.operations, inputs, output, self._tape.device, resident=self._tape.resident)
        made.operations = aliasing.needed(made.operations, made.outputs)
        return made
