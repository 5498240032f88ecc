"""Where full steps would lie if all features were known beforehand: what a measured schedule could gain at best.

The error of a skipped step is how far the forecast lies from the feature that was measured there, times the distance
that the sampler goes by it. Of all ways to place as many full steps, the first one among them, the one with the least
sum is taken.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Places = tuple[int, ...]


def best(features: Sequence[Tensor], sigmas: Sequence[float], count: int) -> frozenset[int]:
    """The ``count`` full steps. features: flat, of each step; sigmas: of each step, and the one behind the last."""
    errors = _Errors(features, sigmas)
    found: dict[Places, tuple[float, Places]] = {(0,): (0.0, (0,))}  # by the latest two: the least sum, and its steps
    for _ in range(count - 1):
        longer: dict[Places, tuple[float, Places]] = {}
        for latest, (total, places) in found.items():
            for step in range(latest[-1] + 1, len(features)):
                reached = total + errors.between(latest, step), (*places, step)
                key = (latest[-1], step)
                longer[key] = min(longer.get(key, reached), reached)
        found = longer
    ends = [(total + errors.between(latest, len(features)), places) for latest, (total, places) in found.items()]
    return frozenset(min(ends)[1])


class _Errors:
    def __init__(self, features: Sequence[Tensor], sigmas: Sequence[float]) -> None:
        flat = torch.stack([feature.double() for feature in features])
        self._products = (flat @ flat.T).tolist()
        self._sigmas = sigmas
        self._known: dict[tuple[Places, int], float] = {}

    def between(self, latest: Places, end: int) -> float:
        """The errors of all steps behind ``latest``, the last one or two full steps, and before ``end``."""
        return sum(self._error(latest, step) for step in range(latest[-1] + 1, end))

    def _error(self, latest: Places, step: int) -> float:
        if (latest, step) not in self._known:
            self._known[latest, step] = self._distance(latest, step) * (self._sigmas[step] - self._sigmas[step + 1])
        return self._known[latest, step]

    def _distance(self, latest: Places, step: int) -> float:
        """From the feature to the line through the latest two, or to the only one."""
        shares = {step: 1.0, latest[-1]: -1.0}
        if len(latest) == 2:
            older, newer = (self._sigmas[place] for place in latest)
            slope = (self._sigmas[step] - newer) / (newer - older)
            shares |= {latest[1]: -1.0 - slope, latest[0]: slope}
        square = sum(a * b * self._products[i][j] for i, a in shares.items() for j, b in shares.items())
        return max(square, 0.0) ** 0.5
