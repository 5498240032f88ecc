"""A later size of ComfyUI's models runs the plan of an earlier one: the one that it would have by itself."""

from dataclasses import dataclass

import pytest
import torch

from tools import architectures
from tools.architectures.table import Draw

# Of kinds that are not below, and one of both: UNets whose pictures are frames, pictures in loops, audio and sound.
MODELS = ("Flux", "SVD_img2vid", "Stable_Cascade_B", "WAN22_S2V", "ACEStep")
VARIANTS = 5  # one to four pictures, and one again; every number of frames
# Of their pictures and prompts, which run the same kernels.
SEVERAL_LENGTHS = ("Flux", "Lumina2", "QwenImage", "WAN21_T2V", "HunyuanVideo", "SDXL")
# Pictures, their sides, frames and words: a prompt as long as the picture, as a head is wide, as there are pictures.
BY_CHANCE = (
    (1, 8, 8, 1, 16), (1, 8, 8, 1, 19), (1, 12, 8, 1, 16), (2, 8, 8, 2, 32), (2, 8, 12, 2, 9), (2, 8, 8, 3, 2),
    (1, 8, 12, 1, 16),
)  # fmt: skip


def reused_right(architecture: architectures.Architecture, variants: int, least: int) -> None:
    """Each plan that is reused is compared, ``least`` of them; a size that fits no earlier plan has its own."""
    from tools.architectures import taped
    from tools.recording import steps_of

    studied = taped.Studied(architecture)
    for k in range(variants):
        before = studied.outlines.reused
        program = studied.record(k).program(fuse=True)
        if studied.outlines.reused > before:
            assert steps_of(program) == steps_of(studied.record(k).program(fuse=True, alone=True)), k
    assert studied.outlines.reused >= least, studied.outlines.misfits


@pytest.mark.usefixtures("pack", "one_thread")
@pytest.mark.parametrize("name", [entry.name for entry in architectures.present() if entry.name in MODELS])
def test_a_reused_plan_is_the_one_that_the_size_would_have_by_itself(name: str):
    reused_right(architectures.TABLE[name], VARIANTS, least=1)


@dataclass(frozen=True)
class ByChance(architectures.Architecture):
    """Variants of the sizes in ``BY_CHANCE``."""

    def draw(self, k: int, dtype: torch.dtype = torch.float32) -> Draw:
        batch, *sides, frames, tokens = BY_CHANCE[k]
        height, width = ((side * self.scale + self.base) // self.multiple * self.multiple for side in sides)
        seed, frames = torch.Generator().manual_seed(k), min(frames, self.frames)
        return Draw(self.config, batch, height, width, frames, tokens, dtype, seed)


@pytest.mark.usefixtures("pack", "one_thread")
@pytest.mark.parametrize("name", [entry.name for entry in architectures.present() if entry.name in SEVERAL_LENGTHS])
def test_a_plan_that_was_made_where_lengths_are_equal_by_chance(name: str):
    reused_right(ByChance(**vars(architectures.TABLE[name])), len(BY_CHANCE), least=2)
