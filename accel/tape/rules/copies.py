"""Removes copies that nobody needs."""

import torch

from .. import views
from ..group import probably_fuses
from ..singles import strides_below
from ..traits import ATTENTIONS, aten
from ..values import Operation, Readers, Tape, Value

ALIGNED = 8  # elements: attention's kernels read so many at once
MOST = 4  # so many times the memory of the copy stays for it
COPY = aten.clone.default
TURNS = frozenset("unsqueeze squeeze alias".split())


def drop_repeats(tape: Tape) -> str:
    """A kernel reads one row again and again (a token for each place that is filled up), so nobody copies it before.

    ``x.repeat(1, 1, 1)`` copies x as it is (heads that are repeated once): the original serves whoever reads it. Exact.
    """
    if not any(map(_repeats, tape.operations)):
        return ""
    by_root: dict[Value, list[Operation]] = {}  # views, by whose memory they share
    readers = tape.readers()
    for operation in tape.operations:
        for root in {value.base for value in operation.outputs if value is not None and value.base is not None}:
            by_root.setdefault(root, []).append(operation)
    written = {operation.writes.root for operation in tape.operations if operation.writes is not None}
    kept = written | {value.root for value in tape.outputs}
    for operation in tape.operations:
        if not _repeats(operation):
            continue
        source, output, counts = operation.inputs[0], operation.outputs[0], operation.args[1]
        if len(source.shape) != len(output.shape) or {source.root, output} & written:
            continue
        if any(count != 1 and n != 1 for count, n in zip(counts, source.shape, strict=True)):
            continue
        below = by_root.get(output, [])
        if not below and output not in kept and all(map(_computes, readers.get(output, [None]))):
            # also where all counts are 1: at another size of the call they may be more
            func, args = aten.expand.default, (source, list(output.shape))
            stride = torch.empty_strided(source.shape, source.stride, device="meta").expand(output.shape).stride()
            strides = {output: stride}
        elif all(count == 1 for count in counts):
            func, args, strides = aten.alias.default, (source,), strides_below(output, source.stride, below)
        else:
            continue
        if strides is not None:
            operation.func, operation.args, operation.kwargs = func, args, {}
            for value, stride in strides.items():
                value.base, value.stride = source.root, stride
            by_root.setdefault(source.root, []).extend([operation, *by_root.pop(output, [])])
    return ""


def _repeats(operation: Operation) -> bool:
    return not operation.opaque and operation.traits.name == "repeat"


def _computes(operation: Operation | None) -> bool:
    """Whether it is one that reads a view as well as a copy, and makes something new of it."""
    return operation is not None and probably_fuses(operation) and operation.outputs[0].base is None


def attend_in_place(tape: Tape) -> str:
    """Attention reads keys and values where they lie: in the result of the product that made them. Exact.

    A model that writes into queries beside them copies them first, so that their memory can go with the attention.
    """
    copied = [operation for operation in tape.operations if not operation.opaque and operation.func is COPY]
    if not copied or tape.lean:
        return ""
    readers, outputs = tape.readers(), set(tape.outputs)
    written = {operation.writes.root for operation in tape.operations if operation.writes is not None}
    for operation in copied:
        source, result = operation.inputs[0], operation.outputs[0]
        below = _attended(result, readers, outputs)
        if below is None or source.root in written or result in written or not _is_aligned(source):
            continue
        if MOST * source.numel < source.root.numel:
            continue
        strides = strides_below(result, source.stride, below)
        if strides is not None:
            operation.func, operation.args, operation.kwargs = aten.alias.default, (source,), {}
            for value, stride in strides.items():
                value.base, value.stride, value.order = source.root, stride, None
    return ""


def _attended(value: Value, readers: Readers, outputs: set[Value]) -> list[Operation] | None:
    """The views of ``value``, in order, if attention alone reads it through them, as keys or values; else None."""
    found: list[Operation] = []
    for reader in readers.get(value, ()):
        if reader.opaque or reader.writes is not None or reader.inputs[0] is not value and reader.traits.view:
            return None
        if reader.traits.name in ATTENTIONS:
            read_as = {place for place, each in enumerate((*reader.args, *reader.kwargs.values())) if each is value}
            if not read_as <= {1, 2}:
                return None
            continue
        if not reader.traits.view and not reader.traits.maybe_view or len(reader.outputs) != 1:
            return None
        made = reader.outputs[0]
        below = _attended(made, readers, outputs) if made.base is value.root else None
        if below is None:
            return None
        found += [reader, *below]
    return None if value in outputs else found


def _is_aligned(value: Value) -> bool:
    """Whether attention's kernels can read a tensor where it lies: whole rows that begin at multiples of 16 bytes."""
    if value.dtype.itemsize != 2 or not value.shape or value.stride[-1] != 1:
        return False
    if any(n > 1 and (not step or step % ALIGNED) for n, step in zip(value.shape[:-1], value.stride[:-1], strict=True)):
        return False
    while value.base is not None:
        operation = value.origin
        if operation is None or operation.writes is not None:
            return False
        source, rank = operation.inputs[0], len(operation.inputs[0].shape)
        part = views.part(operation, value)
        if part is not None:
            if part[1] * source.stride[part[0]] % ALIGNED:
                return False
        elif not (operation.traits.name in views.RESHAPES | TURNS or views.permutation(operation, rank) is not None):
            return False
        value = source
    return value.leaf is None
