"""What the user chose on the Skip Blocks node."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .forecast import History
from .schedule import DENSITY, FEW_STEPS, full_steps

PRESETS = {  # what takes the place of interval and depth; docs/performance.md has what each costs and gives
    "custom": {},
    "safe": {"interval": 2, "depth": "auto"},
    "balanced": {"interval": 3, "depth": "auto"},
    "fast": {"interval": 4, "depth": "auto"},
}
FORECASTS = ("order1", "off")
AUTO = "auto"
MAX_INTERVAL = 20
FEW = f"{FEW_STEPS} steps or fewer leave little to win, so every step is full; Skip Blocks is for longer runs"


def with_preset(preset: str, interval: int, depth: str) -> dict[str, Any]:
    """Returns the interval and the depth that apply. Raises ValueError."""
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; choose one of {', '.join(PRESETS)}")
    return {"interval": interval, "depth": depth} | PRESETS[preset]


@dataclass(frozen=True)
class SkipSettings:
    """Raises ValueError naming the input, the value and the accepted ones."""

    interval: int = 3  # one full step in N
    depth: str = AUTO  # or a number: input blocks 0..depth and as many output blocks run on every step
    start_percent: float = 0.0  # of the noise schedule; outside this window every step is full
    end_percent: float = 1.0
    forecast: str = FORECASTS[0]

    def __post_init__(self) -> None:
        if not 1 <= self.interval <= MAX_INTERVAL:
            raise ValueError(f"interval is {self.interval}; give 1 (every step full) to {MAX_INTERVAL}")
        if self.depth != AUTO and not self.depth.isdecimal():
            raise ValueError(f"depth is {self.depth!r}; choose auto or a number from 0")
        if not 0.0 <= self.start_percent <= self.end_percent <= 1.0:
            raise ValueError(
                f"start_percent is {self.start_percent} and end_percent is {self.end_percent}; give two numbers from "
                f"0 to 1, the start not above the end"
            )
        if self.forecast not in FORECASTS:
            raise ValueError(f"forecast is {self.forecast!r}; choose one of {', '.join(FORECASTS)}")

    # Decided by measurement, so the node does not ask for them; bench/skip_baselines.py has others.

    def history(self, sigmas: Sequence[float]) -> Callable[[], History]:
        """What makes the forecast of a feature, in a run of these noise levels."""
        return partial(History, 1 if self.forecast == "order1" else 0)

    def density(self, row: bool) -> float | None:
        """Of full steps, see ``schedule``. row: the model is a row of blocks, and not shaped like a U."""
        return None if row else DENSITY

    def full_steps(
        self, sigmas: list[float], sigma_start: float, sigma_end: float, row: bool = False
    ) -> frozenset[int]:
        """The full ones of the steps at ``sigmas``; those outside [sigma_end, sigma_start] all are.

        row: as of ``density``.
        """
        steps = range(len(sigmas))
        if len(sigmas) <= FEW_STEPS:
            return frozenset(steps)
        window = [step for step in steps if sigma_end <= sigmas[step] <= sigma_start]
        return frozenset(steps) - frozenset(window) | full_steps(window, self.interval, self.density(row))
