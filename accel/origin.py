"""Whose code something is: torch's, ComfyUI's own, Python's, ours, or another pack's."""

import functools
import re
import sys
from pathlib import Path
from typing import Any

ENGINE = f"{__package__}.engine"  # what every forward of ours runs in
KNOWN = frozenset(("torch", "comfy", "comfy_kitchen", "builtins", "einops"))  # packages whose code keeps nothing


def origin(value: Any) -> str:
    """The module that a function, a hook, a class or a layer is from."""
    function = getattr(value, "func", value)  # of a functools.partial
    return getattr(function, "__module__", None) or type(function).__module__


def whose(value: Any) -> str:
    """``origin`` for a reader, who may be anybody in a browser."""
    return readable(origin(value))


def readable(module: str) -> str:
    """A module's name without folders: ComfyUI names a pack's module by the whole path of its folder."""
    return re.split(r"[/\\]", module)[-1]


def is_known(value: Any) -> bool:
    """Whether its code is torch's, ComfyUI's own, Python's or ours."""
    return is_of_known(origin(value))


@functools.lru_cache(maxsize=4096)
def is_of_known(module: str) -> bool:
    """``is_known`` of what is from this module."""
    top = module.partition(".")[0]
    return module.startswith(f"{__package__}.") or top in KNOWN or top in sys.stdlib_module_names


@functools.lru_cache(maxsize=4096)
def is_beside_comfyui(module: str) -> bool:
    """Whether a module is a part of ComfyUI's program (its server, its cache), beside its package of models."""
    comfy = Path(next(iter(getattr(sys.modules.get("comfy"), "__path__", [])), "/none/comfy"))
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "/")
    return comfy.parent in file.parents and "custom_nodes" not in file.parts


def is_called_by_others() -> bool:
    """Whether another pack's code is among the callers, up to the forward that runs through an engine."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == ENGINE:
            return False
        if not is_of_known(module):
            return True
        frame = frame.f_back
    return False
