"""Where compiled artefacts lie: a folder of ComfyUI's models, by ComfyUI's own conventions."""

from pathlib import Path

import folder_paths

NAME = "anyshape"  # under models/, and in extra_model_paths.yaml


def folders() -> list[Path]:
    """The folders to try, in this order: where extra_model_paths.yaml says, models/anyshape, the user directory."""
    folder_paths.add_model_folder_path(NAME, str(Path(folder_paths.models_dir, NAME)))
    folder_paths.folder_names_and_paths[NAME][1].add(".anyshape")  # none of the files is a model for a list
    return [*map(Path, folder_paths.get_folder_paths(NAME)), Path(folder_paths.get_user_directory(), NAME)]
