"""What a program is bound to: weights, and constants. Between two runs weights are held no longer than by their model.

ComfyUI puts other weights in their place when it loads a model with other LoRAs, and nobody tells us. The old ones
must be gone then, as without us. If they are still there at the next run, the program goes on with them.

With DynamicVRAM a load puts another tensor at the same place in memory. Weights of convolutions are laid out in place
for a run and back at its end, so the old tensor says then how the weight lay without us, and no longer how it lies.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .named_tensors import PartsByPath, resolve
from .values import Weight

MOST_FORMS = 1 << 14  # that are kept
BESIDE = 1 << 30  # bytes that must be free beside copies


class NotBound(RuntimeError):
    """Raised where the module no longer has a weight as it was recorded."""


class WeightForm(NamedTuple):
    """A weight as a program reads it."""

    leaf: Weight
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


# One object for the programs of all sizes. Each reads thousands of weights, and Python's garbage collector goes through
# all objects, for a quarter of a second, whenever a quarter of them is new.
form_of = lru_cache(maxsize=MOST_FORMS)(WeightForm)


def weight(modules: PartsByPath, form: WeightForm, turned: bool) -> Tensor:
    """The weight of this form in a model. turned: it may lie channels last. Raises ``NotBound``."""
    leaf = form.leaf
    try:
        tensor = resolve(modules, leaf)
    except (AttributeError, LookupError) as error:
        raise NotBound(f"the weight {leaf.module}.{leaf.name} is gone") from error
    stride = form.stride if turned else tensor.stride()
    if (tuple(tensor.shape), stride, tensor.dtype, tensor.device) != form[1:]:
        raise NotBound(f"the weight {leaf.module}.{leaf.name} has changed its form or its place")
    return tensor


class Bound(list[Tensor | None]):
    """A program's values before it runs: its weights and constants. lies: how those lie that may be laid out.

    steps, spread: what runs in the place of the program's own, where steps fetch their weights, or call layers of
    another block than the one that was recorded.
    """

    lies: Sequence[tuple[int, tuple[int, ...]]] = ()  # (slot, strides)
    steps: Sequence[Any] = ()
    spread: Sequence[tuple[int, int, int]] = ()

    def note(self, slots: Iterable[int]) -> None:
        """Notes how the weights in these slots lie."""
        self.lies = [(slot, self[slot].stride()) for slot in slots]

    @property
    def is_as_noted(self) -> bool:
        """Whether all weights lie as they did."""
        return all([self[slot].stride() == stride for slot, stride in self.lies])


def spread(values: list[Tensor | None], places: Sequence[tuple[int, int, int]]) -> None:
    """Makes the ``Spread`` leaves of a run, all of them at once. places: (slot, that of its weight, rows)."""
    if places:
        rows = [count for _, _, count in places]
        wide = torch.cat([values[source].reshape(-1).expand(count) for _, source, count in places])
        for (slot, _, _), part in zip(places, wide.split(rows), strict=True):
            values[slot] = part


def memory(stride: tuple[int, ...], device: torch.device, source: Tensor) -> Tensor:
    """Memory on ``device`` for a copy of ``source``, with these strides: one for the programs of all sizes.

    It is known by the source's own memory, so that may be another tensor's by now, in the place of one that is gone.
    """
    key = source.data_ptr(), tuple(source.shape), source.stride(), source.dtype, stride, device
    found = _COPIES.get(key)
    if found is None:
        with torch.inference_mode(False):  # it is written in either mode
            found = torch.empty_strided(source.shape, stride, dtype=source.dtype, device=device)
        _COPIES[key] = found
    return found


_COPIES: "weakref.WeakValueDictionary[tuple, Tensor]" = weakref.WeakValueDictionary()  # as long as somebody holds one


def copies_fit(size: int, device: torch.device) -> bool:
    """Whether the device has room for copies of that many bytes, with some beside them. Those that it has need none."""
    held = sum(tensor.nbytes for tensor in list(_COPIES.values()) if tensor.device == device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused > max(0, size - held) + BESIDE


@torch.inference_mode()
def copy_over(values: Bound, places: Sequence[tuple[int, int]]) -> None:
    """Copies to the device what stays there. places: (its slot, that of what it is a copy of)."""
    for slot, source in places:
        values[slot].copy_(values[source], non_blocking=True)


class Loose:
    """What a program is bound to, with weak references in some of its slots."""

    def __init__(self, bound: Bound, slots: Sequence[int]) -> None:
        self._refs = [(slot, weakref.ref(bound[slot])) for slot in slots]
        self._others, self._lies, self._steps, self._spread = list(bound), bound.lies, bound.steps, bound.spread
        for slot in slots:
            self._others[slot] = None

    def tight(self) -> Bound | None:
        """All of it; None if a weight is gone."""
        bound = Bound(self._others)
        bound.lies, bound.steps, bound.spread = self._lies, self._steps, self._spread
        for slot, ref in self._refs:
            bound[slot] = tensor = ref()
            if tensor is None:
                return None
        return bound


def loose(bound: "Bound | Loose | None", slots: Sequence[int]) -> "Loose | None":
    """The same, with weak references in these slots."""
    return Loose(bound, slots) if isinstance(bound, list) else bound


def there(bound: "Bound | Loose | None") -> Bound | None:
    """What a program is bound to; None if a weight of it is gone."""
    return bound.tight() if isinstance(bound, Loose) else bound


def tight(bound: "Bound | Loose | None") -> Bound | None:
    """What a program can run with; None if it must be bound again."""
    found = there(bound)
    return found if found is not None and found.is_as_noted else None
