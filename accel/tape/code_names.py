"""What is known of code by its names: whose package it is of, which names it reads, and what it imports."""

import dis
import functools
import importlib.util
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


def beside(kind: type) -> list[dict[str, object]]:
    """What there is in the file of a class, by name.

    Not every pack's file is a module that can be found by its name, and another one may have that name.
    """
    functions = [each for each in vars(kind).values() if isinstance(each, types.FunctionType)]
    found = [each.__globals__ for each in functions if each.__module__ == kind.__module__]
    if kind.__module__ in sys.modules:
        found.append(vars(sys.modules[kind.__module__]))
    return list({id(names): names for names in found}.values())


def imported_by(function: types.FunctionType) -> list[types.ModuleType]:
    """The modules that a function's code imports while it runs, of those that are loaded."""
    package = function.__globals__.get("__package__") or ""
    found = []
    for name, level in imports_of(function.__code__):
        try:
            full = importlib.util.resolve_name("." * level + name, package) if level else name
        except ImportError:  # it has no package: the import fails as well
            continue
        found += [sys.modules[each] for each in (full, full.partition(".")[0]) if each in sys.modules]
    return list({id(module): module for module in found}.values())


@functools.lru_cache(maxsize=1024)
def imports_of(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """(name, level) of what code imports while it runs, as ``__import__`` takes them; functions inside of it too."""
    steps = list(dis.get_instructions(code))
    places = [place for place, step in enumerate(steps) if step.opname == "IMPORT_NAME"]
    found = {(steps[place].argval, _number(steps[place - 2].argval)) for place in places}  # level, names, import
    inside = [imports_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(sorted(found.union(*inside)))


def _number(level: object) -> int:
    return level if isinstance(level, int) else 0
