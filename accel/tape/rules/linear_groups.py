"""Many small linear layers in one launch: a prompt's keys and values for every block, a time step's embedding for every
residual block, the two layers behind each other that modulate every part of a block.

Each alone is too small to fill the card. They share their input, or each reads a result of layers that do. Weights stay
where they are: the kernel reads their addresses from a table, which is made again whenever a program is bound to them.
"""

import math
from functools import partial

import torch

from ...kernels import operations as ours
from ..traits import HALVES, aten
from ..values import Derived, Operation, Tape, Value, Weight

LESS_EXACT = (
    "Small linear layers of one input, such as a prompt's keys and values, run as one kernel: their sums are in "
    "another order, and as exact"
)
FEWEST = 8  # layers; queries, keys and values of one block are three, and large
MOST_ROWS = 2048  # of the input, above which each layer fills the card by itself
MOST_WEIGHTS = 1 << 22  # of a layer: reading more takes longer than a launch, and fills the card too
ALIGNED = 8  # channels of the input, for wide loads


def join(tape: Tape) -> str:
    """Joins linear layers of few rows that share an input, and those after them. Sums in another order than eager."""
    if tape.streamed:  # all their weights at once may be a large part of the model
        return ""
    first: dict[int, Operation] = {}
    gone: set[int] = set()
    products = [operation for operation in tape.operations if operation.func is aten.linear.default]
    for shared in (True, False):
        groups: dict[tuple, list[Operation]] = {}
        for operation in products:
            if id(operation) not in gone and (key := _kind(operation, shared)) is not None:
                groups.setdefault(key, []).append(operation)
        for layers in groups.values():
            if len(layers) < FEWEST:
                continue
            made = _joined(layers, shared)
            if math.prod(layers[0].args[0].shape[:-1]) > MOST_ROWS:
                tape.ahead.append(made)
                continue
            for layer in layers:
                layer.outputs[0].origin = made
            first[id(layers[0])] = made
            gone.update(id(layer) for layer in layers)
    if not first:
        return ""
    found: list[Operation] = []
    for operation in tape.operations:
        if id(operation) in first:
            found.append(first[id(operation)])
        elif id(operation) not in gone:
            found.append(operation)
    tape.operations[:] = found
    return LESS_EXACT


def _kind(operation: Operation, shared: bool) -> tuple | None:
    """What layers must have in common; None if this is none. shared: they have one input, not one each."""
    if operation.opaque or operation.func is not aten.linear.default or operation.kwargs:
        return None
    x, weight, *bias = operation.args
    bias = [each for each in bias if each is not None]
    leaves = all(isinstance(each.leaf, Weight) and each.dtype == x.dtype for each in (weight, *bias))
    if not leaves or x.dtype not in HALVES or len(weight.shape) != 2 or weight.shape[1] % ALIGNED:
        return None
    if weight.numel > MOST_WEIGHTS:
        return None
    if shared:
        return x, bool(bias)
    before = x.origin
    return (id(before), x.shape, bool(bias)) if before is not None and before.func is ours.grouped_linear else None


def _joined(layers: list[Operation], shared: bool) -> Operation:
    from ...kernels import grouped_linear as kernel

    xs = [layer.args[0] for layer in (layers[:1] if shared else layers)]
    weights = [layer.args[1] for layer in layers]
    biases = [layer.args[2] for layer in layers if len(layer.args) > 2 and layer.args[2] is not None]
    rows = kernel.tiles([weight.shape[0] for weight in weights])
    leaf = Derived(partial(ours.table_of, len(weights), not shared), (*weights, *biases))
    table = Value.made((rows, kernel.COLUMNS), (kernel.COLUMNS, 1), torch.int64, xs[0].device, leaf)
    args = (xs, weights, biases or [None] * len(weights), table)
    outputs: list[Value | None] = [layer.outputs[0] for layer in layers]
    return Operation(ours.grouped_linear, args, {}, [*xs, *weights, *biases, table], outputs)
