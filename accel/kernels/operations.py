"""Registers the hand-written fused operations as ``torch.ops.anyshape``, so that a tape can hold them.

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

LASTS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by rank: pictures and videos
LAST = LASTS[4]


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


CONVOLUTION = "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups"


def _fake_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    function = torch.ops.aten.conv2d if x.ndim == 4 else torch.ops.aten.conv3d
    return function(x, weight, bias, *geometry[:4]).contiguous(memory_format=LASTS[x.ndim])


@_operation(f"{CONVOLUTION}) -> Tensor", _fake_convolution)
def conv2d_last(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """A convolution from channels_last to channels_last, wherever its weight lies."""
    return _convolved(torch.ops.aten.conv2d, x, weight, bias, geometry)


@_operation(f"{CONVOLUTION}, bool by_cudnn) -> Tensor", _fake_convolution)
def conv3d_last(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """The same of videos [N, C, T, H, W]. by_cudnn: ComfyUI calls cuDNN itself, where torch's own does not."""
    *geometry, by_cudnn = geometry
    return _convolved(_by_cudnn if by_cudnn else torch.ops.aten.conv3d, x, weight, bias, geometry)


def _by_cudnn(
    x: Tensor, weight: Tensor, bias: None, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    return torch.cudnn_convolution(x, weight, padding, stride, dilation, groups, False, False, True)


def _convolved(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Sequence[Any]
) -> Tensor:
    """One that is a linear layer of each pixel runs as one, for which the library plans nothing."""
    x = _laid_last(x)
    if is_pointwise(weight, *geometry):
        out = torch.nn.functional.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
    else:
        out = function(x, weight, bias, *geometry)
    return out.contiguous(memory_format=LASTS[x.ndim])


def _laid_last(x: Tensor) -> Tensor:
    """``x`` with channels last, by its strides too: where something is one they may be others, and libraries mind."""
    x = x.contiguous(memory_format=LASTS[x.ndim])
    if 1 not in x.shape:
        return x
    n, c, *sides = x.shape
    strides, step = [], c
    for side in reversed(sides):
        strides.insert(0, step)
        step *= side
    return x.as_strided(x.shape, (step, 1, *strides))


CONVOLUTIONS = (conv2d_last, conv3d_last)


def is_pointwise(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether a convolution is a linear layer of each pixel. weight [O, I, ...]."""
    return groups == 1 and weight.shape[2:].numel() == 1 and _all(stride, 1) and _all(padding, 0)


def _all(given: Any, number: int) -> bool:
    return given == number or (isinstance(given, (list, tuple)) and all(each == number for each in given))


def _fake_like(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=LASTS[x.ndim])


@_operation(
    "(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, Tensor? shift, bool silu, Tensor[] pending)"
    " -> Tensor",
    _fake_like,
)
def group_norm_last(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, shift: Tensor | None, silu: bool,
    pending: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """GroupNorm(x + shift + pending), and SiLU of that if wanted; shift [N, C, ...], each pending of C numbers.

    The frames of a video count as one high picture.
    """
    shape, shift = x.shape, None if shift is None else shift.reshape(-1, x.shape[1])
    if x.ndim == 5:
        x = _laid_last(x).movedim(1, -1).flatten(1, 2).movedim(-1, 1)
    flat = tuple(each.reshape(-1) for each in pending)
    out = fused_ops(x.device).group_norm(x, weight, bias, groups, eps, shift, silu, flat)
    out = out.contiguous(memory_format=LAST)
    return _laid_last(out.unflatten(2, shape[2:4])) if len(shape) == 5 else out


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


def _fake_padded(x: Tensor, pad: Sequence[int], mode: str) -> Tensor:
    sides = [n + sum(widths) for n, widths in zip(x.shape[2:], _widths(x, pad), strict=True)]
    return torch.empty(*x.shape[:2], *sides, dtype=x.dtype, device=x.device, memory_format=LASTS[x.ndim])


def _widths(x: Tensor, pad: Sequence[int]) -> list[tuple[int, int]]:
    """(before, behind) of each side of ``x``; ``pad`` begins with the last one, as torch's does."""
    sides = x.ndim - 2
    given = [(pad[2 * d], pad[2 * d + 1]) if 2 * d < len(pad) else (0, 0) for d in range(sides)]
    return given[::-1]


@_operation("(Tensor x, SymInt[] pad, str mode) -> Tensor", _fake_padded)
def pad_last(x: Tensor, pad: Sequence[int], mode: str) -> Tensor:
    """Pictures or videos with more pixels and frames around them; torch's own kernels put channels first.

    mode: replicate (the outermost ones repeated) or reflect (mirrored at those).
    """
    rows = _laid_last(x).movedim(1, -1)
    sides, place = [], torch.zeros((), dtype=torch.int64, device=x.device)
    for n, (before, behind) in zip(rows.shape[1:-1], _widths(x, pad), strict=True):
        along = torch.arange(-before, n + behind, device=x.device)
        along = along.clamp_(0, n - 1) if mode == "replicate" else n - 1 - (n - 1 - along.abs_()).abs_()
        place = place.unsqueeze(-1) * n + along
        sides.append(len(along))
    return rows.flatten(1, -2).index_select(1, place.flatten()).unflatten(1, sides).movedim(-1, 1)


OF_LIBRARIES = (*CONVOLUTIONS, pad_last)  # which no kernel of ours computes
