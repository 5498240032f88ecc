"""The fused operations that a family's forward is written in, with one implementation a tier.

A family says *what* to compute (``families/unet.py``); these classes say *how*: ``FusedOps`` in plain torch,
``kernels.TritonOps`` on CUDA, ``region_ops.RegionOps`` where there is no Triton.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from .kernels import reference


@dataclass(frozen=True)
class Norm:
    """The parameters of a GroupNorm or LayerNorm, on the device and in the dtype of the activations."""

    weight: Tensor | None  # [C]
    bias: Tensor | None  # [C]
    eps: float
    groups: int = 1


@dataclass(frozen=True)
class Weights:
    """The parameters of a linear layer or a convolution, ready to use."""

    weight: Tensor  # [out, in, ...]
    bias: Tensor | None  # [out]


class FusedOps:
    """Every fused operation in plain torch: the eager tier's meaning, and what the faster tiers are tested against."""

    name = "eager"
    channels_last = False  # activations live in channels_last, and so should convolution weights
    defer_bias = False  # a convolution's bias is cheaper inside the next fused operation

    def group_norm(self, x: Tensor, norm: Norm, shift: Tensor | None = None, silu: bool = True) -> Tensor:
        """SiLU(GroupNorm(x + shift)); x [N, C, H, W], shift [N, C]."""
        return reference.group_norm(x, norm.weight, norm.bias, norm.groups, norm.eps, shift, silu)

    def add_layer_norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """(x + residual, LayerNorm(x + residual)); [..., C]."""
        return reference.add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)

    def geglu(self, p: Tensor) -> Tensor:
        """[..., 2I] -> [..., I]."""
        return reference.geglu(p)

    def bias_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """x + bias + residual; [N, C, H, W], bias [C]."""
        return reference.bias_add(x, bias, residual)

    def upsample2x(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, 2H, 2W]."""
        return reference.upsample2x(x)

    def compiled_variants(self) -> int:
        """How many kernel variants this process has compiled or loaded for this tier; regions count their own."""
        return 0

    def query_key_value(
        self, x: Tensor, norm: Norm, q: Weights, k: Weights, v: Weights
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The projections of LayerNorm(x) [B, T, C] that self-attention needs."""
        _, n = self.add_layer_norm(x, None, norm)
        return linear(n, q), linear(n, k), linear(n, v)

    def cross_query(self, a: Tensor, x: Tensor, out: Weights, norm: Norm, q: Weights) -> tuple[Tensor, Tensor]:
        """Ends self-attention and begins cross-attention: y = x + out(a), and q(LayerNorm(y)); [B, T, C]."""
        x, n = self.add_layer_norm(linear(a, out), x, norm)
        return x, linear(n, q)

    def feed_forward(self, a: Tensor, x: Tensor, out: Weights, norm: Norm, up: Weights, down: Weights) -> Tensor:
        """Ends cross-attention and runs the GEGLU feed-forward: y = x + out(a), y + down(GEGLU(up(LayerNorm(y))))."""
        x, n = self.add_layer_norm(linear(a, out), x, norm)
        return x + linear(self.geglu(linear(n, up)), down)


def linear(x: Tensor, weights: Weights) -> Tensor:
    """[..., in] -> [..., out]."""
    return F.linear(x, weights.weight, weights.bias)
