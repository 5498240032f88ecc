"""What a program is bound to: weights, and constants. Between two runs weights are held no longer than by their model.

ComfyUI puts other weights in their place when it loads a model with other LoRAs, and nobody tells us. The old ones
must be gone then, as without us. If they are still there at the next run, the program goes on with them.
"""

import weakref
from collections.abc import Sequence

from torch import Tensor

Bound = list[Tensor | None]  # a program's values before it runs: its weights and constants


class NotBound(RuntimeError):
    """Raised where the module no longer has a weight as it was recorded."""


class Loose:
    """What a program is bound to, with weak references in some of its slots."""

    def __init__(self, bound: Bound, slots: Sequence[int]) -> None:
        self._refs = [(slot, weakref.ref(bound[slot])) for slot in slots]
        self._others = list(bound)
        for slot in slots:
            self._others[slot] = None

    def tight(self) -> Bound | None:
        """All of it; None if a weight is gone."""
        bound = list(self._others)
        for slot, ref in self._refs:
            bound[slot] = tensor = ref()
            if tensor is None:
                return None
        return bound


def loose(bound: "Bound | Loose | None", slots: Sequence[int]) -> "Loose | None":
    """The same, with weak references in these slots."""
    return Loose(bound, slots) if isinstance(bound, list) else bound


def tight(bound: "Bound | Loose | None") -> Bound | None:
    """What a program can run with; None if it must be bound again."""
    return bound.tight() if isinstance(bound, Loose) else bound
