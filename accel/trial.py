"""Which of two ways of running a shape is faster, found out from calls that are made anyway."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

FUSED, EAGER = "fused", "eager"
ORDER = (FUSED, FUSED, EAGER, FUSED, EAGER)  # the first call compiles and does not count
MARGIN = 0.98  # eager must be this much faster: a tie is noise


@dataclass
class Trial:
    """The trial of one shape that cannot have a graph.

    Without a graph a forward is bound by Python and launches at small sizes, where eager may be the faster one. Both
    are right, so the trial costs no more than the slower of the two.
    """

    times: dict[str, list[float]] = field(default_factory=lambda: {FUSED: [], EAGER: []})  # seconds
    calls: int = 0

    def run(self, fused: Callable[[], Tensor], eager: Callable[[], Tensor], device: torch.device) -> Tensor:
        """The result of the winner, or of the way whose turn it is."""
        if self.over:
            return eager() if self.eager_wins else fused()
        way = ORDER[self.calls]
        _wait(device)
        started = time.perf_counter()
        out = fused() if way == FUSED else eager()
        _wait(device)
        if self.calls:
            self.times[way].append(time.perf_counter() - started)
        self.calls += 1
        return out

    @property
    def over(self) -> bool:
        """Whether each way has had its turns."""
        return self.calls >= len(ORDER)

    @property
    def eager_wins(self) -> bool:
        """Whether eager was clearly faster."""
        return self.over and min(self.times[EAGER]) < MARGIN * min(self.times[FUSED])

    def verdict(self) -> str:
        """What the user reads where eager won."""
        fused, eager = (min(self.times[way]) * 1e3 for way in (FUSED, EAGER))
        return f"without a graph eager is faster at this size ({eager:.1f} ms against {fused:.1f} ms)"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
