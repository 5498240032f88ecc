"""Rounds the input of int8 layers once, however many layers share it: queries, keys, values and gates.

comfy-kitchen's ``int8_linear`` rounds its input to int8, a scale for each row, and multiplies. These are two operations
here, and layers with the same input share the first, which a kernel before it may do (``quantisers``). Weights that are
turned (convrot) want their input turned before it is rounded; the library does both in one kernel. Scales that weights
have as a whole are spread over their rows together when a run begins, not each in its layer's call. The same kernels
with the same numbers: exact.
"""

import importlib
import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import static_sizes
from ..layout import contiguous, lie_alike
from ..traits import by_name
from ..values import Constant, Operation, Spread, Tape, Value, Weight

LIBRARY = "comfy_kitchen"
BACKEND = "cuda"
LAYER = "int8_linear"
PRODUCT = "_int4_linear_via_int8_values"  # of that backend: ``int8_linear`` without the rounding before it
BEGINS = ["x", "weight", "weight_scale", "bias"]  # the layer's arguments
KNOWN = frozenset((*BEGINS, "output_dtype_code", "convrot", "convrot_groupsize", "input_act"))
AMPERE = (8, 0)
ALIGNED = 16  # channels in and out, which that kernel takes on every card
TAKES = ["x_int8", "weight_int8", "x_scale", "weight_scale", "bias", "out_dtype"]
TURNING = "quantize_int8_rowwise_convrot64"  # of that backend: an input turned and rounded
GROUP = 256  # channels that are turned together


class Product:
    """An int8 layer behind the rounding of its input. q [..., K] int8, weight [N, K], scales [..., 1], factors [N]."""

    sizes = staticmethod(static_sizes.quantised_product)

    def __init__(self, multiply: Callable[..., Tensor], dtype: torch.dtype) -> None:
        self._multiply, self._dtype = multiply, dtype

    @property
    def likeness(self) -> tuple:
        """What a plan depends on."""
        return Product, self._dtype

    def __call__(self, q: Tensor, weight: Tensor, scales: Tensor, factors: Tensor, bias: Tensor | None) -> Tensor:
        """[..., N]."""
        out = self._multiply(q.reshape(-1, q.shape[-1]), weight, scales, factors, bias, self._dtype)
        return out.view(*q.shape[:-1], -1)


class Turned:
    """An input turned and rounded. x [..., K] to (q [..., K] int8, scales [..., 1] float32)."""

    sizes = staticmethod(static_sizes.quantised)

    def __init__(self, turn: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._turn = turn

    @property
    def likeness(self) -> tuple:
        """What a plan depends on."""
        return (Turned,)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(rounded numbers, a scale for each row)."""
        q, scales = self._turn(x.reshape(-1, x.shape[-1]), GROUP)
        return q.view(x.shape), scales.view(*x.shape[:-1], 1)


def round_once(tape: Tape) -> str:
    """Applies to every int8 layer of several rows, on comfy-kitchen's own kernels."""
    layers = list(filter(_fits, tape.operations))
    multiply = _product(tape.device) if layers else None
    if multiply is None:
        return ""
    layers = [layer for layer in layers if not _is_turned(layer) or _turning(layer.args[0]) is not None]
    rounded: dict[tuple[Value, bool], Operation] = {}
    spread: dict[tuple[Value, int], Value] = {}
    left = set(map(id, layers))
    found: list[Operation] = []
    for operation in tape.operations:
        if id(operation) in left:
            x, weight, scale, bias = operation.args[:4]
            form = x, _is_turned(operation)
            if form not in rounded:
                rounded[form] = _rounding(*form)
                found.append(rounded[form])
            q, scales = rounded[form].outputs
            rows = weight.shape[0]
            if (scale, rows) not in spread:
                spread[scale, rows] = _spread(scale, rows)
            operation.func, operation.kwargs, operation.opaque = Product(multiply, operation.outputs[0].dtype), {}, True
            operation.args = (q, weight, scales, spread[scale, rows], bias)
            operation.inputs = [value for value in operation.args if value is not None]
        found.append(operation)
    tape.operations[:] = found
    return ""


def _fits(operation: Operation) -> bool:
    if operation.opaque or operation.kwargs or operation.traits.name != LAYER:
        return False
    given = by_name(operation.func, operation.args, operation.kwargs)
    if not operation.func._schema.name.startswith(LIBRARY) or list(given)[:4] != BEGINS:
        return False
    x, weight, scale = operation.args[:3]
    if len(weight.shape) != 2 or not isinstance(scale.leaf, (Weight, Constant)):
        return False
    plain = given.get("input_act") in (None, "none") and given.get("convrot_groupsize", GROUP) == GROUP
    plain = plain and _says_no_more(operation.func, given)
    rows, columns = weight.shape
    whole = scale.numel in (1, rows) and scale.dtype == torch.float32 and not (rows % ALIGNED or columns % ALIGNED)
    return plain and whole and math.prod(x.shape[:-1]) > 1 and lie_alike(x.shape, x.stride, contiguous(x.shape))


def _says_no_more(func: Any, given: dict[str, Any]) -> bool:
    """Whether arguments that newer versions of the library have say nothing here (a residual that is added)."""
    others = [argument for argument in func._schema.arguments if argument.name not in KNOWN]
    return all(given.get(other.name, other.default_value) == other.default_value for other in others)


def _product(device: torch.device) -> Callable[..., Tensor] | None:
    """The library's own product of what is rounded already; None where it would not take its CUTLASS kernel.

    What it takes instead is handed tensors in a way that a capture forbids.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE:
        return None
    try:
        registry: Any = importlib.import_module(f"{LIBRARY}.registry").registry
        kernels: ModuleType = importlib.import_module(f"{LIBRARY}.backends.{BACKEND}")
        found = getattr(kernels, PRODUCT, None)
        known = found is not None and list(inspect.signature(found).parameters) == TAKES
        known = known and not kernels._DISABLE_CUTLASS_INT8
        return found if known and registry.get_capable_backend(LAYER, None) == BACKEND else None
    except (ImportError, AttributeError, TypeError):
        return None  # another version of the library


def _is_turned(layer: Operation) -> bool:
    return bool(by_name(layer.func, layer.args, layer.kwargs).get("convrot"))


def _turning(x: Value) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The library's own function that turns and rounds ``x``; None where its layers would not call it.

    It holds whole rows in shared memory.
    """
    if x.device.type != "cuda":
        return None
    columns, needed, most = x.shape[-1], "_convrot_int8_fused_shared_memory_bytes", "_CONVROT_FUSED_MAX_K"
    try:
        kernels: Any = importlib.import_module(f"{LIBRARY}.backends.{BACKEND}")
        limit = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin
        held = getattr(kernels, needed)(math.prod(x.shape[:-1]), columns)
        fits = columns % GROUP == 0 and columns <= getattr(kernels, most) and held < limit
        return getattr(kernels, TURNING) if fits else None
    except (ImportError, AttributeError, TypeError):
        return None  # another version of the library


def _rounding(x: Value, turned: bool) -> Operation:
    q = Value.made(x.shape, x.stride, torch.int8, x.device)
    shape = (*x.shape[:-1], 1)
    scales = Value.made(shape, contiguous(shape), torch.float32, x.device)
    if turned:
        made = Operation(Turned(_turning(x)), (x,), {}, [x], [q, scales], opaque=True)
    else:
        made = Operation(getattr(torch.ops, LIBRARY).quantize_int8_rowwise.default, (x,), {}, [x], [q, scales])
    q.origin = scales.origin = made
    return made


def _spread(scale: Value, rows: int) -> Value:
    """One scale for each row of the weight."""
    if scale.numel == rows and len(scale.shape) == 1:
        return scale
    return Value.made((rows,), (1,), scale.dtype, scale.device, Spread(scale, rows))
