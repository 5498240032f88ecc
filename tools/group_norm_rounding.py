"""How far GroupNorm in float32 may be from the exact one, for the input at hand: its values may nearly cancel."""

import torch
from torch import Tensor

GROUPS, EPSILON = 32, 1e-5
STEEPEST = 1.1  # SiLU's slope is at most 1.0998


def cancels(x: Tensor, shift: Tensor | None = None) -> Tensor:
    """(|x| + |shift|) / std of each group [N, 32]: how many times float32's rounding grows where these cancel.

    x [N, C, H, W] and shift [N, C] in float64. The few values of a small group may lie close together.
    """
    groups = _shifted(x, shift)
    largest = _shifted(x.abs(), None if shift is None else shift.abs()).amax(-1)
    return largest / _std(groups).squeeze(-1)


def loses(x: Tensor, shift: Tensor | None, weight: Tensor | None, expected: Tensor) -> float:
    """The relative error (L2) of the whole result that rounding explains; ``expected`` is the exact result.

    The kernel computes a x + b with a = weight / std and b = (shift - mean) a + bias. Two values that nearly cancel are
    each off by eps / 2 of themselves, so the sum is off by d = eps cancels(x, shift), in units of the std. That is a
    mean over such sums, so off by d as well: a normalised z is off by d (1 + |z|), times weight and SiLU's slope.
    """
    groups = _shifted(x, shift)
    z = (groups - groups.mean(-1, keepdim=True)) / _std(groups)
    off = torch.finfo(torch.float32).eps * cancels(x, shift)[:, :, None] * (1 + z.abs())
    scale = 1.0 if weight is None else weight[:, None, None].abs()
    return (STEEPEST * off.reshape(x.shape) * scale).norm().item() / expected.norm().item()


def _shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    """[N, 32, values of a group]."""
    return (x if shift is None else x + shift[:, :, None, None]).reshape(len(x), GROUPS, -1)


def _std(groups: Tensor) -> Tensor:
    return (groups.var(-1, correction=0, keepdim=True) + EPSILON).sqrt()
