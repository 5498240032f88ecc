"""Which inputs of a tape have channels that belong to the model: a block's tokens have, whatever the call.

The last size of an input is a layer's where a norm or a product with a weight of so many channels reads it, or a
modulated norm; and the model's where an element-wise operation adds it to what has so many: the sizes are equal then,
as neither is 1. What only copies an input, or computes each of its numbers for itself, may lie between.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import views
from .traits import ELEMENTWISE, NORMS, is_product
from .values import Operation, Size, Tape, Value, Weight

PARTS = frozenset("slice narrow chunk split split_with_sizes unsqueeze".split())
KEPT = PARTS | views.SAME | ELEMENTWISE
MODULATED = frozenset(("adaln", "rms_adaln"))  # comfy-kitchen's norms over channels


class Reader(NamedTuple):
    """An operation, what it reads, and the input that this is a copy of as far as its channels go."""

    operation: Operation
    value: Value
    source: Value


def readers(tape: Tape) -> list[Reader]:
    """Who reads the inputs; of blocks that are copies of an earlier one, that one."""
    sources = {value: value for value in tape.inputs if value.shape and value.shape[-1] > 1}
    found = []
    for operation in tape.operations:
        if operation.opaque or operation.like is not None:
            continue
        own = [value for value in operation.inputs if value in sources]
        found += [Reader(operation, value, sources[value]) for value in own]
        if own and len(operation.inputs) == 1 and operation.writes is None and operation.traits.name in KEPT:
            same = [value for value in operation.outputs if value and value.shape[-1:] == own[0].shape[-1:]]
            sources |= dict.fromkeys(same, sources[own[0]])
    return found


def mark(inputs: Iterable[Value]) -> bool:
    """The channels of these inputs belong to the model. Returns whether that is news."""
    new = [value for value in dict.fromkeys(inputs) if not value.sizes[-1].static]
    for value in new:
        value.sizes = (*value.sizes[:-1], Size(value.shape[-1], static=True))
    return bool(new)


def of_layers(found: Iterable[Reader]) -> Iterator[Value]:
    """Inputs that go through layers with a number, or a column, for each of their channels."""
    for operation, value, source in found:
        if operation.args[:1] == (value,) and _is_layer(operation):
            yield source


def met(found: Iterable[Reader]) -> Iterator[Value]:
    """Inputs whose channels meet the model's in an element-wise operation. The tape's sizes are known."""
    for operation, value, source in found:
        if operation.traits.name in ELEMENTWISE:
            others = [other.sizes[-1] for other in operation.inputs if other is not value and other.sizes]
            if any(size.static and size.value == value.shape[-1] for size in others):
                yield source


def _is_layer(operation: Operation) -> bool:
    name, x = operation.traits.name, operation.args[0]
    weights = [value for value in operation.inputs[1:] if type(value.leaf) is Weight]
    if name in MODULATED:
        return True
    if name in NORMS:
        return any(weight.shape == x.shape[-1:] for weight in weights)
    return is_product(name) and any(value is operation.args[1] and value.shape[1:] == x.shape[-1:] for value in weights)
