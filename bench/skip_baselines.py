"""What Skip Blocks is compared with: methods as they were published, on the machinery of our node, and EasyCache.

The first three run on the cut and the state of a run that our node has, so that only schedule and forecast differ:
at as many full steps they cost what ours costs. All of them reuse or forecast what the deep blocks gave: of a UNet the
deep feature, of a transformer what its middle added. The pack must be loaded.

- DeepCache (Ma, Fang and Wang 2024, section 3.2): the feature of steps 0, N, 2N, ... as it is. On a transformer that is
  the reuse of the residual, as FORA and the like do it.
- TaylorSeer (Liu et al. 2025): the same steps, the first three in full, and the parabola through the last three.
- MagCache (Ma et al. 2025): reuse, until the magnitude of what was reused has drifted too far. How it drifts from step
  to step is measured beforehand (``magnitudes``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from anyshape.accel.skip.forecast import History
from anyshape.accel.skip.settings import SkipSettings
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from comfy_extras.nodes_easycache import EasyCacheNode
from torch import Tensor

START_PERCENT, END_PERCENT = 0.15, 0.95  # the defaults of EasyCache's node
COPY = "bench.copy"
FIRST_FULL = 3  # steps of TaylorSeer
RETAINED, AT_MOST = 0.2, 4  # MagCache: the share of the steps that are full at first; steps in a row that it skips


@dataclass(frozen=True)
class PlainDeepCache(SkipSettings):
    """One full step in ``interval``, evenly, from the first on; the feature is reused."""

    forecast: str = "off"

    def full_steps(
        self, sigmas: list[float], sigma_start: float, sigma_end: float, row: bool = False
    ) -> frozenset[int]:
        """Steps 0, N, 2N, ...; the window of the noise schedule is not used."""
        return frozenset(range(0, len(sigmas), self.interval))


AXES: dict[
    str, Callable[[Sequence[float], float], float]
] = {  # what is drawn over: of the run's levels and one of them
    "step": lambda sigmas, sigma: float(sigmas.index(sigma)),
    "sigma": lambda sigmas, sigma: sigma,
    "log_sigma": lambda sigmas, sigma: math.log(max(sigma, 1e-3)),
}


@dataclass
class Curve(History):
    """The polynomial of any order up to 2 through the last full steps, over another axis, with a damped slope."""

    damping: float = 1.0  # share of the slope that is believed
    axis: Callable[[float], float] = lambda sigma: sigma

    def add(self, position: float, feature: Tensor) -> None:
        """As in ``History``."""
        super().add(self.axis(position), feature)

    def at(self, position: float) -> Tensor:
        """As in ``History``."""
        position, (last, feature) = self.axis(position), self._points[-1]
        if len(self._points) == 1:
            return feature
        before, older = self._points[-2]
        line = torch.lerp(older, feature, 1.0 + self.damping * (position - last) / (last - before))
        if len(self._points) == 2:
            return line
        first, oldest = self._points[0]
        # the second divided difference, as the shares of the three features in it
        bend = self.damping**2 * (position - last) * (position - before)
        shares = (
            (last - before) * (last - first),
            (before - last) * (before - first),
            (first - last) * (first - before),
        )
        for share, each in zip(shares, (feature, older, oldest), strict=True):
            line.add_(each, alpha=bend / share)
        return line


@dataclass(frozen=True)
class OfOrder(SkipSettings):
    """Ours, with a forecast of any order over any axis, and full steps as dense as wanted."""

    of_order: int = 1
    axis: str = "sigma"
    damping: float = 1.0
    density_of: float | None = None  # None: as it fits the model

    def history(self, sigmas: Sequence[float]) -> Callable[[], History]:
        """Makes a ``Curve``."""
        return partial(Curve, self.of_order, damping=self.damping, axis=partial(AXES[self.axis], sigmas))

    def density(self, row: bool) -> float | None:
        """As it was chosen."""
        return self.density_of or super().density(row)


@dataclass(frozen=True)
class Placed(OfOrder):
    """Ours, with the full steps where they are wanted."""

    placed: frozenset[int] = frozenset()

    def full_steps(
        self, sigmas: list[float], sigma_start: float, sigma_end: float, row: bool = False
    ) -> frozenset[int]:
        """Those. The window of the noise schedule is not used."""
        return self.placed


@dataclass(frozen=True)
class TaylorSeer(OfOrder):
    """Of order 2, over the step's number."""

    of_order: int = 2
    axis: str = "step"

    def full_steps(
        self, sigmas: list[float], sigma_start: float, sigma_end: float, row: bool = False
    ) -> frozenset[int]:
        """As DeepCache's, and the first ones."""
        return frozenset(range(0, len(sigmas), self.interval)) | frozenset(range(FIRST_FULL))


@dataclass(frozen=True)
class MagCache(PlainDeepCache):
    """Skips while the accumulated error of the magnitude stays below ``threshold``."""

    threshold: float = 0.1
    magnitudes: Sequence[float] = ()  # of the feature, a step each

    def full_steps(
        self, sigmas: list[float], sigma_start: float, sigma_end: float, row: bool = False
    ) -> frozenset[int]:
        """The published rule, on what was measured beforehand."""
        full, ratio, error, row = set(), 1.0, 0.0, 0
        for step in range(len(sigmas)):
            if step >= max(1, round(RETAINED * len(sigmas))):
                ratio *= self.magnitudes[step] / self.magnitudes[step - 1]
                error, row = error + abs(1 - ratio), row + 1
                if error < self.threshold and row <= AT_MOST:
                    continue
            full.add(step)
            ratio, error, row = 1.0, 0.0, 0
        return frozenset(full)


def easycache(patcher: ModelPatcher, threshold: float) -> ModelPatcher:
    """A clone through ComfyUI's own node.

    It adds into the tensor that the model is given. Of a flow model in float32 that is the sampler's own, which half
    precision would have copied; so it is copied here, or EasyCache would come out far worse than it is.
    """
    clone = patcher.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, COPY, _with_a_copy)
    return EasyCacheNode.execute(clone, threshold, START_PERCENT, END_PERCENT, False).args[0]


def _with_a_copy(executor: WrapperExecutor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return executor(x.clone(), *args, **kwargs)
