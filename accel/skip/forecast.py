"""Forecasts a deep feature at a skipped step: by reuse, or by the line through the last two full steps.

Reuse is DeepCache (Ma, Fang and Wang 2024). The line is the first divided difference (Newton's form), exact for
features that are linear in the axis, at any distances of the steps: TaylorSeer (Liu et al. 2025) of order 1 for steps
that are not evenly spaced.

The axis is sigma: its steps shrink as the noise does, so the line reaches less and less far beyond the last full step.
Other axes, a damped slope and the parabola of three steps were measured against it (``bench/skip_ablation.py``).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class History:
    """The last features of one prompt's rows, and where on the axis they were computed. Holds them on their device."""

    order: int = 1  # 0: reuse; 1: the line
    _points: list[tuple[float, Tensor]] = field(default_factory=list)

    def add(self, position: float, feature: Tensor) -> None:
        """Appends a feature; at an equal position it takes the last one's place (a sampler's second evaluation).

        A feature of another shape or dtype than the ones before begins from scratch: patches such as Deep Shrink
        change it.
        """
        if self._points and _differ(self._points[-1][1], feature):
            self._points.clear()
        if self._points and self._points[-1][0] == position:
            self._points.pop()
        self._points = [*self._points, (position, feature)][-(self.order + 1) :]

    def at(self, position: float) -> Tensor:
        """The forecast at ``position``: a feature of the history itself, or a new tensor of its shape and dtype."""
        last, feature = self._points[-1]
        if len(self._points) == 1:
            return feature
        before, older = self._points[-2]
        return torch.lerp(older, feature, 1.0 + (position - last) / (last - before))

    @property
    def shape(self) -> torch.Size:
        """Of the last feature."""
        return self._points[-1][1].shape

    @property
    def bytes(self) -> int:
        """Memory of the features kept."""
        return sum(feature.numel() * feature.element_size() for _, feature in self._points)


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or a.dtype != b.dtype
