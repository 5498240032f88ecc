"""Keeps the sizes of this session and of the last one, by the file of their model, in ComfyUI's user folder."""

import os
from pathlib import Path

import folder_paths

from ..accel.last_sizes import LastSizes
from ..accel.size_list import Shape
from ..accel.stats import STATS, ModelStats, ShapeStats

NAME = "anyshape"  # of a folder that is no user's, and that no route of ComfyUI's serves


def _folder() -> Path:
    named = getattr(folder_paths, "get_system_user_directory", None)
    return Path(named(NAME) if named else os.path.join(folder_paths.get_user_directory(), f"__{NAME}"))


KEPT = LastSizes(_folder() / "sizes.json")


def collect() -> bool:
    """Notes which sizes the user has run. Returns whether there is anything new to save."""
    return any([KEPT.note(file, _asked_for(model)) for file, model in _by_file()])


def has_run(file: str, shape: Shape) -> bool:
    """Whether the model of this file has run at this size in this process, for whatever reason."""
    return any(_shape(s) == shape for found, model in _by_file() if found == file for s in list(model.shapes.values()))


def _by_file() -> list[tuple[str, ModelStats]]:
    """(file, entry) of each MODEL whose loader a workflow names."""
    models = {model.name: model for model in STATS.models() if model.kind == "model"}
    found = {name: node.file for node in STATS.nodes() if node.file for name in node.names() if name in models}
    return [(file, models[name]) for name, file in found.items()]


def _asked_for(model: ModelStats) -> list[Shape]:
    shapes = sorted(list(model.shapes.values()), key=lambda shape: shape.prompt)
    return [_shape(s) for s in shapes if s.width and s.asked]


def _shape(s: ShapeStats) -> Shape:
    return Shape(s.width, s.height, s.batch, s.frames)
