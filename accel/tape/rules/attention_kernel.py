"""Runs attention by a kernel that needs no plan, straight from the projections' layout.

To a prompt it is faster than libraries, and between an image's own tokens about as fast, where the heads suit it. There
it is taken where cuDNN would have been, which plans each number of tokens at its first call, for longer than it runs.
Newer ComfyUI asks for FlashAttention there, which takes 1.5 to 1.7 times as long (docs/performance.md).
"""

import math

from ...kernels import operations as ours
from ..attention_choice import takes_plans
from ..layout import contiguous
from ..traits import ATTENTIONS, HALVES, aten, by_name
from ..values import Operation, Readers, Tape, Value
from . import edits

LESS_EXACT = "Attention runs on a kernel that needs no plan: its sums are in another order, and as exact"
PLANNED = "_scaled_dot_product_cudnn_attention"
ASKED_FOR = "_scaled_dot_product_flash_attention"  # by newer ComfyUI, in its place


def attend(tape: Tape) -> str:
    """Takes attention to up to 256 prompt tokens, and what would need a plan. Sums in another order than eager."""
    from ...kernels import flash_attention as kernel

    attentions = [each for each in tape.operations if not each.opaque and each.traits.name in ATTENTIONS]
    if not attentions:
        return ""
    readers, given_back = tape.readers(), set(tape.outputs)
    planned = {PLANNED, ASKED_FOR} if takes_plans(tape.device) else {PLANNED}
    changed = False
    for operation in attentions:
        found = _found(operation, readers, given_back, kernel.MAX_HEAD)
        if found is None:
            continue
        args, result = found
        q, k, _, heads = args
        own = _source(q) is _source(k)
        suits = operation.traits.name in planned and q.shape[2] // heads == kernel.HEAD
        if not suits and (own or k.shape[1] > kernel.MAX_KEYS):
            if not own:  # a shorter prompt will need it
                tape.ahead.append(Operation(ours.flash_attention, args, {}, list(args[:3]), [result]))
            continue
        joined = result.origin
        edits.become(joined, ours.flash_attention, args, args[:3])
        edits.own_memory(result, readers)
        changed = True
    return LESS_EXACT if changed else ""


def _found(operation: Operation, readers: Readers, given_back: set[Value], widest: int) -> tuple[tuple, Value] | None:
    """((queries, keys, values, heads), the result) of attention from [B, T, C] to [B, T, C]."""
    given = by_name(operation.func, operation.args, operation.kwargs)
    mask = given.get("attn_bias", given.get("attn_mask"))
    if mask is not None or given.get("is_causal") or given.get("dropout_p"):
        return None
    heads = [_tokens(value) for value in operation.args[:3]]
    if not all(heads) or any(other in readers or other in given_back for other in operation.outputs[1:]):
        return None
    (q, count, width), (k, other, _), (v, last, deep) = heads
    if not count == other == last or width != deep or width > widest or q.dtype not in HALVES:
        return None
    scale = given.get("scale")  # the usual one may be given as a number
    if scale is not None and not math.isclose(scale, width**-0.5):
        return None
    if _source(q) is None or k.shape != v.shape or k.shape[0] != q.shape[0]:
        return None
    result = _joined(operation.outputs[0], readers, given_back)
    if result is None or result.shape != q.shape:
        return None
    return (q, k, v, count), result


def _tokens(value: Value) -> tuple[Value, int, int] | None:
    """([B, T, C], heads, their width) of the heads [B, H, T, D] that are a view of it."""
    turned = value.origin
    if turned is None or not turns(turned):
        return None
    cut = turned.inputs[0].origin
    if cut is None or cut.opaque or cut.traits.name not in ("view", "reshape", "unflatten"):
        return None
    tokens, heads = cut.inputs[0], cut.outputs[0]
    grown = tokens.origin  # some write [B, T, C, 1] in between
    if grown is not None and not grown.opaque and grown.traits.name == "unsqueeze" and tokens.shape[-1:] == (1,):
        tokens = grown.inputs[0]
    whole = len(tokens.shape) == 3 and len(heads.shape) == 4 and tokens.shape[:2] == heads.shape[:2]
    if not whole or tokens.stride != contiguous(tokens.shape):
        return None
    return tokens, heads.shape[2], heads.shape[3]


def turns(operation: Operation) -> bool:
    """Whether it is ``transpose(1, 2)`` of four dimensions."""
    if operation.opaque or operation.traits.name != "transpose" or len(operation.outputs[0].shape) != 4:
        return False
    return {dim % 4 for dim in operation.args[1:3]} == {1, 2}


def _joined(value: Value, readers: Readers, given_back: set[Value]) -> Value | None:
    """Heads [B, H, T, D] that are only turned and joined to [B, T, C]: that value."""
    for name in ("transpose", "reshape"):
        (reader, *others) = readers.get(value, [None])
        if reader is None or others or value in given_back or reader.opaque or reader.writes is not None:
            return None
        known = reader.traits.name
        if name == "transpose" and not turns(reader):
            return None
        if name == "reshape" and known not in ("reshape", "view", "flatten", "_unsafe_view"):
            return None
        value = reader.outputs[0]
    return value if len(value.shape) == 3 and value.stride == contiguous(value.shape) else None


def _source(value: Value) -> Value | None:
    """What a linear layer made ``value`` of; None if it is no such result."""
    made = value.origin
    while made is not None and not made.opaque and made.traits.name in ("chunk", "split", "alias"):
        made = made.inputs[0].origin
    if made is None or made.opaque or made.func is not aten.linear.default:
        return None
    return made.args[0]
