"""The fused operations in plain torch: what every kernel must compute, and what runs where no kernel can.

Each function states the mathematics once. The Triton kernels are tested against these in float64.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def group_norm(
    x: Tensor,  # [N, C, H, W]
    weight: Tensor | None,  # [C]
    bias: Tensor | None,  # [C]
    groups: int,
    eps: float,
    shift: Tensor | None = None,  # [N, C]
    silu: bool = True,
    pending: tuple[Tensor, ...] = (),  # each [C]
) -> Tensor:
    """SiLU(GroupNorm(x + shift + pending)).

    ``shift`` is the timestep embedding; ``pending`` are biases of the layers before that are still to be added.
    """
    if shift is not None or pending:
        shift = sum(pending, 0 if shift is None else shift).expand(len(x), -1)
        x = x + shift[:, :, None, None]
    y = F.group_norm(x, groups, weight, bias, eps)
    return F.silu(y) if silu else y


def grouped_linear(
    x: Tensor | Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """x [..., K] through each of ``weights`` [N, K], each with its bias [N] if it has one: a list of [..., N].

    x: one input for all, or one for each weight.
    """
    inputs = [x] * len(weights) if isinstance(x, Tensor) else x
    layers = zip(inputs, weights, biases or [None] * len(weights), strict=True)
    return [F.linear(each, weight, bias) for each, weight, bias in layers]


def geglu(p: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]: first half times GELU (erf) of the second (Shazeer 2020, "GLU Variants", eq. 6)."""
    h, gate = p.chunk(2, dim=-1)
    return h * F.gelu(gate)


def linear_geglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GEGLU of a linear layer: x [..., K], weight [2I, K], bias [2I] -> [..., I]."""
    return geglu(F.linear(x, weight, bias))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each head; q [B, T, C], k, v [B, L, C] -> [B, T, C]."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def upsample2x(x: Tensor, size: tuple[int, int]) -> Tensor:
    """[N, C, H, W] -> [N, C, *size], nearest neighbour; ``size`` is (2H, 2W), or one less where the image was odd."""
    return F.interpolate(x, size=size, mode="nearest")
