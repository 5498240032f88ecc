"""Passes over a new list of operations: in-place writes become new values, dead code is removed.

An operation that changes a tensor in place is taken for one that makes a new value, so that it may fuse. That is right
unless somebody still looks at the old memory: a view that was made before and is read after. Then the write stays in
place, and what it writes to stays in memory.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import contiguous, lie_alike
from .traits import TRUTHS, traits
from .values import Operation, Value, replaced, values_in

aten = torch.ops.aten
OUT = "out"  # the argument that says where a result is to be


def settle(operations: Sequence[Operation], outputs: Sequence[Value], apart: bool = False) -> None:
    """Makes each in-place operation functional where that is right; the others keep ``writes`` and share memory.

    apart: what is written through a view becomes a value of its own, too, so that blocks share as little as they can.
    """
    if not any(operation.writes is not None for operation in operations):
        return
    last_read: dict[Value, int] = {}
    for place, operation in enumerate(operations):
        for value in operation.inputs:
            last_read[value] = place
    for value in outputs:
        last_read[value] = len(operations)
    by_root: dict[Value, list[tuple[Value, int]]] = {}
    for value, place in last_read.items():
        by_root.setdefault(value.root, []).append((value, place))
    for place, operation in enumerate(operations):
        target = operation.writes
        if target is None:
            continue
        seen_after = any(
            (value is not target or apart) and value.number < operation.outputs[0].number and read > place
            for value, read in by_root.get(target.root, ())
        )
        functional = None if seen_after or (target.base is not None and not apart) else functional_of(operation)
        kwargs = {name: item for name, item in operation.kwargs.items() if name != OUT}
        given = len(kwargs) < len(operation.kwargs)  # the memory of the result, which may lie otherwise than its own
        is_lent = given or target.base is not None
        is_plain = not is_lent and lie_alike(target.shape, target.stride, contiguous(target.shape))
        if functional is None or not (is_plain or _lies_the_same(functional, operation, kwargs, exactly=is_lent)):
            _share(operation, target, by_root)
            continue
        operation.func, operation.writes = functional, None
        if given:
            operation.kwargs = kwargs
            operation.inputs = [*dict.fromkeys(values_in((operation.args, kwargs)))]


def _share(operation: Operation, target: Value, by_root: dict[Value, list[tuple[Value, int]]]) -> None:
    """The result of an in-place operation is the memory of its target: views of one are views of the other."""
    result, root = operation.outputs[0], target.root
    result.base = root
    moved = by_root.pop(result, [])
    for value, _ in moved:
        if value is not result:
            value.base = root
    by_root.setdefault(root, []).extend(moved)


def functional_of(operation: Operation) -> Any:
    """``aten.add`` for ``aten.add_``, or for itself with ``out``; None where there is none that gives the same."""
    func, target = operation.func, operation.writes
    name, overload = traits(func).name, func._overloadname
    if operation.kwargs.get(OUT) is target:
        return _without_out(func)
    if not name.endswith("_") or not func._schema.name.startswith("aten::") or name in TRUTHS:
        return None
    others = [value.dtype for value in operation.inputs if value is not target and value.shape]
    if name != "copy_" and any(torch.promote_types(target.dtype, dtype) != target.dtype for dtype in others):
        return None  # in place the result is rounded to the target's dtype
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, overload, None) if packet is not None else None


@functools.lru_cache(maxsize=256)
def _without_out(func: Any) -> Any:
    """The overload of an operation of torch's that takes the same but for ``out``; None if there is none."""
    if not func._schema.name.startswith("aten::"):
        return None
    packet = func.overloadpacket
    wanted = [(each.name, str(each.type)) for each in func._schema.arguments if each.name != OUT]
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if [(each.name, str(each.type)) for each in overload._schema.arguments] == wanted:
            return overload
    return None


def _lies_the_same(functional: Any, operation: Operation, kwargs: dict[str, Any], exactly: bool) -> bool:
    """Whether a new result lies in memory as what was written did: later views of it count on that.

    exactly: along what is 1 as well. Where that is all, a step keeps the strides (``layout.lies_oddly``).
    """
    target, made = operation.writes, made_by(functional, operation.args, kwargs)
    if made is None or made.dtype != target.dtype:
        return False
    return made.stride() == target.stride or not exactly and lie_alike(target.shape, made.stride(), target.stride)


def made_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """A tensor without memory that lies as the one result of an operation of torch's; None where torch cannot say."""

    def form(value: Value) -> Tensor:
        device = "cpu" if value.scalar() is not None else "meta"
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)

    args, kwargs = replaced((args, {name: item for name, item in kwargs.items() if name != "device"}), Value, form)
    try:
        made = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return None
    return made if isinstance(made, Tensor) else None


def needed(operations: Sequence[Operation], outputs: Sequence[Value], calls: bool = True) -> list[Operation]:
    """The operations whose results reach ``outputs``, in order; writes count if their memory does.

    calls: calls of other packs' code stay whether their results are read or not.
    """
    wanted = {value for value in outputs} | {value.root for value in outputs}
    kept: list[Operation] = []
    for operation in reversed(operations):
        for value in operation.outputs:
            if value is not None and (value in wanted or value.base in wanted):
                break
        else:
            if not (calls and getattr(operation.func, "lives", False)):
                continue
        kept.append(operation)
        for value in operation.inputs:
            wanted.add(value)
            if value.base is not None:
                wanted.add(value.base)
    return kept[::-1]
