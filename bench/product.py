"""The one place where the benchmarks import those parts of the pack that they measure."""

from anyshape.accel.call import Settings
from anyshape.accel.comfy import skipping
from anyshape.accel.comfy.attach import compile_model
from anyshape.accel.comfy.controlnet import compile_controlnet
from anyshape.accel.comfy.skipping import skip_blocks
from anyshape.accel.comfy.vae import compile_vae
from anyshape.accel.skip.settings import AUTO, SkipSettings

__all__ = [
    "AUTO", "Settings", "SkipSettings", "compile_controlnet", "compile_model", "compile_vae", "skip_blocks", "skipping",
]  # fmt: skip
