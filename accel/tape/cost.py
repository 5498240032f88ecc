"""Counts what operations cost: multiplications of products, convolutions and attention. The rest is small."""

import math
from collections.abc import Collection, Iterable

import torch

from .traits import ATTENTION, ATTENTIONS, is_product
from .values import Operation, Tape, Value

PRODUCTS = frozenset("linear mm bmm matmul addmm baddbmm _scaled_mm _int_mm int8_linear".split())
CONVOLUTIONS = frozenset("conv1d conv2d conv3d convolution conv_transpose2d conv_transpose3d".split())
ATTENDS = frozenset((ATTENTION, *ATTENTIONS))

# Multiplications in half precision that a multiprocessor makes at once, by compute capability (NVIDIA's whitepapers).
AT_ONCE = {(8, 0): 1024, (9, 0): 2048, (10, 0): 4096}
FEWEST = 512  # of all others
PACE = 0.75e9  # of these a second: half of a usual clock, as much as models reach with all that lies between products
LAUNCH = 35e-6  # seconds of the host for each recorded operation, without a graph: SDXL's 2,700 took an H200's 94 ms


def waits_for_host(tape: Tape) -> bool:
    """Whether a program that no graph can hold would wait for the host: ComfyUI's own forward launches less."""
    return tape.device.type == "cuda" and not keeps_busy(tape.operations, rate(tape.device))


def rate(device: torch.device) -> float:
    """Multiplications that this GPU makes in a second, about."""
    card = torch.cuda.get_device_properties(device)
    return card.multi_processor_count * AT_ONCE.get((card.major, card.minor), FEWEST) * PACE


def keeps_busy(operations: Collection[Operation], rate: float) -> bool:
    """Whether they keep a GPU of this rate busy for longer than the host launches them.

    By counts and by no clock: what runs must be the same each time, for the same seed.
    """
    return of_all(operations) >= rate * LAUNCH * len(operations)


def of_all(operations: Iterable[Operation]) -> float:
    """Multiplications of all of them."""
    return sum(map(multiplications, operations))


def multiplications(operation: Operation) -> float:
    """Of one operation, from the sizes that were recorded."""
    tensors = [value for value in operation.inputs if value.shape]
    out = next((value for value in operation.outputs if value is not None), None)
    if out is None or len(tensors) < 2:
        return 0.0
    if getattr(operation.func, "is_product", False):  # of a quantised weight
        return float(out.numel) * tensors[0].shape[-1]
    if operation.opaque:  # another node's attention, say
        return _attention(tensors)
    name = operation.traits.name
    if name in ATTENDS:
        return _attention(tensors)
    if name in PRODUCTS or is_product(name):
        first = tensors[1] if name in ("addmm", "baddbmm") and len(tensors) > 2 else tensors[0]
        return float(out.numel) * first.shape[-1]
    if name in CONVOLUTIONS:
        return float(out.numel) * math.prod(tensors[1].shape[1:])
    return 0.0


def _attention(tensors: list[Value]) -> float:
    """Of queries, keys and values [..., tokens, channels]."""
    if len(tensors) < 3 or len(tensors[1].shape) < 2:
        return 0.0
    return 2.0 * tensors[0].numel * tensors[1].shape[-2]
