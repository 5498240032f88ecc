"""What a tape holds: values, and the operations that make them.

A value is what a tensor held at one moment of the recorded forward. It knows its shape, strides and dtype, and which of
its sizes belong to the model (``Size.static``): only those may be written into a kernel.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .traits import Traits, traits

LARGE = 2**31  # a number from here on is one of 64 bits
NESTED = 6  # containers within one another that are looked into: some hold themselves


class Size:
    """The length of one dimension of one value.

    static: it belongs to the model (channels, heads) and is the same at every size of the input. parts: the dimensions
    that were merged into this one, so that a later split finds them again. joined: those that were put one behind the
    other, so that a later slice does. cut: (it and its neighbours, the sizes that they were cut from), so that a later
    reshape back does.
    """

    __slots__ = ("value", "static", "parts", "joined", "cut", "_same")

    def __init__(
        self, value: int, static: bool = False, parts: tuple["Size", ...] = (), joined: tuple["Size", ...] = ()
    ) -> None:
        self.value, self.static, self.parts, self.joined = value, static, parts, joined
        self.cut: tuple[Sizes, Sizes] | None = None
        self._same: Size | None = None

    @property
    def first(self) -> "Size":
        """One for all sizes that have met: they are equal at every size of the call."""
        size = self
        while size._same is not None:
            size = size._same
        if self._same is not None:
            self._same = size  # the next look is short
        return size

    def meet(self, other: "Size") -> None:
        """Two sizes belong to the same dimension of one result."""
        if self.first is not other.first:
            other.first._same = self.first

    def __repr__(self) -> str:
        return f"{self.value}{'' if self.static else '?'}"


ONE = Size(1, static=True)
Sizes = tuple[Size, ...]


@dataclass(frozen=True)
class Input:
    """A leaf: one of the call's tensors, by its place among the arguments."""

    index: int


@dataclass(frozen=True)
class Weight:
    """A leaf: a parameter, buffer or tensor attribute, by its module's path and its name there."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class Constant:
    """A leaf: a tensor made of sizes and numbers of the model alone, so it is the same at each replay of this tape.

    number: what it is full of, if that is known.
    """

    tensor: Tensor
    number: Any = None


@dataclass(frozen=True, eq=False)
class Derived:
    """A leaf: made of weights' addresses each time a program is bound to them, by ``make(*sources)``.

    Never of their numbers, of which others may be written into the same memory.
    """

    make: Callable[..., Tensor]
    sources: tuple["Value", ...]


@dataclass(frozen=True, eq=False)
class Resident(Derived):
    """A leaf: what a layer copies from main memory at each call, kept on the device. Copied again in each run."""


@dataclass(frozen=True, eq=False)
class Spread:
    """A leaf: what a weight is as a whole, for each of so many rows. Made when a run begins."""

    source: "Value"  # of one element
    rows: int


Leaf = Input | Weight | Constant | Derived | Spread


class Value:
    """One tensor at one moment; ``leaf`` or ``origin`` says where it is from. base: whose memory it shares."""

    __slots__ = ("shape", "stride", "dtype", "device", "sizes", "origin", "leaf", "base", "number", "order", "turns")

    def __init__(self, tensor: Tensor, number: int, leaf: Leaf | None = None, base: "Value | None" = None) -> None:
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.stride: tuple[int, ...] = tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.number = number  # in order of recording
        self.origin: Operation | None = None
        self.leaf, self.base = leaf, base
        self.sizes: Sizes = ()
        self.order: tuple[int, ...] | None = None  # of its dimensions in memory, where a rule has chosen it
        self.turns = False  # whether it is an input of rotations [1, N, 1, D / 2, 2, 2]; 1 is so for every call

    @classmethod
    def made(
        cls, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device,
        leaf: Leaf | None = None, number: int = 0, base: "Value | None" = None,
    ) -> "Value":  # fmt: skip
        """A value that no recorded tensor stands for."""
        value = object.__new__(cls)
        value.shape, value.stride, value.dtype, value.device = shape, stride, dtype, device
        value.number, value.origin, value.leaf, value.base = number, None, leaf, base
        value.sizes, value.order, value.turns = (), None, False
        return value

    @property
    def root(self) -> "Value":
        """The value that owns the memory."""
        return self.base or self

    @property
    def is_constant(self) -> bool:
        """Whether it is the same at every replay."""
        return type(self.leaf) is Constant

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def is_large(self) -> bool:
        """Whether its elements, or how far apart they lie, are counted in 64 bits."""
        count, reach = 1, 0
        for n, stride in zip(self.shape, self.stride, strict=True):
            count *= n
            reach += (n - 1) * stride
        return count >= LARGE or reach >= LARGE

    def part(self, shape: tuple[int, ...], sizes: Sizes) -> "Value":
        """A part of this value's memory, as a value of its own."""
        value = Value.made(shape, self.stride, self.dtype, self.device, None, self.number, self.root)
        value.sizes, value.order = sizes, self.order
        return value

    def twin(self) -> "Value":
        """Another value of this form and these sizes."""
        value = self.again(self.number, self.base)
        value.sizes, value.order, value.origin, value.leaf = self.sizes, self.order, self.origin, self.leaf
        return value

    def again(self, number: int, base: "Value | None") -> "Value":
        """A value of this form that another operation makes."""
        return Value.made(self.shape, self.stride, self.dtype, self.device, None, number, base)

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor of this form; what is in it is void."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def scalar(self) -> float | None:
        """The number that a constant of one element on the CPU stands for, as eager's operations take it."""
        if self.is_constant and not self.shape and self.device.type == "cpu":
            return self.leaf.tensor.item()
        return None

    def __repr__(self) -> str:
        return f"v{self.number}{list(self.sizes or self.shape)}"


@dataclass(eq=False, slots=True)
class Operation:
    """One recorded call. In ``args`` and ``kwargs`` values stand for tensors.

    kind: how the program may run it, see ``group.classify``. writes: the value whose memory an in-place operation
    changes (its output is that memory afterwards). runs: which dimensions of a reshape hold the same elements. like:
    the operation of another block that it was copied from. alike: whether its values have the sizes of that one's.
    """

    func: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value | None] = field(default_factory=list)
    writes: Value | None = None
    opaque: bool = False  # a Python function, called as it is
    kind: str = ""
    runs: Any = None
    like: "Operation | None" = None
    alike: bool = False
    _traits: tuple[Any, Traits] | None = field(default=None, init=False)  # of which function

    @property
    def traits(self) -> Traits:
        """Those of its function; of one of torch's alone."""
        if self._traits is None or self._traits[0] is not self.func:
            self._traits = self.func, traits(self.func)
        return self._traits[1]

    def __repr__(self) -> str:
        return f"{self.outputs} = {self.func}({self.args}, {self.kwargs})"


Readers = dict[Value, list[Operation]]


@dataclass
class Tape:
    """One recorded forward. ``output``: the forward's result with values in place of tensors.

    permuted: weights that may lie in channels_last, as what reads them does not mind. ahead: operations that another
    size of the call may have, so that their kernels are compiled with the others. lean: memory counts for more than
    time, as in a VAE, whose features are a hundred times as large as its weights. So nothing that is only as large as a
    feature is kept between two calls, and nothing is kept alive to be read later. resident: there is room on the device
    for what layers copy there from main memory at each call. streamed: weights are on the device only while a step
    reads them (see ``fetched``), so no step reads those of many layers.
    """

    operations: list[Operation]
    inputs: list[Value]
    output: Any
    device: torch.device
    permuted: set[Value] = field(default_factory=set)
    ahead: list[Operation] = field(default_factory=list)
    lean: bool = False
    resident: bool = False
    streamed: bool = False

    @property
    def outputs(self) -> list[Value]:
        """The values in ``output``."""
        return list(values_in(self.output))

    def readers(self) -> Readers:
        """The operations that read each value, once each."""
        found: Readers = {}
        for operation in self.operations:
            for value in operation.inputs:
                known = found.get(value)
                if known is None:
                    found[value] = [operation]
                elif known[-1] is not operation:
                    known.append(operation)
        return found

    def dissolve(self) -> None:
        """Lets go of the operations, and of what ties them to values: thousands of cycles for the garbage collector."""
        for operation in self.operations:
            for value in operation.outputs:
                if value is not None:
                    value.origin = None
            operation.args, operation.kwargs, operation.inputs, operation.outputs = (), {}, [], []
            operation.like = None
        self.operations, self.ahead = [], []

    def leaves(self) -> list[Value]:
        """Every leaf that an operation reads, or that is given back."""
        read = [value for operation in self.operations for value in operation.inputs if value.leaf is not None]
        return list(dict.fromkeys(read + [value for value in self.outputs if value.leaf is not None]))


def items_in(structure: Any, kind: type, depth: int = NESTED) -> Iterator[Any]:
    """The items of ``kind`` in nested lists, tuples and dicts."""
    if isinstance(structure, kind):
        yield structure
    elif depth and isinstance(structure, (list, tuple, dict)):
        for item in structure.values() if isinstance(structure, dict) else structure:
            yield from items_in(item, kind, depth - 1)


def values_in(structure: Any) -> Iterator[Value]:
    """As ``items_in``."""
    return items_in(structure, Value)


def tensors_in(structure: Any) -> Iterator[Tensor]:
    """As ``items_in``."""
    return items_in(structure, Tensor)


ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def replaced(structure: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    """``structure`` with ``new(item)`` in place of each item of ``kind``."""
    if isinstance(structure, kind):
        return new(structure)
    form = type(structure)
    if form is tuple or form is list:
        items = [item if type(item) in ATOMS else replaced(item, kind, new) for item in structure]
        return items if form is list else tuple(items)
    if isinstance(structure, dict):
        return {name: replaced(item, kind, new) for name, item in structure.items()}
    return structure


def once_each(new: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``new`` for ``replaced``, where what is there twice is one thing, in its place too."""
    made: dict[int, tuple[Any, Any]] = {}  # each with what it is made of, whose id is nobody else's meanwhile

    def once(item: Any) -> Any:
        if id(item) not in made:
            made[id(item)] = item, new(item)
        return made[id(item)][1]

    return once


def wrapped(item: Any, proxy: Callable[[tuple, Callable[..., Any]], Any], place: tuple) -> Any:
    """Nested containers with ``proxy(place, function)`` in place of each function in them."""
    if isinstance(item, dict):
        return {name: wrapped(each, proxy, (*place, name)) for name, each in dict.items(item)}
    if isinstance(item, (list, tuple)):
        return type(item)([wrapped(each, proxy, (*place, number)) for number, each in enumerate(item)])
    return proxy(place, item) if callable(item) and not isinstance(item, (type, Tensor)) else item
