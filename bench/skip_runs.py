"""Sampling runs of the demo model for the benchmarks of Skip Blocks: pictures, seconds, forwards, and likeness.

Needs ComfyUI, the pack and the demo loaded (``tools.embed``).
"""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import comfy.samplers
import numpy as np
import torch
import torch.nn.functional as F
from anyshape.accel import stats
from anyshape_demo import evaluate, model
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from bench import measure
from bench.product import Settings, SkipSettings, compile_model, skipping
from bench.skip_tables import EQUAL

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"  # where pictures are compared
BATCH = 64 if CUDA else 16
ROWS = 2  # that the model sees for a picture: with CFG, the prompt and the empty one
FIRST_SEED = 1000
CALIBRATING = 4  # prompts by which magnitudes and features are measured
WINDOW = 7  # pixels a side of SSIM's windows
COUNTER = "bench.forwards"


class Sampled(NamedTuple):
    """One batch."""

    pictures: Tensor  # [N, 3, H, W] in 0..1
    seconds: float  # of sampling, for a picture
    full: float  # forwards for a picture in which every block ran
    skipped: float  # in which the deep ones did not
    depth: int | None = None  # of Skip Blocks
    share: float = 0.0  # of a full forward's work that a skipped one does


@dataclass
class Tally:
    """What came of one setting, over the batches."""

    seconds: list[float] = field(default_factory=list)  # a picture, by batch
    full: float = 0.0  # forwards per picture, as in Sampled: the mean of the batches
    skipped: float = 0.0
    depth: int | None = None
    share: float = 0.0
    psnr: list[float] = field(default_factory=list)  # dB, by picture
    ssim: list[float] = field(default_factory=list)

    def add(self, sampled: Sampled, reference: Sampled) -> None:
        """Counts a batch, compared with the pictures in full."""
        before = len(self.seconds)
        self.full = (before * self.full + sampled.full) / (before + 1)
        self.skipped = (before * self.skipped + sampled.skipped) / (before + 1)
        self.seconds.append(sampled.seconds)
        self.depth, self.share = sampled.depth, sampled.share
        self.psnr += psnr(sampled.pictures, reference.pictures)
        self.ssim += ssim(sampled.pictures, reference.pictures)

    def quality(self) -> dict[str, float]:
        """How near the pictures come, in the mean, as the JSON says it."""
        return {"psnr": round(statistics.fmean(self.psnr), 2), "ssim": round(statistics.fmean(self.ssim), 4)}


class Demo:
    """A demo model with the prompts of a benchmark, evenly spread over those of its training.

    On a GPU it runs on Compile Model, so that seconds are those of the GPU and not of Python; on a CPU as it is.
    """

    def __init__(self, prompts: int, architecture: str = model.UNET, dtype: str = "fp32") -> None:
        self.architecture, self.dtype = architecture, dtype
        self.plain, self.vae, self.text = model.load(dtype, architecture)
        self.patcher = compile_model(self.plain, Settings())[0] if CUDA else self.plain
        known = self.text.prompts
        self.prompts = [known[round(place)] for place in np.linspace(0, len(known) - 1, prompts)]
        self.seeds = [FIRST_SEED + index for index in range(prompts)]

    @property
    def batches(self) -> list[slice]:
        """The prompts in batches. Neighbours are alike, so each batch is spread over all of them."""
        count = -(-len(self.prompts) // BATCH)
        return [slice(first, None, count) for first in range(count)]

    def run(
        self, patcher: ModelPatcher, steps: int, size: tuple[int, int], batch: slice, sampler: str = "euler"
    ) -> Sampled:
        """A picture of size (width, height) for each prompt of a batch."""
        took: dict[str, float] = {}
        rows: Counter[str] = Counter()
        prompts, seeds = self.prompts[batch], self.seeds[batch]
        setting = evaluate.Setting(steps=steps, sampler=sampler)
        with measure.seconds(took, "sampling"):
            latents = evaluate.sample(counting(patcher, rows), self.text, prompts, seeds, size, setting)
        pictures, seconds = evaluate.decode(self.vae, latents).to(DEVICE), took["sampling"] / len(prompts)
        if skipping.skips(patcher):  # then some of the forwards were in part
            run = stats.snapshot()["skip"][-1]
            return Sampled(pictures, seconds, *(run[name] for name in ("full", "skipped", "depth", "share")))
        return Sampled(pictures, seconds, rows["forwards"] / ROWS / len(prompts), 0.0)

    def skipping(self, settings: SkipSettings) -> ModelPatcher:
        """A clone through our node's function."""
        return skipping.skip_blocks(self.patcher, settings, lambda line: None)[0]

    def magnitudes(self, steps: int, size: tuple[int, int], sampler: str) -> list[float]:
        """Of what the deep blocks give, a step each: the mean over some prompts, every step in full."""
        return [statistics.fmean(map(magnitude, found)) for found in self._watched(steps, size, sampler)]

    def features(self, steps: int, size: tuple[int, int]) -> list[Tensor]:
        """What the deep blocks give of some prompts, a flat tensor for each step, every step in full."""
        return [torch.cat([each.flatten() for each in found]) for found in self._watched(steps, size, "euler")]

    def _watched(self, steps: int, size: tuple[int, int], sampler: str) -> list[list[Tensor]]:
        """What the deep blocks give in the forwards of each step."""
        found: list[Tensor] = []
        handles = watch(self.plain.model.diffusion_model, found.append)
        try:
            self.run(self.plain, steps, size, slice(None, None, -(-len(self.prompts) // CALIBRATING)), sampler)
        finally:
            for handle in handles:
                handle.remove()
        return [found[at * len(found) // steps : (at + 1) * len(found) // steps] for at in range(steps)]

    def sigmas(self, steps: int) -> list[float]:
        """Of the steps, and the one behind the last."""
        sampling = self.plain.get_model_object("model_sampling")
        return comfy.samplers.calculate_sigmas(sampling, evaluate.Setting().scheduler, steps).tolist()

    def conditions(self) -> dict[str, Any]:
        """What the JSON says of the runs."""
        setting = evaluate.Setting()
        return {
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "setting": {"scheduler": setting.scheduler, "cfg": setting.cfg},
            "first_seed": FIRST_SEED,
            "batch": BATCH,
        }


def counting(patcher: ModelPatcher, rows: Counter[str]) -> ModelPatcher:
    """A clone whose forwards are counted by their rows: those that a cache of whole steps did not take the place of."""

    def count(executor: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        out = executor(*args, **kwargs)
        rows["forwards"] += len(out)
        return out

    clone = patcher.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, COUNTER, count)
    return clone


def watch(network: nn.Module, tell: Callable[[Tensor], None]) -> list[Any]:
    """Hooks that tell what the deep blocks gave, at each forward."""
    if hasattr(network, "output_blocks"):
        layer = network.output_blocks[-2][-1]
        return [layer.register_forward_hook(lambda _, inputs, out: tell(out))]
    given: list[Tensor] = []
    first, last = network.layers[0], network.layers[-1]
    return [
        first.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0])),
        last.register_forward_hook(lambda _, inputs, out: tell(out - given.pop())),
    ]


def magnitude(feature: Tensor) -> float:
    """The mean length of its vectors."""
    return feature.float().norm(dim=1 if feature.dim() == 4 else -1).mean().item()


def psnr(pictures: Tensor, references: Tensor) -> list[float]:
    """PSNR of each of the pictures [N, 3, H, W] to its reference, dB; ``EQUAL`` at most."""
    errors = (pictures.double() - references.double()).square().mean(dim=(1, 2, 3))
    return (-10 * errors.clamp(min=10 ** (-EQUAL / 10)).log10()).tolist()


def ssim(pictures: Tensor, references: Tensor) -> list[float]:
    """Structural similarity of each (Wang et al. 2004), as scikit-image has it: windows of 7 x 7 pixels, a channel
    each, the mean over the windows that lie within the picture. Computed where the pictures are.
    """
    a, b = pictures.double(), references.double()

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, WINDOW, stride=1)

    sample = WINDOW**2 / (WINDOW**2 - 1)  # the sample's variance
    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = (sample * (mean(x * x) - m * m) for x, m in ((a, mean_a), (b, mean_b)))
    both = sample * (mean(a * b) - mean_a * mean_b)
    c1, c2 = 0.01**2, 0.03**2
    likeness = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return likeness.mean(dim=(1, 2, 3)).tolist()
