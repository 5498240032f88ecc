"""Imports the modules that name ComfyUI's classes when they are first needed.

Another version of ComfyUI may have renamed one of them. Then the module that names it is missing, with a reason, and
the other nodes work.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from ..attempt import attempt, named
from ..errors import Unavailable
from ..reasons import say
from ..stats import STATS

T = TypeVar("T")


def module(name: str) -> ModuleType:
    """The module ``name`` of this package. Raises ``Unavailable`` if this ComfyUI lacks what it needs."""
    found, failure = attempt(lambda: importlib.import_module(f".{name}", __package__), named)
    if failure:
        raise Unavailable(say("old_comfyui", part=name, error=failure))
    return found


def node_work(name: str, function: str) -> Callable[..., tuple[Any, str]]:
    """``function`` of the module ``name``: (what a node gives, what the user should know or "").

    Where the module cannot be imported, the node gives back what it got.
    """

    def work(given: T, *args: Any) -> tuple[T, str]:
        try:
            found = module(name)
        except Unavailable as error:
            STATS.fallback(type(given).__name__, f"{error}. It runs as without this node")
            return given, f"{error}. It runs as without this node"
        return getattr(found, function)(given, *args)

    return work


compile_vae = node_work("vae", "compile_vae")
compile_controlnet = node_work("controlnet", "compile_controlnet")
