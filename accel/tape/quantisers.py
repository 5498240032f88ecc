"""comfy-kitchen's rounding of a layer's input to int8 or fp8, as lines of the kernel that makes that input.

The steps are those of the library's CUDA kernels (``int8_linear.cu`` and ``per_tensor_quantize.cu`` of 0.2.26): of the
same input they give the same bits. Its other backends round elsewhere, and there the operations stay calls.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from . import rows
from .kernel_lines import KernelLines
from .layout import contiguous, lie_alike
from .terms import EVERYWHERE, FLOATS, Indices, Mask, NoKernel, Term
from .values import Operation, Value

LIBRARY, BACKEND = "comfy_kitchen", "cuda"
BY_ROWS, TO_FP8 = "quantize_int8_rowwise", "quantize_fp8"  # operations, and how many arguments each has
ARGUMENTS = {BY_ROWS: 1, TO_FP8: 3}
NAMES = frozenset(ARGUMENTS)
IMPLEMENTED = {BY_ROWS: BY_ROWS, TO_FP8: "quantize_per_tensor_fp8"}  # by the library's registry
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FINITE = {torch.float16: 65504.0, torch.bfloat16: 3.38953139e38, torch.float32: 3.4028234663852886e38}
TO_INTEGER = "({0} + 12582912.0) - 12582912.0"  # 1.5 * 2**23: the nearest integer, to even, of what is small enough
ADA = (8, 9)  # the first cards that convert to fp8


def is_quantiser(operation: Operation) -> bool:
    """Whether it rounds a layer's input."""
    return not operation.opaque and operation.traits.name in NAMES


def fits(operation: Operation) -> bool:
    """Whether a kernel of ours may do it: the operation as it is known here, on the library's CUDA backend."""
    name, x = operation.traits.name, operation.inputs[0]
    known = operation.func._schema.name.startswith(LIBRARY) and len(operation.args) == ARGUMENTS[name]
    if not known or operation.kwargs or x.dtype not in FLOATS or not _has_backend(name, x.device):
        return False
    q = operation.outputs[0]
    if name == TO_FP8:
        return q.dtype in FP8_MAX and operation.args[1].dtype == torch.float32 and operation.args[1].numel == 1
    return x.sizes[-1].static and lie_alike(x.shape, q.stride, contiguous(x.shape))


def _has_backend(name: str, device: torch.device) -> bool:
    """Whether the library takes its CUDA kernels for ``name``."""
    if device.type != "cuda" or (name == TO_FP8 and torch.cuda.get_device_capability(device) < ADA):
        return False
    try:
        registry: Any = importlib.import_module(f"{LIBRARY}.registry").registry
        return registry.get_capable_backend(IMPLEMENTED[name], None) == BACKEND
    except (ImportError, AttributeError, TypeError):
        return False  # another version of the library


def rounded_with(value: Value, inside: Mapping[Value, Operation]) -> Value:
    """What a kernel stores beside ``value``, in the same shape: of rows' scales the rounded rows; else ``value``."""
    maker = inside.get(value)
    return maker.outputs[0] if maker is not None and is_quantiser(maker) else value


def lowered(kernel: KernelLines, operation: Operation, value: Value, index: Indices, mask: Mask) -> Term:
    """``value``, the rounded numbers or their scale, at ``index``, in float32."""
    if operation.traits.name == TO_FP8:
        return _to_fp8(kernel, operation, index, mask)
    if mask.conditions:
        raise NoKernel("rows rounded in part")
    x = operation.inputs[0]
    scale = _scale(kernel, x, index[:-1])
    if value is operation.outputs[1]:
        return scale
    number = kernel.value(x, index, mask)
    ratio = kernel.let(f"{number.name} / {kernel.rounded(scale, x.dtype).name}", number.axes | scale.axes)
    ratio = kernel.rounded(ratio, x.dtype)
    whole = kernel.let(TO_INTEGER.format(ratio.name), ratio.axes)
    return kernel.let(f"tl.minimum(tl.maximum({whole.name}, -128.0), 127.0)", whole.axes)


def _scale(kernel: KernelLines, x: Value, lead: Indices) -> Term:
    """What 1 of int8 stands for, of each row of ``x``."""
    key = "scale", x, lead
    if key not in kernel.memo:
        row, along = rows.whole_row(kernel, x, lead, EVERYWHERE)
        most = rows.reduced("tl.max", f"tl.abs({row.name})", along)
        text = f"tl.maximum(tl.minimum({most}, {FINITE[x.dtype]!r}) * {1 / 127!r}, 1e-30)"
        kernel.memo[key] = kernel.let(text, row.axes - along)
    return kernel.memo[key]


def _to_fp8(kernel: KernelLines, operation: Operation, index: Indices, mask: Mask) -> Term:
    q = operation.outputs[0]
    number, scale = (kernel.argument(item, q, index, mask) for item in operation.args[:2])
    ratio = kernel.let(f"{number.name} / {scale.name}", number.axes | scale.axes)
    return kernel.let(f"tl.minimum(tl.maximum({ratio.name}, -{FP8_MAX[q.dtype]}), {FP8_MAX[q.dtype]})", ratio.axes)
