"""The result of a forward: a tensor, or several (a ControlNet's residuals, a full step with its deep feature)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .reasons import say

Output = Tensor | tuple[Tensor, ...]


def odd_form(out: Any) -> str:
    """Says why a forward's result is not an ``Output``; "" if it is one, or a list of tensors."""
    if isinstance(out, Tensor) or (type(out) in (list, tuple) and all(isinstance(item, Tensor) for item in out)):
        return ""
    return say("odd_result")


def flat(out: Any) -> Output:
    """Returns a list of tensors as a tuple."""
    return out if isinstance(out, Tensor) else tuple(out)


def tensors_of(output: Output) -> tuple[Tensor, ...]:
    """The tensors of ``output``, one or several."""
    return (output,) if isinstance(output, Tensor) else output


def each(fn: Callable[..., Tensor], *outputs: Output) -> Output:
    """``fn`` of the outputs, tensor by tensor, in the form of the first one."""
    if isinstance(outputs[0], Tensor):
        return fn(*outputs)
    return tuple(fn(*tensors) for tensors in zip(*outputs, strict=True))


def empty_like(output: Output, device: torch.device | str) -> Output:
    """Tensors of the same form on ``device``, of any numbers."""
    return each(partial(torch.empty_like, device=device), output)


def bytes_of(*tensors: Tensor | None) -> int:
    """Of these tensors, each counted once."""
    return sum(tensor.nbytes for tensor in {id(each): each for each in tensors if each is not None}.values())
