"""The fused operations in plain torch: what every kernel must compute, and what runs where no kernel can.

Each function states the mathematics once. The Triton kernels are tested against these in float64, and the compiled
regions (``accel.region_ops``) are compilations of these very functions.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

FP16_MAX = 65504.0


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


def stream_layer_norm(
    x: Tensor,  # [..., C]
    branch: Tensor | None,  # [..., C]
    weight: Tensor | None,  # [C]
    bias: Tensor | None,  # [C]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(x + branch, LayerNorm(x + branch)) over the last axis: a residual stream and what a layer adds to it."""
    x = x if branch is None else x + branch
    return x, F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def grouped_linear(x: Tensor, weights: list[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """x [..., K] through each of ``weights`` [N, K], with ``biases`` [N] if there are any: a list of [..., N]."""
    return [F.linear(x, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True)]


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift; x [B, T, C], shift and scale [B, C].

    Adaptive layer norm (Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", adaLN).
    """
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale[:, None]) + shift[:, None]


def gated_residual(x: Tensor, gate: Tensor, branch: Tensor, finite: bool = False) -> Tensor:
    """x + gate * branch; x and branch [B, T, C], gate [B, C]. ``finite``: nothing beyond fp16's range, no NaN."""
    y = torch.addcmul(x, gate[:, None], branch)
    return torch.nan_to_num(y, nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX) if finite else y


def rotary_query_key_value(
    qkv: Tensor,  # [B, T, 3 * H * D]
    query_scale: Tensor,  # [D]
    key_scale: Tensor,  # [D]
    rotation: Tensor,  # [B or 1, 1, T, D / 2, 2, 2]
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key normalised (RMSNorm) and rotated, and the value as it is; [B, H, T, D] each.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Su et al. 2021, "RoFormer". Pairs of neighbours are
    rotated, each by its own 2x2 matrix.
    """
    q, k, v = qkv.unflatten(-1, (3, -1, query_scale.shape[0])).permute(2, 0, 3, 1, 4)
    q, k = F.rms_norm(q, q.shape[-1:], query_scale, eps), F.rms_norm(k, k.shape[-1:], key_scale, eps)
    return _rotate(q, rotation), _rotate(k, rotation), v


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:  # [B, H, T, D]
    pairs = x.to(rotation.dtype).unflatten(-1, (-1, 1, 2))
    y = rotation[..., 0] * pairs[..., 0] + rotation[..., 1] * pairs[..., 1]  # [B, H, T, D / 2, 2]
    return y.flatten(-2).to(x.dtype)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GELU(x @ weight.T + bias) with tanh (Hendrycks and Gimpel 2016, section 2); [..., in] -> [..., out]."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def concat_linear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """concat(a, b) @ weight.T + bias; a [..., A], b [..., B], weight [out, A + B]."""
    return F.linear(torch.cat((a, b), -1), weight, bias)


def geglu(p: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]: first half times GELU (erf) of the second (Shazeer 2020, "GLU Variants", eq. 6)."""
    h, gate = p.chunk(2, dim=-1)
    return h * F.gelu(gate)


def linear_geglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GEGLU of a linear layer: x [..., K], weight [2I, K], bias [2I] -> [..., I]."""
    return geglu(F.linear(x, weight, bias))


def short_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each head; q [B, T, C], k, v [B, L, C] -> [B, T, C]."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def bias_add(x: Tensor, bias: Tensor | None, residual: Tensor, residual_bias: Tensor | None = None) -> Tensor:
    """(x + bias) + (residual + residual_bias); x and residual [N, C, H, W], biases [C]."""
    if bias is not None:
        x = x + bias[None, :, None, None]
    if residual_bias is not None:
        residual = residual + residual_bias[None, :, None, None]
    return x + residual


def upsample2x(x: Tensor, size: tuple[int, int]) -> Tensor:
    """[N, C, H, W] -> [N, C, *size], nearest neighbour; ``size`` is (2H, 2W), or one less where the image was odd."""
    return F.interpolate(x, size=size, mode="nearest")


def to_float64(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Copies in float64 (for tests: the reference of the reference)."""
    return tuple(None if t is None else t.to(torch.float64) for t in tensors)
