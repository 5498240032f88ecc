"""Stores attention's result token by token, as the linear layer after it reads it.

torch lays attention's result out like its queries. Where a kernel of ours makes the queries [B, H, T, D], it can store
them token by token, a token's heads side by side: then the result lies so too, and joining its heads copies nothing.
Exact: the same numbers in another order of memory.
"""

from collections.abc import Sequence

from .. import group
from ..layout import contiguous, lie_alike
from ..traits import ATTENTIONS
from ..values import Operation, Readers, Tape, Value
from .attention import Attention, replace
from .attention_kernel import turns


def store_by_tokens(tape: Tape) -> str:
    """Attention whose queries are made for it alone, and whose result is only turned to [B, T, H, D]."""
    attentions = [operation for operation in tape.operations if _is_attention(operation)]
    if not attentions:
        return ""
    readers, given_back = tape.readers(), set(tape.outputs)
    for operation in attentions:
        if len(operation.outputs[0].shape) != 4:
            continue
        result, *others = operation.outputs
        if any(other in readers for other in others):
            continue
        turned = readers.get(result, [])
        chains = [_chain(value, readers) for value in operation.args[:3]]
        if result in given_back or not chains[0] or not turned or not all(map(turns, turned)):
            continue
        for value in {value: None for value in [result, *(value for chain in chains for value in chain)]}:
            value.stride, value.order = _strides(value.shape), (0, 2, 1, *range(3, len(value.shape)))
        for view in turned:
            view.outputs[0].stride = contiguous(view.outputs[0].shape)
        if not operation.opaque:
            replace(operation, "")
        operation.func.stride, operation.func.by_strides = result.stride, True
    return ""


def _is_attention(operation: Operation) -> bool:
    if operation.opaque:
        return isinstance(operation.func, Attention)
    return operation.traits.name in ATTENTIONS


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of [B, H, T, ...] in memory as [B, T, H, ...]."""
    turned = contiguous((shape[0], shape[2], shape[1], *shape[3:]))
    return (turned[0], turned[2], turned[1], *turned[3:])


def _chain(value: Value, readers: Readers) -> list[Value]:
    """``value`` and what it is a view of, if a kernel may store all that in another order; else nothing."""
    found = [value]
    while value.base is not None and value.origin is not None and len(value.origin.inputs) == 1:
        value = value.origin.inputs[0]
        found.append(value)
    alone = all(map(_is_read_once, found, [readers.get(each, ()) for each in found]))
    alike = all(
        each.shape[:3] == value.shape[:3] and lie_alike(each.shape, each.stride, contiguous(each.shape))
        for each in found
    )
    made = value.base is None and value.leaf is None and value.origin is not None
    return found if made and alone and alike and group.probably_fuses(value.origin) else []


def _is_read_once(value: Value, readers: Sequence[Operation]) -> bool:
    return len(readers) == 1 and readers[0].inputs.count(value) == 1
