"""Which value each tensor of a forward is, while it is recorded.

A result carries a mark with its value. Inputs, weights and constants are known by their id, and kept until the end so
that no other tensor gets it.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..reasons import say
from .layout import contiguous
from .memo import is_memoised
from .named_tensors import PLAIN, Memories, NamedTensors, OfPatch, modules_of, tensors_of, undressed
from .refusals import Refusal
from .values import Constant, Input, Operation, Value, Weight, tensors_in

NUMBERS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
# References to a tensor that torch made below Python for this call, of a literal: the 7 of ``x[0] = 7``, ``x[[1, 2]]``.
# Two of them are the frames of ``lift`` and ``value``.
HELD_BY_THE_CALL = 6

# Constants of earlier recordings of a module by id, as long as somebody else keeps them: a table that it made once.
_CONSTANTS: "weakref.WeakKeyDictionary[nn.Module, dict[int, weakref.ref[Tensor]]]" = weakref.WeakKeyDictionary()
NOWHERE = Weight("", "")  # the leaf of a tensor whose origin is unknown


class Tensors:
    """The values of one recording by tensor. refuse: told of a tensor from nowhere."""

    def __init__(self, module: nn.Module, refuse: Refusal) -> None:
        self.memoised: set[Value] = set()  # constants that outlive the forward
        self.constant_views: dict[Value, list[Value]] = {}  # by root
        self._refuse, self._count, self._token = refuse, 0, object()
        self._known: dict[int, tuple[Value, Tensor]] = {}  # leaves by the tensor's id, which keeping it makes safe
        self._weights = NamedTensors(module)
        self._fetched: dict[Weight, Value] = {}
        self.turned: frozenset[Weight] = frozenset()  # lie channels last, and not so on the tape
        self._earlier = _CONSTANTS.setdefault(module, {})
        self._held: dict[int, Tensor] = {}  # what other packs' code keeps: its state is a guard
        self.memories: Memories | None = None  # where the forward computes with dressed tensors

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def hold(self, tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
        """Those that other packs' code keeps on the device, which are leaves if the forward reads them. Gives these."""
        found = [tensor for tensor in tensors if tensor.device == device and type(tensor) in PLAIN]
        self._held.update({id(tensor): tensor for tensor in found})
        return found

    # A tensor becomes known -----------------------------------------------------------------------------------------

    def next(self) -> int:
        """The number of the next value."""
        self._count += 1
        return self._count

    def leaf(self, tensor: Tensor, leaf: Input | Weight) -> Value:
        """An input or a weight."""
        value = Value(undressed(tensor), self.next(), leaf)
        self._known[id(tensor)] = value, tensor
        return value

    def fetched(self, tensor: Tensor, weight: Weight) -> None:
        """A copy of a weight, which is gone when its layer has computed: ``tensor`` bears its mark, and is not kept."""
        if weight not in self._fetched:
            self._fetched[weight] = Value(undressed(tensor), self.next(), weight)
        tensor._anyshape = self._token, self._fetched[weight]

    def renamed(self, value: Value, weight: Weight) -> Value | None:
        """Of a weight that was ``fetched``: another one of its form, which need not be there; None of any other."""
        if value.leaf not in self._fetched:
            return None
        if weight not in self._fetched:
            self._fetched[weight] = value.again(self.next(), None)
            self._fetched[weight].leaf = weight
        return self._fetched[weight]

    def constant(self, tensor: Tensor, operation: Operation | None, base: Value | None) -> Value:
        """What is the same at each replay; made by ``operation``, if that is known."""
        value = Value(tensor, self.next(), Constant(tensor), base)
        value.origin = operation  # dropped by ``finish``
        if operation is not None:
            operation.outputs.append(value)
        if base is not None:
            self.constant_views.setdefault(base, []).append(value)
        self.mark(tensor, value)
        self._known[id(tensor)] = value, tensor
        return value

    def result(self, tensor: Tensor, operation: Operation, base: Value | None) -> Value:
        """What an operation of the tape made."""
        self._count += 1
        value = Value(tensor, self._count, None, base)
        value.origin = operation
        self.mark(tensor, value)
        return value

    def mark(self, tensor: Tensor, value: Value) -> None:
        """``tensor`` is ``value``, which an operation of the tape made."""
        tensor._anyshape = self._token, value
        if self.memories is not None:
            self.memories.add(tensor, value)

    # Which one it is ------------------------------------------------------------------------------------------------

    def lift(self, item: Any, found: list[Value]) -> Any:
        """``item`` with values in place of tensors; they are added to ``found``."""
        kind = type(item)
        if kind in NUMBERS:
            return item
        if kind in PLAIN or isinstance(item, Tensor):
            value = self.value(item)
            found.append(value)
            return value
        if kind is tuple:
            return tuple([self.lift(each, found) for each in item])
        if kind is list:
            if item and type(item[0]) is int:  # sizes
                return list(item)
            return [self.lift(each, found) for each in item]
        if kind is dict:
            return {name: self.lift(each, found) for name, each in item.items()}
        return item

    def value(self, tensor: Tensor) -> Value:
        """The value of ``tensor``; refuses one that is neither input nor weight nor made in this forward."""
        known = self._known.get(id(tensor))
        if known is not None:
            return known[0]
        mark = getattr(tensor, "_anyshape", None)
        if mark is not None and mark[0] is self._token:  # another recording may have marked a tensor that lived on
            return mark[1]
        if weight := self._weights.find(tensor):
            value = self.leaf(tensor, weight)
            if weight in self.turned:
                value.stride = contiguous(value.shape)
            return value
        if self.memories is not None and (value := self.memories.find(tensor)) is not None:
            return value
        if id(tensor) in self._held:
            return self.leaf(tensor, OfPatch.of(tensor))
        earlier = self._earlier.get(id(tensor))
        if earlier is not None and earlier() is tensor:
            return self.constant(tensor, None, None)
        literal = (not tensor.shape and tensor.device.type == "cpu") or (
            tensor.ndim == 1 and tensor.dtype == torch.int64
        )
        if literal and sys.getrefcount(tensor) <= HELD_BY_THE_CALL:
            return self.constant(tensor, None, None)
        if not self._refuse.reason and is_memoised(tensor):  # there will be no tape else
            value = self.constant(tensor, None, None)
            self.memoised.add(value)
            return value
        self._refuse(say("no_origin", shape=list(tensor.shape)))
        return self.leaf(tensor, NOWHERE)

    def strangers_in(self, module: nn.Module) -> bool:
        """Whether a tensor of unknown origin lies in the model by now: the forward itself has put it there."""
        strangers = {id(tensor) for value, tensor in self._known.values() if value.leaf is NOWHERE}
        parts = (part for _, part in modules_of(module)) if strangers else ()
        return any(id(tensor) in strangers for part in parts for _, tensor in tensors_of(part))

    def known(self, tensor: Tensor) -> Value | None:
        """The value of a leaf; None if the forward has not met this tensor as one."""
        found = self._known.get(id(tensor))
        return found and found[0]

    def forget(self, tensor: Tensor) -> None:
        """Lets go of a constant that is none any more. Its mark says what it is."""
        self._known.pop(id(tensor), None)

    @property
    def count(self) -> int:
        """How many leaves there are."""
        return len(self._known)

    def forget_since(self, count: int) -> None:
        """Lets go of the leaves after the first ``count``, if none of those was forgotten meanwhile."""
        while len(self._known) > count:
            self._known.popitem()

    def has_a_name(self, tensor: Tensor) -> bool:
        """Whether the forward reads ``tensor`` not as a patch's alone, but as an input or a weight of the model."""
        known = self.known(tensor)
        return known is not None and not isinstance(known.leaf, OfPatch) or self._weights.find(tensor) is not None

    def depends(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an input, or was made from one."""
        known = self._known.get(id(tensor))
        mark = getattr(tensor, "_anyshape", None)
        if known is not None:
            return type(known[0].leaf) is Input
        return mark is not None and mark[0] is self._token

    def constants(self) -> Iterator[Value]:
        """Those that are still constant."""
        return (value for value, _ in self._known.values() if value.is_constant)

    def close(self, output: Any, keep: bool) -> None:
        """Takes our marks off what lives on, and lets go of every tensor and of the model.

        keep: constants are known in the module's next recordings, too.
        """
        for value, tensor in self._known.values():
            tensor.__dict__.pop("_anyshape", None)
            if value.is_constant and keep:
                self._earlier[id(tensor)] = weakref.ref(tensor)
        for name in [name for name, tensor in self._earlier.items() if tensor() is None]:
            del self._earlier[name]
        for tensor in tensors_in(output):
            tensor.__dict__.pop("_anyshape", None)
        self._known.clear()
        self._held.clear()
        self._fetched.clear()
        self._weights = self.memories = None
