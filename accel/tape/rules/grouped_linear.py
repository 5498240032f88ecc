"""Many small linear layers of one input in one launch: a prompt's keys and values for every block, a time step's
embedding for every residual block.

Each alone is too small to fill the card. Weights stay where they are: the kernel reads their addresses from a table,
which is made again whenever a program is bound to weights.
"""

import math
from functools import partial

import torch

from ...kernels import operations as ours
from ..traits import aten
from ..values import Derived, Operation, Tape, Value, Weight

LESS_EXACT = (
    "Small linear layers of one input, such as a prompt's keys and values, run as one kernel: their sums are in "
    "another order, and as exact"
)
HALVES = (torch.float16, torch.bfloat16)
FEWEST = 8  # layers; queries, keys and values of one block are three, and large
MOST_ROWS = 2048  # of the input, above which each layer fills the card by itself
ALIGNED = 8  # channels of the input, for wide loads


def join(tape: Tape) -> str:
    """Linear layers of few rows that share their input. Sums in another order than eager."""
    groups: dict[tuple, list[Operation]] = {}
    for operation in tape.operations:
        if (key := _kind(operation)) is not None:
            groups.setdefault(key, []).append(operation)
    groups = {key: layers for key, layers in groups.items() if len(layers) >= FEWEST}
    first: dict[int, Operation] = {}
    gone: set[int] = set()
    for layers in groups.values():
        made = _joined(layers)
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


def _kind(operation: Operation) -> tuple | None:
    """What layers must have in common; None if this is none."""
    if operation.opaque or operation.func is not aten.linear.default or operation.kwargs:
        return None
    x, weight, *bias = operation.args
    bias = [each for each in bias if each is not None]
    leaves = all(isinstance(each.leaf, Weight) and each.dtype == x.dtype for each in (weight, *bias))
    if not leaves or x.dtype not in HALVES or len(weight.shape) != 2 or weight.shape[1] % ALIGNED:
        return None
    return x, bool(bias)


def _joined(layers: list[Operation]) -> Operation:
    from ...kernels import grouped_linear as kernel

    x = layers[0].args[0]
    weights = [layer.args[1] for layer in layers]
    biases = [layer.args[2] for layer in layers if len(layer.args) > 2 and layer.args[2] is not None]
    rows = kernel.tiles([weight.shape[0] for weight in weights])
    leaf = Derived(partial(ours.table_of, len(weights)), (*weights, *biases))
    shape = rows, kernel.COLUMNS
    table = Value.made(shape, (kernel.COLUMNS, 1), torch.int64, x.device, leaf)
    args = (x, weights, biases or [None] * len(weights), table)
    outputs: list[Value | None] = [layer.outputs[0] for layer in layers]
    return Operation(ours.grouped_linear, args, {}, [x, *weights, *biases, table], outputs)
