"""Compiles the hand-written kernels that a tape calls, side by side and before its first run.

Each operation is called once on one picture of one pixel, dry: what it would launch is compiled. The choice between two
kernels by size compiles both, and so do operations that only another size of the call has (``Tape.ahead``).
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..kernels import operations as ours
from .static_sizes import of_leaf
from .values import Operation, Value, replaced

FEW = 2  # of many tensors that are alike
PICTURES = (4, 5)  # dimensions, of videos too: channels are the second, and the last of all else
_LOCK = threading.Lock()
_KNOWN: set[tuple] = set()  # what was compiled in this process


@dataclass
class Compiled:
    """Holds how many kernels were compiled."""

    count: int = 0


@contextmanager
def compiling(operations: Iterable[Operation], device: torch.device) -> Iterator[Compiled]:
    """Compiles what is new beside the body, all of it by its end. Triton's interpreter has nothing to compile."""
    done, forms = Compiled(), []
    if device.type == "cuda":
        with _LOCK:
            forms = [operation for operation in distinct(operations) if (device, _form(operation)) not in _KNOWN]
            _KNOWN.update((device, _form(operation)) for operation in forms)
    if not forms:
        yield done
        return
    from ..kernels.launch import compiling_ahead  # Triton

    ops = ours.fused_ops(device)
    before = ops.compiled_variants()
    with torch.inference_mode(), compiling_ahead(device):
        for operation in forms:
            operation.func(*small(operation, device))
        yield done
    done.count = ops.compiled_variants() - before


def distinct(operations: Iterable[Operation]) -> list[Operation]:
    """One operation by hand for each set of kernels."""
    found: dict[tuple, Operation] = {}
    for operation in operations:
        if ours.is_ours(operation.func) and operation.func not in ours.OF_LIBRARIES:
            found.setdefault(_form(operation), operation)
    return list(found.values())


def small(operation: Operation, device: torch.device) -> tuple:
    """Arguments of the same form for one picture of one pixel; what is in them is void."""
    given = _shortened(operation)
    return replaced(given, Value, lambda value: torch.empty(_shape(value), dtype=value.dtype, device=device))


def _form(operation: Operation) -> tuple:
    """All that its kernels depend on."""
    return operation.func, repr(replaced(_shortened(operation), Value, lambda v: (v.dtype, _shape(v))))


def _shape(value: Value) -> tuple[int, ...]:
    """Channels and sizes of the model as they are, those of the call 1."""
    known, rank = value.sizes or of_leaf(value), len(value.shape)
    channels = 1 if rank in PICTURES else rank - 1  # of an input they are as many as the weights behind it want
    return tuple(size.value if size.static or d == channels else 1 for d, size in enumerate(known))


def _shortened(operation: Operation) -> tuple:
    args = operation.args
    if operation.func is ours.upsample_last:
        return (args[0], 2, 2)
    return tuple(item[:FEW] if isinstance(item, list) and len(item) > FEW else item for item in args)
