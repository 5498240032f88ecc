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

from tools.architectures import audio, image, video
from tools.architectures.table import VARIANTS, Architecture
from tools.paths import comfyui_path

__all__ = ["SKIPPED", "TABLE", "VARIANTS", "Architecture", "families", "present"]

TABLE = {entry.name: entry for entry in image.ARCHITECTURES + video.ARCHITECTURES + audio.ARCHITECTURES}
# Classes of comfy.supported_models that have no entry, and why.
SKIPPED: dict[str, str] = {}


def families() -> set[str]:
    """The names of all classes in `comfy.supported_models`, read without importing ComfyUI."""
    source = (comfyui_path() / "comfy" / "supported_models.py").read_text(encoding="utf-8")
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def present() -> list[Architecture]:
    """The entries whose class this ComfyUI has."""
    known = families()
    return [entry for entry in TABLE.values() if entry.family_name in known]
