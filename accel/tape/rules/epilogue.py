"""Computes GELU as the last step of the product before it, in cuBLASLt's epilogue."""

from typing import Any

import torch
from torch import Tensor

from ...reasons import say
from ..static_sizes import linear
from ..traits import HALVES, aten
from ..values import Operation, Tape, Value

LESS_EXACT = say("gelu_rounds_less")


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh) of ``x @ weight.T + bias``; x [..., K], weight [N, K], bias [N]."""
    rows = x.reshape(-1, x.shape[-1])
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True).view(*x.shape[:-1], weight.shape[0])


linear_gelu.sizes = linear  # type: ignore[attr-defined]
linear_gelu.own = getattr(aten._addmm_activation, "default", None)  # type: ignore[attr-defined]  what it calls


def fuse_gelu(tape: Tape) -> str:
    """A linear layer with a bias whose result goes into GELU (tanh) and nowhere else. Rounds once less than eager."""
    if tape.device.type != "cuda" or not hasattr(torch, "_addmm_activation"):
        return ""
    if not any(map(_is_gelu, tape.operations)):
        return ""
    readers = tape.readers()
    given_back = set(tape.outputs)
    made: dict[Operation, Operation] = {}
    for operation in tape.operations:
        if not _is_linear(operation):
            continue
        result = operation.outputs[0]
        users = readers.get(result, [])
        if len(users) == 1 and _is_gelu(users[0]) and result not in given_back:
            made[users[0]] = operation
    for gelu, product in made.items():
        gelu.func, gelu.args, gelu.kwargs = linear_gelu, product.args, {}
        gelu.inputs, gelu.opaque = list(product.inputs), True
    gone = set(made.values())
    tape.operations[:] = [operation for operation in tape.operations if operation not in gone]
    return LESS_EXACT if made else ""


def _is_linear(operation: Operation) -> bool:
    if operation.opaque or operation.func is not aten.linear.default or len(operation.args) != 3:
        return False
    values: list[Any] = list(operation.args)
    return all(isinstance(value, Value) and value.dtype in HALVES for value in values)


def _is_gelu(operation: Operation) -> bool:
    if operation.opaque or operation.traits.name != "gelu":
        return False
    return operation.kwargs.get("approximate") == "tanh"
