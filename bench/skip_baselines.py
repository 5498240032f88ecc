"""What Skip Blocks is compared with: DeepCache as it was published, and ComfyUI's EasyCache node.

Plain DeepCache (Ma, Fang and Wang 2024, section 3.2) reuses the deep feature of steps 0, N, 2N, ... as it is. It runs
on the machinery of our node (the cut, the state of a run), so that only schedule and forecast differ: it
costs what ours costs at the same interval and depth. The pack must be loaded.
"""

from dataclasses import dataclass

from anyshape.accel.skip.settings import SkipSettings
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_easycache import EasyCacheNode

START_PERCENT, END_PERCENT = 0.15, 0.95  # the defaults of EasyCache's node


@dataclass(frozen=True)
class PlainDeepCache(SkipSettings):
    """One full step in ``interval``, evenly, from the first on; the feature is reused."""

    forecast: str = "off"

    def full_steps(self, sigmas: list[float], sigma_start: float, sigma_end: float) -> frozenset[int]:
        """Steps 0, N, 2N, ...; the window of the noise schedule is not used."""
        return frozenset(range(0, len(sigmas), self.interval))


def easycache(patcher: ModelPatcher, threshold: float) -> ModelPatcher:
    """A clone through ComfyUI's own node."""
    return EasyCacheNode.execute(patcher, threshold, START_PERCENT, END_PERCENT, False).args[0]
