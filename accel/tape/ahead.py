"""Kernels by hand that a tape calls, compiled before its first run and side by side.

Each operation is called once on one picture of one pixel, dry: what it would launch is compiled. The choice between two
kernels by size compiles both, and so do operations that only another size of the call has (``Tape.ahead``).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..kernels import operations as ours
from .values import Operation, Value, replaced

FEW = 2  # of many tensors that are alike


def compile_operations(operations: Iterable[Operation], device: torch.device) -> int:
    """Compiles what is new, and says how many kernels that were. Triton's interpreter has nothing to compile."""
    forms: dict[tuple, Operation] = {}
    for operation in operations:
        if ours.is_ours(operation.func):
            forms.setdefault(_form(operation), operation)
    if not forms or device.type != "cuda":
        return 0
    ops = ours.fused_ops(device)
    before = ops.compiled_variants()

    def dry() -> None:
        for operation in forms.values():
            args = _shortened(replaced(operation.args, Value, lambda value: _small(value, device)))
            operation.func(*args)

    with torch.inference_mode():
        ops.compile_ahead(dry)
    return ops.compiled_variants() - before


def _form(operation: Operation) -> tuple:
    """All that its kernels depend on."""
    return operation.func, repr(replaced(_shortened(operation.args), Value, lambda v: (v.dtype, _shape(v))))


def _shape(value: Value) -> tuple[int, ...]:
    """Sizes of the model as they are, those of the call 1."""
    return tuple(size.value if size.static else 1 for size in value.sizes)


def _small(value: Value, device: torch.device) -> Tensor:
    return torch.empty(_shape(value), dtype=value.dtype, device=device)


def _shortened(args: Any) -> Any:
    return tuple(item[:FEW] if isinstance(item, list) and len(item) > FEW else item for item in args)
