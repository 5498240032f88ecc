"""The fused operations on Triton kernels, in channels_last."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import KernelFailed
from ..ops import FusedOps, LinearGroup, Norm, Stream, Weights, linear
from ..stats import STATS
from . import (
    group_norm,
    grouped_linear,
    layer_norm,
    linear_geglu,
    pointwise,
    short_attention,
)
from .launch import compile_only, compiling_ahead

log = logging.getLogger(__name__)

KERNELS = (
    group_norm.moments_kernel,
    group_norm.coefficients_kernel,
    group_norm.apply_kernel,
    layer_norm.stream_layer_norm_kernel,
    pointwise.geglu_kernel,
    grouped_linear.grouped_linear_kernel,
    linear_geglu.linear_geglu_kernel,
    short_attention.short_attention_kernel,
    pointwise.bias_add_kernel,
    pointwise.upsample_kernel,
)


def _or(plain: str = "", ours: str = "") -> Callable[[Callable], Callable]:
    """For an operation without side effects: if its kernel fails, here and from then on another one takes its place.

    That is ``ours``, another method, or FusedOps's ``plain``, by default of the same name.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def operation(self: "TritonOps", *args: Any, **kwargs: Any) -> Any:
            if method.__name__ not in self._failed:
                try:
                    return method(self, *args, **kwargs)
                except KernelFailed as error:
                    self._give_up(method.__name__, error)
            other = getattr(TritonOps, ours) if ours else getattr(FusedOps, plain or method.__name__)
            return other(self, *args, **kwargs)

        return operation

    return decorate


class TritonOps(FusedOps):
    """See ``FusedOps``; activations of every operation on [N, C, H, W] come out in channels_last."""

    name = "kernels"
    channels_last = True
    defer_bias = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chosen: set[tuple] = set()  # variants that only some sizes choose; the first size runs them all
        self._failed: set[str] = set()  # operations whose kernel does not work here
        card = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        self._processors = card.multi_processor_count if card else 0
        self._takes_products = bool(card) and linear_geglu.works_on((card.major, card.minor))

    @_or()
    def group_norm(  # noqa: D102
        self, x: Tensor, norm: Norm, shift: Tensor | None = None, silu: bool = True, pending: tuple[Tensor, ...] = ()
    ) -> Tensor:
        return group_norm.group_norm(x, norm.weight, norm.bias, norm.groups, norm.eps, shift, silu, pending)

    @_or(ours="_linear_then_geglu")
    def linear_geglu(self, x: Tensor, layer: Weights) -> Tensor:  # noqa: D102
        if not self._takes_products or not linear_geglu.fits(x, layer.weight):
            return self._linear_then_geglu(x, layer)
        (outer, depth), rows = layer.weight.shape, x.numel() // x.shape[-1]
        fused = linear_geglu.is_faster(rows, depth, outer // 2, self._processors)
        variant = ("geglu", x.dtype, layer.bias is None)
        first = variant not in self._chosen
        one = linear_geglu.linear_geglu(x, layer.weight, layer.bias) if fused or first else None
        two = self._linear_then_geglu(x, layer) if first or not fused else None
        self._chosen.add(variant)
        return one if fused else two

    @_or("linear_geglu")
    def _linear_then_geglu(self, x: Tensor, layer: Weights) -> Tensor:
        return pointwise.geglu(linear(x, layer))

    @_or()
    def short_attention(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor | None:  # noqa: D102
        if not short_attention.fits(q, k, heads):
            return None
        few = k.shape[1] <= short_attention.MAX_KEYS
        variant = ("attention", q.dtype, q.shape[2] // heads)
        out = short_attention.short_attention(q, k, v, heads) if few or variant not in self._chosen else None
        self._chosen.add(variant)
        return out if few else None

    def _give_up(self, operation: str, error: KernelFailed) -> None:
        """The operation stays without its kernel; a capture that is under way is void, and says so by the error."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise error
        self._failed.add(operation)
        STATS.fallback("kernels", f"{error}: {operation} runs in plain torch. Update Triton and the GPU's driver")
        log.warning("AnyShape: %s; %s runs in plain torch", error, operation, exc_info=error)

    def compile_one(self) -> None:
        """Compiles one kernel that most models need, and with it starts Triton. Raises ``KernelFailed``."""
        torch.cuda.set_device(self._device)  # of this thread
        compile_only(pointwise.geglu_kernel, (1,), torch.float16, torch.float16, 16, 16, *pointwise.GEGLU_BLOCK)

    def compile_ahead(self, forward: Callable[[], object]) -> None:  # noqa: D102
        with compiling_ahead(self._device):
            forward()

    @_or()
    def bias_add(  # noqa: D102
        self, x: Tensor, bias: Tensor | None, residual: Tensor, residual_bias: Tensor | None = None
    ) -> Tensor:
        return pointwise.bias_add(x, bias, residual, residual_bias)

    @_or()
    def upsample2x(self, x: Tensor, size: tuple[int, int]) -> Tensor:  # noqa: D102
        return pointwise.upsample2x(x, size)

    @_or()
    def stream_layer_norm(self, stream: Stream, norm: Norm) -> tuple[Stream, Tensor]:  # noqa: D102
        x, n = layer_norm.stream_layer_norm(stream.value, stream.branch, norm.weight, norm.bias, norm.eps)
        return Stream(x), n

    @_or()
    def grouped_linear(self, x: Tensor | Sequence[Tensor], group: LinearGroup) -> list[Tensor]:  # noqa: D102
        if group.table is None:
            if not grouped_linear.fits(group.weights, group.biases or ()):
                return super().grouped_linear(x, group)
            group.table = grouped_linear.make_table(group.weights, group.biases, not isinstance(x, Tensor))
        return grouped_linear.grouped_linear(x, group.weights, group.table)

    def compiled_variants(self) -> int:  # noqa: D102
        return sum(sum(_variants(kernel)) for kernel in KERNELS)


def _variants(kernel: Any) -> Iterator[int]:
    # Triton keeps compiled variants in JITFunction.device_caches (3.2 and newer), before that in JITFunction.cache
    for cache in (getattr(kernel, "device_caches", None) or getattr(kernel, "cache", {})).values():
        yield len(cache[0] if isinstance(cache, tuple) else cache)
