"""Whose code something is: torch's, ComfyUI's own, Python's, ours, or another pack's."""

import re
import sys
from typing import Any

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
    whose = origin(value)
    top = whose.partition(".")[0]
    return whose.startswith(f"{__package__}.") or top in KNOWN or top in sys.stdlib_module_names
