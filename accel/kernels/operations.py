"""Fused operations by hand as operations of torch, ``torch.ops.anyshape``, so that a tape can hold them.

Each has an implementation for tensors without memory (a *fake*), and one that takes the kernel or, where that fails or
other sizes suit it better, plain torch: ``TritonOps`` decides. Images [N, C, H, W] come out in channels_last. Triton is
imported at the first call only.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from . import reference

LAST = torch.channels_last


def _free_name() -> str:
    """Of a namespace that no other copy of the pack in this process has taken."""
    names = (f"anyshape{number or ''}" for number in itertools.count())
    return next(name for name in names if not hasattr(getattr(torch.ops, name), "conv2d_last"))


NAMESPACE = _free_name()
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


@functools.cache
def fused_ops(device: torch.device) -> "TritonOps":  # noqa: F821  (imported below, with Triton)
    """The kernels of ``device``; on a CPU those that Triton's interpreter runs."""
    if device.type != "cpu":
        return kernels.load(device)
    from .triton_ops import TritonOps

    return TritonOps(device)


def _operation(arguments: str, fake: Callable[..., Any]) -> Callable[[Callable], Any]:
    """Makes a function an operation of torch, of its name; gives what a tape calls."""

    def define(run: Callable[..., Any]) -> Any:
        name = run.__name__
        _LIBRARY.define(f"{name}{arguments}")
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, run, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return define


def is_ours(func: Any) -> bool:
    """Whether an operation on a tape is one of these."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.name.startswith(f"{NAMESPACE}::")


def _fake_convolution(x: Tensor, *args: Any) -> Tensor:
    return torch.ops.aten.conv2d(x, *args).contiguous(memory_format=LAST)


@_operation(
    "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor",
    _fake_convolution,
)
def conv2d_last(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """A convolution from channels_last to channels_last, wherever its weight lies.

    One that is a linear layer of each pixel runs as one, for which the library plans nothing.
    """
    x = x.contiguous(memory_format=LAST)
    if is_pointwise(weight, *geometry):
        out = torch.nn.functional.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
    else:
        out = torch.ops.aten.conv2d(x, weight, bias, *geometry)
    return out.contiguous(memory_format=LAST)


def is_pointwise(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether a convolution is a linear layer of each pixel. weight [O, I, ...]."""
    return groups == 1 and weight.shape[2:].numel() == 1 and _all(stride, 1) and _all(padding, 0)


def _all(given: Any, number: int) -> bool:
    return given == number or (isinstance(given, (list, tuple)) and all(each == number for each in given))


def _fake_like(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=LAST)


@_operation(
    "(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, Tensor? shift, bool silu, Tensor[] pending)"
    " -> Tensor",
    _fake_like,
)
def group_norm_last(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, shift: Tensor | None, silu: bool,
    pending: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """GroupNorm(x + shift + pending), and SiLU of that if wanted; shift [N, C, ...], each pending of C numbers."""
    shift = None if shift is None else shift.reshape(-1, x.shape[1])
    flat = tuple(each.reshape(-1) for each in pending)
    out = fused_ops(x.device).group_norm(x, weight, bias, groups, eps, shift, silu, flat)
    return out.contiguous(memory_format=LAST)


def _fake_geglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


@_operation("(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _fake_geglu)
def linear_geglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The first half of a linear layer's result times GELU of the second: as one kernel, or as two."""
    return fused_ops(x.device).linear_geglu(x, weight, bias)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@_operation("(Tensor q, Tensor k, Tensor v, int heads) -> Tensor", _fake_attention)
def flash_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention to few keys; q [B, T, C], k, v [B, L, C]."""
    return fused_ops(q.device).flash_attention(q, k, v, heads)


def _fake_grouped(
    xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], table: Tensor
) -> list[Tensor]:
    x, widths = xs[0], [weight.shape[0] for weight in weights]
    if not len(table):
        return [x.new_empty(*x.shape[:-1], width) for width in widths]
    rows = x.shape[:-1].numel()
    parts = x.new_empty(rows * sum(widths)).split([rows * width for width in widths])  # they lie in one piece of memory
    return [part.view(*x.shape[:-1], width) for part, width in zip(parts, widths, strict=True)]


@_operation("(Tensor[] xs, Tensor[] weights, Tensor?[] biases, Tensor table) -> Tensor[]", _fake_grouped)
def grouped_linear(xs: list[Tensor], weights: list[Tensor], biases: list[Tensor | None], table: Tensor) -> list[Tensor]:
    """One input, or one for each, through many linear layers in one launch. table: what ``table_of`` made of them."""
    x = xs[0] if len(xs) == 1 else xs
    if not len(table):
        return reference.grouped_linear(x, weights, biases)
    return fused_ops(table.device).grouped_linear(x, weights, biases, table)


def table_of(count: int, several: bool, *tensors: Tensor) -> Tensor:
    """The table of ``count`` weights and of the biases behind them (one each, or none at all); empty if none fits.

    several: each weight has an input of its own.
    """
    from . import grouped_linear as kernel

    weights, biases = tensors[:count], tensors[count:] or [None] * count
    if not kernel.fits(weights, biases):
        return torch.empty(0, kernel.COLUMNS, dtype=torch.int64, device=weights[0].device)
    return kernel.make_table(weights, biases, several)


def _fake_upsample(x: Tensor, height: int, width: int) -> Tensor:
    return torch.empty(*x.shape[:2], height, width, dtype=x.dtype, device=x.device, memory_format=LAST)


@_operation("(Tensor x, int height, int width) -> Tensor", _fake_upsample)
def upsample_last(x: Tensor, height: int, width: int) -> Tensor:
    """Nearest neighbours, to twice the size or one less."""
    return fused_ops(x.device).upsample2x(x, (height, width)).contiguous(memory_format=LAST)
