"""What comfy-kitchen's operations compute, in plain torch operations (see ``kitchen``)."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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


def int8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    convrot: bool = False, convrot_groupsize: int = 256, input_act: str | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """others: what newer versions have besides; it says nothing here."""
    layer = torch.ops.comfy_kitchen.int8_linear
    return layer(ACTIVATIONS[input_act](x), weight, weight_scale, bias, codes()[out_dtype], convrot, convrot_groupsize)


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


@functools.cache
def codes() -> dict[torch.dtype, int]:
    """How the library's operations are told a dtype; none in another version of it."""
    try:
        return dict(importlib.import_module("comfy_kitchen.backends.eager.quantization").DTYPE_TO_CODE)
    except (ImportError, AttributeError):
        return {}
