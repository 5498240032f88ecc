"""The fused operations that a family's forward is written in, with one implementation per tier.

A family says *what* to compute (``families/unet_forward.py``); these classes say *how*: ``FusedOps`` in plain torch,
``kernels.TritonOps`` on CUDA.
"""

from collections.abc import Callable, Sequence
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

    def rows(self, start: int, stop: int | None = None) -> "Weights":
        """The layer's outputs from ``start`` to ``stop`` alone."""
        # .data: a view of a parameter that was made in inference mode and moved outside of it raises
        return Weights(self.weight.data[start:stop], None if self.bias is None else self.bias.data[start:stop])

    def matrix(self) -> Tensor:
        """The weight as [out, in], for a linear layer or a convolution of 1x1."""
        return self.weight if self.weight.ndim == 2 else self.weight.data.flatten(1)


@dataclass(frozen=True)
class Stream:
    """A transformer's residual stream: ``value + branch``, added where the next norm reads it anyway.

    The sum is rounded as ComfyUI rounds it, layer by layer: in bfloat16 a stream that is summed in another order is as
    far from eager as each of them is from the truth.
    """

    value: Tensor  # [B, T, C]
    branch: Tensor | None = None  # [B, T, C]

    def settled(self) -> Tensor:
        """The stream as one tensor."""
        return self.value if self.branch is None else self.value + self.branch


class LinearGroup:
    """Linear layers that take the same input. Holds their weights: keep it no longer than a run."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> None:
        self.weights, self.biases = weights, biases  # each [N, K], [N] or None
        self.table: Tensor | None = None  # a tier's own description of them; a captured graph reads it


class FusedOps:
    """Every fused operation in plain torch: the eager tier's meaning, and what the faster tiers are tested against."""

    name = "eager"
    channels_last = False  # activations live in channels_last, and so should convolution weights
    defer_bias = False  # a convolution's bias is cheaper inside the next fused operation

    def group_norm(
        self, x: Tensor, norm: Norm, shift: Tensor | None = None, silu: bool = True, pending: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """SiLU(GroupNorm(x + shift + pending)); x [N, C, H, W], shift [N, C], each pending [C]."""
        return reference.group_norm(x, norm.weight, norm.bias, norm.groups, norm.eps, shift, silu, pending)

    def linear_geglu(self, x: Tensor, layer: Weights) -> Tensor:
        """GEGLU of a linear layer; [..., K] -> [..., I], weight [2I, K]."""
        return reference.linear_geglu(x, layer.weight, layer.bias)

    def short_attention(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor | None:
        """Attention to few keys, or None where the attention backend is to do it; q [B, T, C], k, v [B, L, C]."""
        return None

    def compile_ahead(self, forward: Callable[[], object]) -> None:
        """Compiles what ``forward`` needs, where that is faster than one after the other; its result is void."""

    def bias_add(self, x: Tensor, bias: Tensor | None, residual: Tensor, residual_bias: Tensor | None = None) -> Tensor:
        """(x + bias) + (residual + residual_bias); [N, C, H, W], biases [C]."""
        return reference.bias_add(x, bias, residual, residual_bias)

    def upsample2x(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """[N, C, H, W] -> [N, C, *size], which is (2H, 2W) or one less."""
        return reference.upsample2x(x, size)

    def grouped_linear(self, x: Tensor | Sequence[Tensor], group: LinearGroup) -> list[Tensor]:
        """[..., K], one for all or one for each layer, -> a [..., N] for each layer of the group."""
        return reference.grouped_linear(x, group.weights, group.biases)

    def compiled_variants(self) -> int:
        """How many kernel variants this process has compiled or loaded for this tier."""
        return 0

    def stream_layer_norm(self, stream: Stream, norm: Norm) -> tuple[Stream, Tensor]:
        """(the stream with nothing left to add, its LayerNorm); [B, T, C]."""
        x, n = reference.stream_layer_norm(stream.value, stream.branch, norm.weight, norm.bias, norm.eps)
        return Stream(x), n

    def query_key_value(
        self, stream: Stream, norm: Norm, q: Weights, k: Weights, v: Weights
    ) -> tuple[Stream, Tensor, Tensor, Tensor]:
        """The stream, and the projections of its LayerNorm that self-attention needs; [B, T, C]."""
        stream, n = self.stream_layer_norm(stream, norm)
        return stream, linear(n, q), linear(n, k), linear(n, v)

    def cross_query(self, a: Tensor, stream: Stream, out: Weights, norm: Norm, q: Weights) -> tuple[Stream, Tensor]:
        """Ends self-attention and begins cross-attention: y = stream + out(a), and q(LayerNorm(y)); [B, T, C]."""
        stream, n = self.stream_layer_norm(Stream(stream.settled(), linear(a, out)), norm)
        return stream, linear(n, q)

    def feed_forward(self, a: Tensor, stream: Stream, out: Weights, norm: Norm, up: Weights, down: Weights) -> Stream:
        """Ends cross-attention and runs the GEGLU feed-forward.

        y = stream + out(a), y + down(GEGLU(up(LayerNorm(y)))); [B, T, C].
        """
        stream, n = self.stream_layer_norm(Stream(stream.settled(), linear(a, out)), norm)
        return Stream(stream.value, linear(self.linear_geglu(n, up), down))


def linear(x: Tensor, weights: Weights) -> Tensor:
    """[..., in] -> [..., out]."""
    return F.linear(x, weights.weight, weights.bias)
