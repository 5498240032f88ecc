"""One forward whose libraries plan as little as they can: what cuDNN would plan for it alone is computed otherwise.

cuDNN plans attention of each new length for 35 to 50 ms, and each new form of a convolution for 2 ms, all of them the
host's (one H200). Of a later size's first forward only the result is wanted, to compare a program with that plans less.
The same sums in another order, and as exact. Where not even the result is wanted, attention is not computed (``void``).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..kernels.operations import is_pointwise
from .attention_choice import attend, supports
from .layout import lie_alike
from .traits import by_name

aten = torch.ops.aten
GEOMETRY = (("weight", None), ("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))
FEW = 16  # elements
CONVOLUTION, ATTENTION = aten.conv2d.default, aten._scaled_dot_product_cudnn_attention.default

_BESIDES: dict[tuple[torch.device, torch.dtype], tuple] = {}  # what cuDNN's attention gives besides its result


def instead(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What an operation gives, without a plan; None if it is not one of those, or only cuDNN can."""
    if func is ATTENTION:
        return _attention(func, args, kwargs)
    if func is CONVOLUTION:
        given = by_name(func, args, kwargs)
        if given["input"].ndim == 4 and is_pointwise(*[given.get(name, other) for name, other in GEOMETRY]):
            return _product(given)
    return None


def without_plans(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function``, one of ComfyUI's for attention, on FlashAttention, which plans nothing."""
    with _ByFlash():
        return function(*args, **kwargs)


# Convolutions -------------------------------------------------------------------------------------------------------


def format_of(x: Tensor) -> torch.memory_format:
    """How a convolution's result lies if its weight lies as torch makes it: as its argument."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _product(given: dict[str, Any]) -> Tensor:
    """input [N, I, H, W], weight [O, I, 1, 1]; the bias is added to what was rounded, as torch does behind cuDNN."""
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    out = torch.bmm(weight.flatten(1).expand(len(x), -1, -1), x.flatten(2)).unflatten(2, x.shape[2:])
    out = out if bias is None else out.add_(bias.view(-1, 1, 1))
    return out.contiguous(memory_format=format_of(x))


# Attention ----------------------------------------------------------------------------------------------------------


class _ByFlash(TorchFunctionMode):
    """FlashAttention in place of torch's own choice within, where it can."""

    def __torch_function__(
        self, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            out = _by_flash(*args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)


def _attention(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """What cuDNN's attention gives, computed by FlashAttention; None where that cannot, or at the first call."""
    given = by_name(func, args, kwargs)
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_bias"))
    besides = _besides(q)
    if besides is None or given["compute_log_sumexp"]:
        return None
    out = _by_flash(q, k, v, mask, given.get("dropout_p", 0.0), given.get("is_causal", False), given.get("scale"))
    if out is None or not lie_alike(q.shape, out.stride(), q.stride()):  # as cuDNN's lies
        return None
    return out, *besides


def void(args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """What cuDNN's attention gives, with a result that nobody has computed; None where it may lie otherwise."""
    given = by_name(ATTENTION, args, kwargs)
    q = given["query"]
    besides = _besides(q)
    if besides is None or given["compute_log_sumexp"] or q.shape[-1] != given["value"].shape[-1]:
        return None
    return torch.empty_like(q), *besides


def heard(args: tuple, kwargs: dict[str, Any], out: tuple) -> None:
    """Notes what cuDNN's attention has given besides its result: nothing, or single elements, whatever the sizes.

    It is not called just to see that: for a size that no model has, that took 0.06 s and more.
    """
    given = by_name(ATTENTION, args, kwargs)
    q, others = given["query"], out[1:]
    small = all(item.numel() <= FEW for item in others if isinstance(item, Tensor))
    if small and not given["compute_log_sumexp"]:
        _BESIDES[q.device, q.dtype] = others


def _besides(q: Tensor) -> tuple | None:
    """New tensors for what cuDNN's attention gives besides its result; None if it was not heard yet."""
    others = _BESIDES.get((q.device, q.dtype))
    return others and tuple([item.detach() if isinstance(item, Tensor) else item for item in others])


def _by_flash(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """As torch's attention of these arguments; None if it is not for FlashAttention."""
    if attn_mask is not None or dropout_p or enable_gqa or q.device.type != "cuda" or q.ndim != 4:
        return None
    if q.shape[1] != k.shape[1] or not supports("flash", q, k, v, None, is_causal):
        return None
    return attend("flash", q, k, v, None, is_causal, scale)
