"""Takes comfy-kitchen's rotary embeddings and modulated norms apart, so that they fuse with what is around them.

Newer versions of ComfyUI call that library's operations, and to a tape each is one call. Here is what they compute, in
plain torch operations; these take the call's place where a neighbour fuses, and where a norm is part of it. Else a call
is one launch already. An int8 layer that a model calls directly, with an activation of its input, becomes the
activation and the library's operation, which ``int8`` goes on with.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import group, static_sizes
from ..layout import lie_alike, outermost_first
from ..library_calls import Called
from ..record import Recorder, record
from ..values import Constant, Input, Operation, Readers, Tape, Value, replaced
from . import edits
from .int8 import LAYER

META = torch.device("meta")


def _pairs(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """x [..., D] turned in pairs of neighbours; freqs_cis [..., D / 2, 2, 2], a matrix for each pair."""
    pairs = x.to(freqs_cis.dtype).reshape(*x.shape[:-1], -1, 1, 2)
    table = _cut(x, freqs_cis)
    if table.dtype == torch.float32:
        out = torch.addcmul(table[..., 0] * pairs[..., 0], table[..., 1], pairs[..., 1])
    else:
        out = _turned(table, pairs)
    return out.reshape(x.shape).type_as(x)


def _halves(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """The same where a pair's second number lies in the second half of x."""
    pairs = x.reshape(*x.shape[:-1], 2, -1).movedim(-2, -1).unsqueeze(-2).to(freqs_cis.dtype)
    table = _cut(x, freqs_cis)
    if table.dtype == torch.float32:
        out = table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]
    else:
        out = _turned(table, pairs)
    return out.movedim(-1, -2).reshape(x.shape).type_as(x)


def _turned(table: Tensor, pairs: Tensor) -> Tensor:
    """In 16 bits throughout: the library's kernels round the second product, then the sum with the first (measured)."""
    return torch.addcmul(table[..., 1] * pairs[..., 1], table[..., 0], pairs[..., 0])


def _cut(x: Tensor, table: Tensor) -> Tensor:
    """A table for more tokens than there are is read from its beginning."""
    return table[:, :, : x.shape[2]] if x.shape[2] != 1 and table.shape[2] > x.shape[2] else table


def _normed(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), scale, epsilon)


def _apply_rope(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return _pairs(xq, freqs_cis), _pairs(xk, freqs_cis)


def _apply_rope_split_half(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return _halves(xq, freqs_cis), _halves(xk, freqs_cis)


def _rms_rope1(x: Tensor, freqs_cis: Tensor, scale: Tensor, epsilon: float = 1e-6) -> Tensor:
    return _pairs(_normed(x, scale, epsilon), freqs_cis.float())


def _rms_rope(
    q: Tensor, k: Tensor, freqs_cis: Tensor, q_scale: Tensor, k_scale: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    k_scale = q_scale if k_scale is None else k_scale
    return _rms_rope1(q, freqs_cis, q_scale, epsilon), _rms_rope1(k, freqs_cis, k_scale, epsilon)


def _rms_rope_split_half1(x: Tensor, freqs_cis: Tensor, scale: Tensor, epsilon: float = 1e-6) -> Tensor:
    return _halves(_normed(x, scale, epsilon), freqs_cis.float())


def _rms_rope_split_half(
    q: Tensor, k: Tensor, freqs_cis: Tensor, q_scale: Tensor, k_scale: Tensor | None = None, epsilon: float = 1e-6,
    rot_dim: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """rot_dim: only so many channels of each head are turned; 0 for all."""
    out = []
    for x, scale in ((q, q_scale), (k, q_scale if k_scale is None else k_scale)):
        x = _normed(x, scale, epsilon)
        turned = rot_dim or x.shape[-1]
        out.append(_halves(x[..., :turned], freqs_cis.float()))
        if turned != x.shape[-1]:
            out[-1] = torch.cat((out[-1], x[..., turned:]), dim=-1)
    return out[0], out[1]


def _adaln(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """In float32 up to the last rounding, unlike the same in plain torch."""
    return (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale.float()) + shift.float()).type_as(x)


def _rms_adaln(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return (F.rms_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale.float()) + shift.float()).type_as(x)


def _int8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    convrot: bool = False, convrot_groupsize: int = 256, input_act: str | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """others: what newer versions have besides; it says nothing here."""
    layer = torch.ops.comfy_kitchen.int8_linear
    return layer(ACTIVATIONS[input_act](x), weight, weight_scale, bias, _codes()[out_dtype], convrot, convrot_groupsize)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {  # rounded once more before the layer rounds to int8
    None: lambda x: x, "none": lambda x: x, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "swiglu": _swiglu,
}  # fmt: skip
TABLE: dict[str, Callable[..., Any]] = {
    "apply_rope": _apply_rope,
    "apply_rope1": _pairs,
    "apply_rope_split_half": _apply_rope_split_half,
    "apply_rope_split_half1": _halves,
    "rms_rope": _rms_rope,
    "rms_rope1": _rms_rope1,
    "rms_rope_split_half": _rms_rope_split_half,
    "rms_rope_split_half1": _rms_rope_split_half1,
    "adaln": _adaln,
    "rms_adaln": _rms_adaln,
}
MODULATED = ("adaln", "rms_adaln")


def decompose(tape: Tape) -> str:
    """Replaces comfy-kitchen's operations with plain ones. Exact but for contracted multiply-adds in its kernels."""
    ours = [operation for operation in tape.operations if _meaning(operation)]
    if not ours:
        return ""
    if any(map(_is_normed, ours)):
        static_sizes.annotate(tape)
    makers = {value: operation for operation in tape.operations for value in operation.outputs}
    readers = tape.readers()
    found: list[Operation] = []
    known: dict[tuple, Tape | None] = {}  # by form: a model's blocks are alike
    left = set(map(id, ours))
    for operation in tape.operations:
        plain = None
        if id(operation) in left and _pays(operation, makers, readers):
            form = edits.form_of(operation), tuple(value.stride for value in operation.outputs)
            if form not in known:
                known[form] = _written(operation)
            plain = known[form]
            if plain is not None and _is_normed(operation) and (table := _table(operation)) is not None:
                table.turns = True
        found += [operation] if plain is None else _grafted(plain, operation)
    tape.operations[:] = found
    for plain in filter(None, known.values()):
        plain.dissolve()
    for number, value in enumerate(value for operation in found for value in operation.outputs if value is not None):
        value.number = number
        value.base = value.base and value.base.root  # what was a result may be a view of one
    return ""


def _meaning(operation: Operation) -> Callable[..., Any] | None:
    """What an operation computes; None if it is not for this rule."""
    if isinstance(operation.func, Called):
        return _int8_linear if _is_layer(operation.func, operation.args, operation.kwargs) else None
    meaning = None if operation.opaque else TABLE.get(operation.traits.name)
    if meaning is None or not operation.func._schema.name.startswith("comfy_kitchen::"):
        return None
    return meaning if _agrees(operation.func, meaning) and _is_rounded_so(operation) else None


def _is_layer(called: Called, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether it is an int8 layer as it is known here. The library turns some inputs together with their activation."""
    own, known = _parameters(called.function), list(_parameters(_int8_linear))[:-1]
    if called.name != LAYER or list(own)[: len(known)] != known or len(args) > len(known):
        return False
    given = dict(zip(known, args, strict=False)) | kwargs
    act, plain = given.get("input_act"), (None, "none")
    others = all(name in own and given[name] == own[name].default for name in given.keys() - known)
    fits = act in plain or (act in ACTIVATIONS and not given.get("convrot"))
    return others and fits and given.get("out_dtype") in _codes()


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


@functools.cache
def _codes() -> dict[torch.dtype, int]:
    """How the library's operations are told a dtype; none in another version of it."""
    try:
        return dict(importlib.import_module("comfy_kitchen.backends.eager.quantization").DTYPE_TO_CODE)
    except (ImportError, AttributeError):
        return {}


@functools.lru_cache(maxsize=64)
def _agrees(func: Any, meaning: Callable[..., Any]) -> bool:
    """Whether their arguments have the same names: another version of the library may mean something else."""
    return [argument.name for argument in func._schema.arguments] == list(_parameters(meaning))


def _is_rounded_so(operation: Operation) -> bool:
    """Whether the library rounds where the meaning does. In 16 bits its plain torch for CPUs rounds more often."""
    x, on_gpu = operation.inputs[0], operation.outputs[0].device.type == "cuda"
    if operation.traits.name in MODULATED:
        return on_gpu or x.dtype == torch.float32
    table = _table(operation)
    return table is not None and (table.dtype == torch.float32 or (on_gpu and table.dtype == x.dtype))


def _table(operation: Operation) -> Value | None:
    return next((value for value in operation.inputs if len(value.shape) == 6), None)


def _pays(operation: Operation, makers: dict[Value, Operation], readers: Readers) -> bool:
    """Whether our kernels are faster: with a neighbour that fuses, or with a norm, whose rows must be known.

    The library's kernel norms and turns Z-Image's queries and keys in 0.148 ms, our two took 0.038 with an older
    ComfyUI (H200, 1024x1024).
    """
    if operation.opaque:  # a layer
        return True
    if _is_normed(operation):
        table = _table(operation)
        from_outside = table is not None and type(table.leaf) is Input  # to a block
        return from_outside or (table or operation.inputs[0]).sizes[-1].static
    return _fuses_before(operation, makers) or _fuses_after(operation, readers)


def _is_normed(operation: Operation) -> bool:
    name = "" if operation.opaque else operation.traits.name
    return name.startswith("rms") or name in MODULATED


def _fuses_before(operation: Operation, makers: dict[Value, Operation]) -> bool:
    """Whether a kernel may make what this operation turns, views between them or not."""
    for value in operation.inputs[: operation.inputs.index(_table(operation))]:
        while (maker := makers.get(value)) is not None and group.is_view(maker):
            value = maker.inputs[0]
        if maker is not None and group.probably_fuses(maker):
            return True
    return False


def _fuses_after(operation: Operation, readers: Readers) -> bool:
    """Whether a kernel may read what this operation makes, views between them or not."""
    left = [reader for value in operation.outputs for reader in readers.get(value, ())]
    while left:
        reader = left.pop()
        if group.is_view(reader):
            left += [each for value in reader.outputs for each in readers.get(value, ())]
        elif group.probably_fuses(reader):
            return True
    return False


def _written(operation: Operation) -> Tape | None:
    """What the operation means, as another tape on tensors without memory."""
    values = list(dict.fromkeys(operation.inputs))
    given = [value.empty(META) for value in values]
    tensors = dict(zip(values, given, strict=True))
    args, kwargs = replaced((operation.args, operation.kwargs), Value, tensors.__getitem__)

    def forward() -> list[Tensor]:
        out = _meaning(operation)(*args, **kwargs)
        made = zip(out if isinstance(out, tuple) else (out,), operation.outputs, strict=True)
        return [_laid_out(tensor, value.stride) for tensor, value in made]

    out, tape = record(forward, Recorder(given, nn.Module(), META))
    fits = all(
        lie_alike(tensor.shape, tensor.stride(), value.stride)
        for tensor, value in zip(out, operation.outputs, strict=True)
    )
    return tape if fits else None


def _laid_out(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """``tensor`` with its dimensions in memory in the order of ``stride``, as the operation's own result has them."""
    if lie_alike(tensor.shape, tensor.stride(), stride):
        return tensor
    order = outermost_first(stride)
    return tensor.permute(order).contiguous().permute(sorted(range(tensor.ndim), key=order.__getitem__))


def _grafted(plain: Tape, operation: Operation) -> list[Operation]:
    """The operations of ``plain`` on the inputs of ``operation``; the last ones make its results."""
    twins: dict[Value, Value] = dict(zip(plain.inputs, dict.fromkeys(operation.inputs), strict=True))
    found: list[Operation] = []
    for step in plain.operations:
        args, kwargs = replaced((step.args, step.kwargs), Value, twins.__getitem__)
        made = Operation(step.func, args, kwargs, [twins[value] for value in step.inputs])
        fixed = all(value.is_constant for value in made.inputs)  # a part of a table of the model's, say
        for value in step.outputs:
            twin = twins[value] = value.twin()
            twin.device, twin.base = made.inputs[0].device, value.base and twins[value.base].root
            twin.origin, twin.leaf = (None, Constant(_made(made))) if fixed else (made, None)
            made.outputs.append(twin)
        found += [] if fixed else [made]
    for old, value in zip(operation.outputs, plain.outputs, strict=True):
        end = twins[value]
        old.origin, old.base, old.stride = end.origin, end.base, end.stride
        end.origin.outputs[end.origin.outputs.index(end)] = old
    return found


def _made(operation: Operation) -> Tensor:
    args, kwargs = replaced((operation.args, operation.kwargs), Value, lambda value: value.leaf.tensor)
    with torch.inference_mode():
        return operation.func(*args, **kwargs)
