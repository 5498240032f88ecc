"""Every model of ComfyUI's in a tiny configuration with random weights, and fresh inputs of many sizes for each.

    from tools import architectures
    from tools.architectures import patchers                  # imports ComfyUI: tools.embed.use_comfyui() first

    for architecture in architectures.present():              # those that this ComfyUI has
        patcher = patchers.make(architecture.name)            # a real ModelPatcher around the real model
        arguments, named = architecture.inputs(3)             # variant 3: a size, a batch, a prompt's length
        out = patcher.model.diffusion_model(*arguments, **named)

The table itself needs no ComfyUI, so that tests can be named after it.
"""

import ast
from pathlib import Path

from tools.architectures import audio, image, newer, newer_video, video
from tools.architectures.table import VARIANTS, Architecture, in_bfloat16, parts_of
from tools.paths import OLDER_COMFYUI, comfyui_path

__all__ = [
    "SKIPPED", "TABLE", "VARIANTS", "Architecture", "comfy", "in_bfloat16", "is_older", "is_twin", "parts_of",
    "present", "version",
]  # fmt: skip

FILES = (image, video, audio, newer, newer_video)
TABLE = {entry.name: entry for file in FILES for entry in file.ARCHITECTURES}
# Classes of comfy.supported_models that have no entry, and why.
SKIPPED = {
    "RT_DETR_v4": "finds objects in a picture: no sampler calls it",
    "DepthAnything3": "estimates the depths of a picture: no sampler calls it",
    "SAM3": "finds objects in a picture: no sampler calls it",
    "SAM31": "finds objects in a picture: no sampler calls it",
    "Trellis2": "has one size in space, which is recorded, and then points, whose number depends on values",
}

# Classes whose model is another entry's, but for widths or channels.
TWINS = frozenset(
    (
        "SD20", "SD21UnclipL", "SD21UnclipH", "LotusD", "SD_X4Upscaler", "SDXLRefiner", "SSD1B", "Segmind_Vega",
        "KOALA_700M", "KOALA_1B", "Stable_Zero123", "SD15_instructpix2pix", "SDXL_instructpix2pix", "SV3D_u", "SV3D_p",
        "FluxSchnell", "FluxInpaint", "LongCatImage", "Ovis", "PixArtSigma", "HunyuanDiT1", "HunyuanVideoI2V",
        "HunyuanVideoSkyreelsI2V", "Hunyuan3Dv2mini", "CosmosI2V", "CosmosI2VPredict2", "WAN21_FunControl2V",
        "WAN21_FlowRVS", "WAN22_Camera", "CogVideoX_I2V", "CogVideoX_Inpaint", "Kandinsky5Image",
    )
)  # fmt: skip


def is_twin(entry: Architecture) -> bool:
    """Whether the model is built like another entry's: one of ``TWINS``, or a class with other inputs or parts."""
    return entry.name in TWINS or entry.name != entry.family_name


def families(comfyui: Path | None = None) -> set[str]:
    """The names of all classes in `comfy.supported_models`, read without importing ComfyUI (this one, if not given)."""
    source = ((comfyui or comfyui_path()) / "comfy" / "supported_models.py").read_text(encoding="utf-8")
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def version(comfyui: Path | None = None) -> tuple[int, ...]:
    """Its version, read without importing it."""
    source = ((comfyui or comfyui_path()) / "comfyui_version.py").read_text(encoding="utf-8")
    number = next(node.value.value for node in ast.parse(source).body if isinstance(node, ast.Assign))
    return tuple(int(part) for part in number.split("."))


def is_older() -> bool:
    """Whether this is the older of the two ComfyUIs that the tests run on: the process of test_older_comfyui."""
    return OLDER_COMFYUI.is_dir() and version() == version(OLDER_COMFYUI)


def present(comfyui: Path | None = None) -> list[Architecture]:
    """The entries that this ComfyUI has."""
    known, this = families(comfyui), version(comfyui)
    return [entry for entry in TABLE.values() if entry.family_name in known and this >= entry.since]
