"""Tensors that lie in one another's memory: whether they share elements, and copies that lie as they do."""

from collections.abc import Iterable

import torch
from torch import Tensor


def lie_apart(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one memory have no element in common, as two parts of each row have none."""
    if a.stride() != b.stride():
        return False
    first, second = sorted((a, b), key=Tensor.storage_offset)
    gap, whole = second.storage_offset() - first.storage_offset(), a.untyped_storage().nbytes()
    for step, size, other in sorted(zip(a.stride(), first.shape, second.shape, strict=True), reverse=True):
        if not step or size == other == 1:
            continue
        if not gap % step and size <= gap // step and (gap // step + other) * step <= whole:
            return True
        whole = step
    return False


def copies(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """A copy of each by its id, in their order. Of one that lies in another's memory, it lies in that one's copy so.

    So whoever writes into one of the copies changes the others as he would change the tensors.
    """
    each, made = {id(tensor): tensor for tensor in tensors}, dict[int, Tensor]()
    memory: dict[int, list[tuple[Tensor, Tensor]]] = {}  # those that were copied, by where their memory begins
    with torch.inference_mode(False), torch.no_grad():  # torch counts what is written into such a tensor
        for key, tensor in sorted(each.items(), key=lambda item: item[1].numel(), reverse=True):
            copied = memory.setdefault(tensor.untyped_storage().data_ptr(), [])
            parts = (_part(tensor, whole, copy) for whole, copy in copied)
            found = next((part for part in parts if part is not None), None)
            if found is None:
                found = tensor.clone()
                copied.append((tensor, found))
            made[key] = found
    return {key: made[key] for key in each}


def _part(tensor: Tensor, whole: Tensor, copy: Tensor) -> Tensor | None:
    """The part of ``copy`` that ``tensor`` is of ``whole``, of which that is a copy; None if it is none of it."""
    if tensor.dtype != whole.dtype:
        return None
    first, shape, stride = tensor.storage_offset() - whole.storage_offset(), tensor.shape, tensor.stride()
    if not first and (shape, stride) == (whole.shape, whole.stride()):
        return copy.view(copy.shape)
    if copy.stride() != whole.stride() or not tensor.numel() or not 0 <= first <= _last(whole) - _last(tensor):
        return None
    return copy.as_strided(shape, stride, copy.storage_offset() + first) if _last(whole) < whole.numel() else None


def _last(tensor: Tensor) -> int:
    """How far its last element lies behind its first."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
