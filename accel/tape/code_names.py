"""What is known of code by its names: whose package it is of, and which names it reads."""

import dis
import functools
import sys
import types
from pathlib import Path

# Packages whose functions do the same for the same arguments; their own modules' values are compared by identity.
LIBRARIES = frozenset(("torch", "torchvision", "numpy", "scipy", "einops", "comfy", "comfy_kitchen", "triton", "PIL"))


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether a module of this name is of a package whose functions do the same for the same arguments."""
    top = module.partition(".")[0]
    return top in LIBRARIES or top in sys.stdlib_module_names or _is_installed(top)


def _is_installed(top: str) -> bool:
    """Whether it is a package that was installed, as xformers is, and no pack of nodes."""
    file = Path(getattr(sys.modules.get(top), "__file__", None) or "")
    return any(folder.name in ("site-packages", "dist-packages") for folder in list(file.parents)[:2])


@functools.lru_cache(maxsize=1024)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals that code reads, functions inside of it too."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inside = (globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(names.union(*inside))


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and of attributes that code reads, and words: ``getattr(module, "name")``."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
        elif isinstance(constant, str):  # getattr(module, "name")
            names.add(constant)
    return frozenset(names)
