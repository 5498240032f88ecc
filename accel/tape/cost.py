"""Counts what operations cost: multiplications of products, convolutions and attention. The rest is small."""

import math
from collections.abc import Iterable

from .traits import ATTENTION, ATTENTIONS, is_product
from .values import Operation, Value

PRODUCTS = frozenset("linear mm bmm matmul addmm baddbmm _scaled_mm _int_mm int8_linear".split())
CONVOLUTIONS = frozenset("conv1d conv2d conv3d convolution conv_transpose2d conv_transpose3d".split())
ATTENDS = frozenset((ATTENTION, *ATTENTIONS))


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
