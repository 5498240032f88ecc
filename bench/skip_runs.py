"""Sampling runs of the demo model for the benchmarks of Skip Blocks: pictures, seconds, forwards, and likeness.

Needs ComfyUI, the pack and the demo loaded (``tools.embed``).
"""

import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import skimage
import torch
from anyshape.accel import stats
from anyshape_demo import evaluate, model
from comfy.model_patcher import ModelPatcher
from skimage.metrics import structural_similarity
from torch import Tensor, nn

from bench import measure
from bench.product import SkipSettings, skipping
from bench.skip_tables import EQUAL

BATCH = 16
ROWS = 2  # that the model sees for a picture: with CFG, the prompt and the empty one
FIRST_SEED = 1000


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
    """The demo model with the prompts of a benchmark, evenly spread over those of its training."""

    def __init__(self, prompts: int) -> None:
        self.patcher, self.vae, self.text = model.load("fp32")
        known = self.text.prompts
        self.prompts = [known[round(place)] for place in np.linspace(0, len(known) - 1, prompts)]
        self.seeds = [FIRST_SEED + index for index in range(prompts)]
        self.unet: nn.Module = self.patcher.model.diffusion_model

    @property
    def batches(self) -> list[slice]:
        """The prompts in batches. Neighbours are alike, so each batch is spread over all of them."""
        count = -(-len(self.prompts) // BATCH)
        return [slice(first, None, count) for first in range(count)]

    def warm_up(self) -> None:
        """Two steps, so that the first setting does not pay for what is loaded once."""
        self.run(self.patcher, 2, (64, 64), slice(1))

    def run(self, patcher: ModelPatcher, steps: int, size: tuple[int, int], batch: slice) -> Sampled:
        """A picture of size (width, height) for each prompt of a batch."""
        took: dict[str, float] = {}
        prompts, seeds, setting = self.prompts[batch], self.seeds[batch], evaluate.Setting(steps=steps)
        skips = skipping.skips(patcher)
        # where blocks are skipped, programs run and no hook of a layer is called, but each run says what it did
        with nullcontext() if skips else counting(self.unet) as rows, measure.seconds(took, "sampling"):
            latents = evaluate.sample(patcher, self.text, prompts, seeds, size, setting)
        pictures, seconds = evaluate.decode(self.vae, latents), took["sampling"] / len(prompts)
        if skips:
            run = stats.snapshot()["skip"][-1]
            return Sampled(pictures, seconds, *(run[name] for name in ("full", "skipped", "depth", "share")))
        full, every = (rows[name] / ROWS / len(prompts) for name in ("deep", "every"))
        return Sampled(pictures, seconds, full, every - full)

    def skipping(self, settings: SkipSettings) -> ModelPatcher:
        """A clone through our node's function."""
        return skipping.skip_blocks(self.patcher, settings, lambda line: None)[0]

    def conditions(self) -> dict[str, Any]:
        """What the JSON says of the runs."""
        setting = {name: value for name, value in vars(evaluate.Setting()).items() if name != "steps"}
        return {
            "model": "demo",
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "scikit_image": skimage.__version__,
            "setting": setting,
            "first_seed": FIRST_SEED,
            "batch": BATCH,
        }


@contextmanager
def counting(unet: nn.Module) -> Iterator[Counter[str]]:
    """Rows that went through the middle block ("deep") and through the last layers ("every"), whoever called them."""
    rows: Counter[str] = Counter()

    def count(name: str, module: nn.Module) -> Any:
        return module.register_forward_hook(lambda _, inputs, out: rows.update({name: len(out)}))

    handles = [count("deep", unet.middle_block[0]), count("every", unet.out)]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def psnr(pictures: Tensor, references: Tensor) -> list[float]:
    """PSNR of each of the pictures [N, 3, H, W] to its reference, dB; ``EQUAL`` at most."""
    errors = (pictures.double() - references.double()).square().mean(dim=(1, 2, 3))
    return (-10 * errors.clamp(min=10 ** (-EQUAL / 10)).log10()).tolist()


def ssim(pictures: Tensor, references: Tensor) -> list[float]:
    """Structural similarity of each; scikit-image's windows of 7 x 7 pixels, each channel by itself."""
    pairs = zip(pictures.numpy(), references.numpy(), strict=True)
    return [float(structural_similarity(a, b, channel_axis=0, data_range=1.0)) for a, b in pairs]
