"""The fused operations on Triton kernels. Pictures [N, C, H, W] come out in channels_last."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KernelFailed
from ..stats import STATS
from . import flash_attention, geglu_upsample, group_norm, grouped_linear, linear_geglu, reference
from .launch import compile_only

log = logging.getLogger(__name__)

KERNELS = (
    group_norm.moments_kernel,
    group_norm.coefficients_kernel,
    group_norm.apply_kernel,
    geglu_upsample.geglu_kernel,
    grouped_linear.grouped_linear_kernel,
    linear_geglu.linear_geglu_kernel,
    flash_attention.flash_attention_kernel,
    geglu_upsample.upsample_kernel,
)


def _or(plain: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """For an operation without side effects: if its kernel fails, ``plain`` takes its place, here and from then on."""

    def decorate(method: Callable) -> Callable:
        name = method.__name__.lstrip("_")

        @functools.wraps(method)
        def operation(self: "TritonOps", *args: Any) -> Any:
            if name not in self._failed:
                try:
                    return method(self, *args)
                except KernelFailed as error:
                    self._give_up(name, error)
            return plain(*args)

        return operation

    return decorate


class TritonOps:
    """The operations on one device; ``reference`` says what they compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chosen: set[tuple] = set()  # variants that only some sizes choose; the first size runs them all
        self._failed: set[str] = set()  # operations whose kernel does not work here
        card = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        self._processors = card.multi_processor_count if card else 0
        self._takes_products = bool(card) and linear_geglu.works_on((card.major, card.minor))

    @_or(reference.group_norm)
    def group_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, shift: Tensor | None,
        silu: bool, pending: tuple[Tensor, ...],
    ) -> Tensor:  # fmt: skip
        """GroupNorm(x + shift + pending), and SiLU of that if wanted; shift [N, C], each pending [C]."""
        return group_norm.group_norm(x, weight, bias, groups, eps, shift, silu, pending)

    def linear_geglu(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """GEGLU of a linear layer, one kernel where its tiles fill the card; [..., K] -> [..., I], weight [2I, K]."""
        fused = first = False
        if self._takes_products and linear_geglu.fits(x, weight):
            (outer, depth), rows = weight.shape, x.numel() // x.shape[-1]
            fused = linear_geglu.is_faster(rows, depth, outer // 2, self._processors)
            variant = ("geglu", x.dtype, bias is None)
            first = variant not in self._chosen
        one = self._geglu_of_product(x, weight, bias) if fused or first else None
        two = self._geglu(F.linear(x, weight, bias)) if first or one is None else None
        if first:
            self._chosen.add(variant)
        return one if fused and one is not None else two

    @_or(lambda *_: None)
    def _geglu_of_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        return linear_geglu.linear_geglu(x, weight, bias)

    @_or(reference.geglu)
    def _geglu(self, p: Tensor) -> Tensor:
        return geglu_upsample.geglu(p)

    @_or(reference.flash_attention)
    def flash_attention(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        """Attention; to many keys, of heads that do not suit it, it is the library's. q [B, T, C], k, v [B, L, C]."""
        if not flash_attention.fits(q, k, heads):
            return reference.flash_attention(q, k, v, heads)
        suits = flash_attention.suits(q.shape[2] // heads, k.shape[1])
        variant = ("attention", q.dtype, q.shape[2] // heads)
        out = flash_attention.flash_attention(q, k, v, heads) if suits or variant not in self._chosen else None
        self._chosen.add(variant)
        return out if suits else reference.flash_attention(q, k, v, heads)

    @_or(reference.upsample2x)
    def upsample2x(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """[N, C, H, W] -> [N, C, *size], which is (2H, 2W) or one less."""
        return geglu_upsample.upsample2x(x, size)

    @_or(lambda x, weights, biases, table: reference.grouped_linear(x, weights, biases))
    def grouped_linear(
        self, x: Tensor | Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], table: Tensor
    ) -> list[Tensor]:
        """[..., K], one for all or one for each layer, -> a [..., N] for each. table: what ``make_table`` made."""
        return grouped_linear.grouped_linear(x, weights, table)

    def compile_one(self) -> None:
        """Compiles one kernel that most models need, and with it starts Triton. Raises ``KernelFailed``."""
        torch.cuda.set_device(self._device)  # of this thread
        block = geglu_upsample.GEGLU_BLOCK
        compile_only(geglu_upsample.geglu_kernel, (1,), torch.float16, torch.float16, 16, 16, *block)

    def compiled_variants(self) -> int:
        """How many variants of these kernels this process has compiled or loaded."""
        caches = [cache for kernel in KERNELS for cache in getattr(kernel, "device_caches", {}).values()]
        return sum(len(cache[0] if isinstance(cache, tuple) else cache) for cache in caches)

    def _give_up(self, operation: str, error: KernelFailed) -> None:
        """The operation stays without its kernel; a capture that is under way is void, and says so by the error."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise error
        self._failed.add(operation)
        STATS.fallback("kernels", f"{error}: {operation} runs in plain torch. Update Triton and the GPU's driver")
        log.warning("AnyShape: %s; %s runs in plain torch", error, operation, exc_info=error)
