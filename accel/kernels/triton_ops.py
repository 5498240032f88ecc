"""The fused operations on Triton kernels, in channels_last."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..ops import FusedOps, Norm
from . import group_norm, layer_norm, pointwise

_KERNELS = (
    group_norm.moments_kernel,
    group_norm.coefficients_kernel,
    group_norm.apply_kernel,
    layer_norm.add_layer_norm_kernel,
    pointwise.geglu_kernel,
    pointwise.bias_add_kernel,
    pointwise.upsample_kernel,
)


class TritonOps(FusedOps):
    """See ``FusedOps``; activations of every operation on [N, C, H, W] come out in channels_last."""

    name = "kernels"
    channels_last = True
    defer_bias = True

    def group_norm(self, x: Tensor, norm: Norm, shift: Tensor | None = None, silu: bool = True) -> Tensor:  # noqa: D102
        return group_norm.group_norm(x, norm.weight, norm.bias, norm.groups, norm.eps, shift, silu)

    def add_layer_norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:  # noqa: D102
        return layer_norm.add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)

    def geglu(self, p: Tensor) -> Tensor:  # noqa: D102
        return pointwise.geglu(p)

    def bias_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:  # noqa: D102
        return pointwise.bias_add(x, bias, residual)

    def upsample2x(self, x: Tensor) -> Tensor:  # noqa: D102
        return pointwise.upsample2x(x)

    def compiled_variants(self) -> int:  # noqa: D102
        return sum(sum(_variants(kernel)) for kernel in _KERNELS)


def _variants(kernel: Any) -> Iterator[int]:
    # Triton keeps compiled variants in JITFunction.device_caches (3.2 and newer), before that in JITFunction.cache
    for cache in (getattr(kernel, "device_caches", None) or getattr(kernel, "cache", {})).values():
        yield len(cache[0] if isinstance(cache, tuple) else cache)
