"""Relates a model's latents to image pixels and frames, by its latent format.

ComfyUI's nodes for empty latents know these numbers, each for its own models. Newer versions also put them into the
latent format itself, which is asked first.
"""

from dataclasses import dataclass

from comfy.latent_formats import LatentFormat

USUAL = 8  # image pixels along each side of one latent element
PIXELS = {  # where it is another number, by class of ComfyUI's latent formats
    "SD_X4": 4, "SC_B": 4, "SC_Prior": 42, "Flux2": 16, "Wan22": 16, "LTXV": 32, "HunyuanImage21": 32,
    "HunyuanImage21Refiner": 16, "HunyuanVideo15": 16, "ChromaRadiance": 1,
}  # fmt: skip
USUAL_FRAMES = 4  # frames of one latent frame, the first apart: Hunyuan, Wan
FRAMES = {"Mochi": 6, "LTXV": 8, "Cosmos1CV8x8x8": 8}
SOUND = {"ACEAudio"}  # its latents have two dimensions, and neither is a side of an image


@dataclass(frozen=True)
class Latents:
    """The latents of one model; ``frames`` is 0 for a model of single images."""

    channels: int
    pixels: int
    frames: int

    def shape(self, width: int, height: int, batch: int = 1, frames: int = 1) -> tuple[int, ...]:
        """Of a batch of images or videos of this size: [N, C, h, w], of video [N, C, t, h, w]."""
        time = (self.steps(frames),) if self.frames else ()
        return batch, self.channels, *time, height // self.pixels, width // self.pixels

    def steps(self, frames: int) -> int:
        """How many latent frames there are of so many frames; 1 for a model of single images."""
        return (frames - 1) // self.frames + 1 if self.frames else 1

    def size(self, latent_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(width, height, frames) in image pixels, of a latent of ``latent_shape``."""
        height, width = (side * self.pixels for side in latent_shape[-2:])
        return width, height, (latent_shape[-3] - 1) * self.frames + 1 if self.frames else 1


def latents_of(latent_format: LatentFormat) -> Latents | None:
    """Returns the latents of a model; None if they are not those of images or video (sound, 3D shapes)."""
    names = [one.__name__ for one in type(latent_format).__mro__]
    if latent_format.latent_dimensions not in (2, 3) or names[0] in SOUND:
        return None
    video = latent_format.latent_dimensions == 3
    pixels = getattr(latent_format, "spacial_downscale_ratio", 0) or _known(PIXELS, names, USUAL)
    frames = getattr(latent_format, "temporal_downscale_ratio", 0) or _known(FRAMES, names, USUAL_FRAMES)
    return Latents(latent_format.latent_channels, int(pixels), int(frames) if video else 0)


def _known(numbers: dict[str, int], names: list[str], usual: int) -> int:
    return next((numbers[name] for name in names if name in numbers), usual)
