"""Takes comfy-kitchen's rotary embeddings and modulated norms apart, so that they fuse with what is around them.

Newer versions of ComfyUI call that library's operations, and to a tape each is one call. What they compute in plain
torch operations (``kitchen_meanings``) takes the call's place where a neighbour fuses, and where a norm is part of it.
Else a call is one launch already. In place, an operation is one of these where what it writes is read through it alone.
An int8 layer that a model calls directly, with an activation of its input, becomes the activation and the library's
operation, which ``int8`` goes on with.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import group, static_sizes
from ..layout import lie_alike, outermost_first
from ..library_calls import LIBRARY, Called
from ..record import Recorder, record
from ..traits import by_name
from ..values import Constant, Input, Operation, Readers, Tape, Value, replaced
from . import edits
from .int8 import LAYER
from .kitchen_meanings import ACTIVATIONS, MODULATED, TABLE, codes, int8_linear
from .through_views import SharedMemory

META = torch.device("meta")


def decompose(tape: Tape) -> str:
    """Replaces comfy-kitchen's operations with plain ones. Exact but for contracted multiply-adds in its kernels."""
    made_new = _make_new(tape)
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
        if id(operation) in made_new or (id(operation) in left and _pays(operation, makers, readers)):
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


def _make_new(tape: Tape) -> set[int]:
    """Operations in place give new tensors where ours are faster, and what they write is read through it alone.

    The ids of those that do; they must be taken apart, because the library may lay its own results out otherwise.
    """
    places = [place for place, operation in enumerate(tape.operations) if _without_writing(operation) is not None]
    if not places or tape.lean:
        return set()
    static_sizes.annotate(tape)
    makers = {value: operation for operation in tape.operations for value in operation.outputs}
    readers, memory, changed = tape.readers(), SharedMemory(tape), set()
    for place in places:
        operation = tape.operations[place]
        new = dataclasses.replace(operation, func=_without_writing(operation), writes=None)
        if _meaning(new) and _pays(new, makers, readers):
            given = by_name(operation.func, operation.args, operation.kwargs)
            written = [given[each.name] for each in operation.func._schema.arguments if each.is_write]
            if memory.make_new(place, new.func, written):
                changed.add(id(operation))
    return changed


def _without_writing(operation: Operation) -> Any:
    """The library's operation that gives what this one, in place, writes; None if it is not for this rule."""
    if operation.opaque or operation.writes is None or not operation.func._schema.name.startswith(f"{LIBRARY}::"):
        return None
    name = operation.traits.name.removesuffix("_")
    packet = getattr(getattr(torch.ops, LIBRARY), name, None)
    return packet.default if name in TABLE and packet is not None else None


def _meaning(operation: Operation) -> Callable[..., Any] | None:
    """What an operation computes; None if it is not for this rule."""
    if isinstance(operation.func, Called):
        return int8_linear if _is_layer(operation.func, operation.args, operation.kwargs) else None
    meaning = None if operation.opaque else TABLE.get(operation.traits.name)
    if meaning is None or not operation.func._schema.name.startswith(f"{LIBRARY}::"):
        return None
    return meaning if _agrees(operation.func, meaning) and _is_rounded_so(operation) else None


def _is_layer(called: Called, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether it is an int8 layer as it is known here. The library turns some inputs together with their activation."""
    own, known = _parameters(called.function), list(_parameters(int8_linear))[:-1]
    if called.name != LAYER or list(own)[: len(known)] != known or len(args) > len(known):
        return False
    given = dict(zip(known, args, strict=False)) | kwargs
    act, plain = given.get("input_act"), (None, "none")
    others = all(name in own and given[name] == own[name].default for name in given.keys() - known)
    fits = act in plain or (act in ACTIVATIONS and not given.get("convrot"))
    return others and fits and given.get("out_dtype") in codes()


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


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
