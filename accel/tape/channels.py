"""Which inputs of a tape have channels that belong to the model: a block's tokens have, whatever the call.

The last size of an input is a layer's where a norm or a product with a weight of so many channels reads it, and the
model's where an element-wise operation adds it to what has so many: the sizes are equal then, as neither is 1. What
only copies an input, or computes each of its numbers for itself, may lie between.
"""

from collections.abc import Iterable, Iterator

from . import views
from .traits import ELEMENTWISE, is_product
from .values import Input, Operation, Size, Tape, Value, Weight

NORMS = frozenset(("rms_norm", "layer_norm", "native_layer_norm"))
PARTS = frozenset("slice narrow chunk split split_with_sizes unsqueeze".split())


def mark(inputs: Iterable[Value]) -> bool:
    """The channels of these inputs belong to the model. Returns whether that is news."""
    new = [value for value in dict.fromkeys(inputs) if not value.sizes[-1].static]
    for value in new:
        value.sizes = (*value.sizes[:-1], Size(value.shape[-1], static=True))
    return bool(new)


def of_layers(tape: Tape) -> Iterator[Value]:
    """Inputs that go through layers with a number, or a column, for each of their channels."""
    for operation in tape.operations:
        if not operation.opaque and operation.args and isinstance(operation.args[0], Value):
            source = _source(operation.args[0])
            if source is not None and _is_layer(operation):
                yield source


def met(tape: Tape) -> Iterator[Value]:
    """Inputs whose channels meet the model's in an element-wise operation. The tape's sizes are known."""
    for operation in tape.operations:
        if operation.opaque or operation.traits.name not in ELEMENTWISE:
            continue
        for value in operation.inputs:
            source = _source(value)
            if source is None or views.is_table(value):
                continue
            others = [other.sizes[-1] for other in operation.inputs if other is not value and other.sizes]
            if any(size.static and size.value == value.shape[-1] for size in others):
                yield source


def _is_layer(operation: Operation) -> bool:
    name, x = operation.traits.name, operation.args[0]
    weights = [value for value in operation.inputs[1:] if type(value.leaf) is Weight]
    if name in NORMS:
        return any(weight.shape == x.shape[-1:] for weight in weights)
    return is_product(name) and any(value is operation.args[1] and value.shape[1:] == x.shape[-1:] for value in weights)


def _source(value: Value) -> Value | None:
    """The input that ``value`` is a copy of, as far as its channels go; None if it is of none, or has but one."""
    if not value.shape or value.shape[-1] == 1:
        return None
    while (maker := value.origin) is not None:
        if maker.opaque or maker.writes is not None or len(maker.inputs) != 1:
            return None
        kept = maker.traits.name in PARTS | views.SAME | ELEMENTWISE
        if not kept or maker.inputs[0].shape[-1:] != value.shape[-1:]:
            return None
        value = maker.inputs[0]
    return value if type(value.leaf) is Input else None
