"""Tracks which memory a forward writes while it is recorded: in-place operations, and writes into constants.

A constant is made once and is the same at each replay. One that is written with something that is not must be made at
each replay, from the operation on that writes it. Memory that nothing has written holds whatever was there before.
"""

from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor

from ..reasons import say
from .blanks import Blanks, blank
from .refusals import UNWRITTEN, Refusal, obstacle_to_writing
from .tensors import Tensors
from .traits import Traits, aten, read_in_place
from .values import Constant, Input, Operation, Value, Weight

Result = tuple[Operation, list[Tensor], list[Value]]  # an operation, its results, whose memory they share


class Writes:
    """Of one recording, whose ``operations`` these are. refuse: told of what a replay could not repeat."""

    def __init__(self, tensors: Tensors, refuse: Refusal, operations: list[Operation]) -> None:
        self._tensors, self._refuse, self._operations = tensors, refuse, operations
        self.blanks = Blanks()
        self.into: Input | Weight | None = None  # it is refused because this was written into
        self.echoes: Set[Value] = frozenset()  # not to be written now, see ``Patches._is_shared``
        self.promoted: tuple[int, ...] = ()  # the numbers of constants that turned out to be written
        self._unwritten: set[Value] = set()
        self._read_constants: set[Value] = set()  # roots of constants that a recorded operation reads

    def left_out(self, value: Value) -> None:
        """``value`` is memory that nothing has written yet."""
        self._unwritten.add(value)

    def are_missing(self, inputs: Sequence[Value]) -> bool:
        """Whether one of them is memory that nothing has written."""
        return bool(self._unwritten) and any(value.root in self._unwritten for value in inputs)

    def read(self, inputs: Sequence[Value]) -> None:
        """A recorded operation reads these."""
        for value in inputs:
            if type(value.leaf) is Constant:
                self._read_constants.add(value.root)

    def before(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple, inputs: list[Value]
    ) -> None:
        """Looks at an operation in place before it runs: a constant that is about to be written must be kept."""
        target = known.written(lifted[0], lifted[1])
        if reason := obstacle_to_writing(func, known, args, kwargs, lifted):
            self._refuse(reason)
        elif self.are_missing(read_in_place(known, kwargs, target, inputs)):
            self._refuse(UNWRITTEN)
        elif type(target.root.leaf) is not Constant and target.root.leaf is not None:
            self.into = target.root.leaf
            self._refuse(say("writes_input"))
        elif target.root in self.echoes:
            self._refuse(say("writes_input"))
        elif target.root in self._tensors.memoised:
            self._refuse(say("writes_kept"))
        elif known.turns is None:
            root = target.root
            self.blanks.before_write(root)
            same = root not in self._read_constants and all(value.is_constant for value in inputs)
            if root.is_constant and not same:
                self._promote(root)

    def after(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple, inputs: list[Value]
    ) -> Result | None:
        """What to write down for an operation in place that has run; None if it is the same at each replay."""
        tensor, target = known.written(args, kwargs), known.written(lifted[0], lifted[1])
        root = target.root
        if known.turns is not None:  # its memory is as it was, the tensor is a view of it now
            operation = Operation(known.turns, *lifted, inputs)
            if not root.is_constant:
                return operation, [tensor], [root]
            self._tensors.constant(tensor, operation, root)
            return None
        if tensor.shape != target.shape:
            self._refuse(say("moves", name=known.name))
            return None
        self._unwritten.discard(root)
        self.blanks.written(root)
        self.blanks.read(inputs)
        return None if root.is_constant else (Operation(func, *lifted, inputs, writes=target), [tensor], [])

    def _promote(self, root: Value) -> None:
        """A constant is about to be written with something that is not: from here on it is made at each replay."""
        self.promoted += (root.number,)
        tensor = root.leaf.tensor
        self._tensors.forget(tensor)
        if root in self._unwritten:
            operation = root.origin
            if operation.inputs:  # of which it took the sizes alone, and which need not be there any more
                operation = blank(tensor, None, root)
        else:
            snapshot = Value(tensor.clone(), self._tensors.next(), Constant(tensor.clone()))
            operation = Operation(aten.clone.default, (snapshot,), {}, [snapshot], [root])
        root.leaf, root.origin = None, operation
        operation.outputs = [root]
        made = [operation]
        for view in self._tensors.constant_views.pop(root, ()):
            self._tensors.forget(view.leaf.tensor)
            view.leaf = None
            if view is view.origin.outputs[0]:
                made.append(view.origin)
        place = len(self._operations)  # no earlier than it is needed: it takes memory from there on
        if root in self._read_constants:
            readers = (n for n, each in enumerate(self._operations) if any(value.root is root for value in each.inputs))
            place = next(readers, place)
        self._operations[place:place] = made
