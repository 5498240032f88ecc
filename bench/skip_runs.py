"""Sampling runs of the demo model for the benchmarks of Skip Blocks: pictures, seconds, forwards, and likeness.

Needs ComfyUI, the pack and the demo loaded (``tools.embed``).
"""

import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import skimage
import torch
from anyshape.accel.families import skipping
from anyshape.accel.families.unet_cost import shares
from anyshape.accel.skip.settings import SkipSettings
from anyshape_demo import evaluate, model
from comfy.model_patcher import ModelPatcher
from skimage.metrics import structural_similarity
from torch import Tensor, nn

from bench import measure

BATCH = 16
ROWS = 2  # that the model sees for a picture: with CFG, the prompt and the empty one
LATENT = 8  # pixels of a picture for one of the latent, each way
CEILING = 100.0  # dB that equal pictures get, whose PSNR is infinite
FIRST_SEED = 1000


class Sampled(NamedTuple):
    """What came of one setting."""

    pictures: Tensor  # [N, 3, H, W] in 0..1
    seconds: float  # of sampling, for a picture: the median of the batches
    full: float  # forwards for a picture in which every block ran
    skipped: float  # in which the deep ones did not


class Demo:
    """The demo model with the prompts of a benchmark, evenly spread over those of its training."""

    def __init__(self, prompts: int) -> None:
        self.patcher, self.vae, self.text = model.load("fp32")
        known = self.text.prompts
        self.prompts = [known[round(place)] for place in np.linspace(0, len(known) - 1, prompts)]
        self.seeds = [FIRST_SEED + index for index in range(prompts)]
        self.unet: nn.Module = self.patcher.model.diffusion_model

    def warm_up(self) -> None:
        """Two steps, so that the first setting does not pay for what is loaded once."""
        evaluate.generate(
            (self.patcher, self.vae, self.text), self.prompts[:1], self.seeds[:1], (64, 64), evaluate.Setting(steps=2)
        )

    def run(self, patcher: ModelPatcher, steps: int, size: tuple[int, int]) -> Sampled:
        """A picture of size (width, height) for each prompt, in batches."""
        pictures, seconds = [], []
        with counting(self.unet) as rows:
            for start in range(0, len(self.prompts), BATCH):
                latents, took = self._batch(patcher, steps, size, slice(start, start + BATCH))
                pictures.append(evaluate.decode(self.vae, latents))
                seconds.append(took / len(latents))
        full, every = (rows[name] / ROWS / len(self.prompts) for name in ("deep", "every"))
        return Sampled(torch.cat(pictures), statistics.median(seconds), full, every - full)

    def _batch(self, patcher: ModelPatcher, steps: int, size: tuple[int, int], part: slice) -> tuple[Tensor, float]:
        """The latents of one batch, and the seconds that they took."""
        took: dict[str, float] = {}
        with measure.seconds(took, "sampling"):
            setting = evaluate.Setting(steps=steps)
            latents = evaluate.sample(patcher, self.text, self.prompts[part], self.seeds[part], size, setting)
        return latents, took["sampling"]

    def skipping(self, settings: SkipSettings) -> ModelPatcher:
        """A clone through our node's function."""
        return skipping.skip_blocks(self.patcher, settings, lambda line: None)[0]

    def share(self, settings: SkipSettings, size: tuple[int, int]) -> float:
        """Of a forward's FLOPs, what a skipped step pays."""
        latent = size[1] // LATENT, size[0] // LATENT
        return shares(self.unet, *latent)[self.depth(settings, size)]

    def depth(self, settings: SkipSettings, size: tuple[int, int]) -> int:
        """The depth that the run has."""
        return skipping.depth_of(settings, self.unet, size[1] // LATENT, size[0] // LATENT)

    def conditions(self) -> dict[str, Any]:
        """What the JSON says of the runs."""
        setting = {name: value for name, value in vars(evaluate.Setting()).items() if name != "steps"}
        return {
            "model": "demo",
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "scikit_image": skimage.__version__,
            "setting": setting,
            "prompts": len(self.prompts),
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


def psnr(pictures: Tensor, reference: Tensor) -> float:
    """Mean over the pictures [N, 3, H, W] of each one's PSNR to its reference, dB; ``CEILING`` at most."""
    errors = (pictures.double() - reference.double()).square().mean(dim=(1, 2, 3))
    return (-10 * errors.clamp(min=10 ** (-CEILING / 10)).log10()).mean().item()


def ssim(pictures: Tensor, reference: Tensor) -> float:
    """Mean structural similarity; scikit-image's windows of 7 x 7 pixels, each channel by itself."""
    pairs = zip(pictures.numpy(), reference.numpy(), strict=True)
    return float(np.mean([structural_similarity(a, b, channel_axis=0, data_range=1.0) for a, b in pairs]))


def quality(sampled: Sampled, reference: Sampled) -> dict[str, float]:
    """How near the pictures come, as the JSON says it."""
    pictures, others = sampled.pictures, reference.pictures
    return {"psnr": round(psnr(pictures, others), 2), "ssim": round(ssim(pictures, others), 4)}
