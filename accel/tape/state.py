"""Finds what a patch's Python code can see besides its arguments, so that a recording of it can be guarded.

A patch of another node is a function or an object of unknown code. Recorded once, its effect is fixed; so whatever that
code may read must be as it was: closures, defaults, attributes, globals, however deep. ``look`` walks through it and
gives something that can be compared later and keeps nothing alive. What it cannot look into makes it give None: such a
patch is called in each forward.
"""

import collections
import dis
import enum
import functools
import logging
import os
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..parts_seen import NO_SETTINGS
from .identity import EQUAL, Same, slots_of

MOST = 1500  # objects in the state of one patch: it is looked at before each replay
# Packages whose functions do the same for the same arguments; their own modules' values are compared by identity.
LIBRARIES = frozenset(("torch", "torchvision", "numpy", "scipy", "einops", "comfy", "comfy_kitchen", "triton", "PIL"))
CONTAINERS = (list, tuple, collections.deque)
DICTS = (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType)
FIXED = (type(Ellipsis), type(NotImplemented), range, slice, torch.finfo, torch.iinfo)
BY_IDENTITY = (logging.Logger, enum.Enum, types.BuiltinFunctionType, torch.dtype, torch.layout, torch.memory_format)
DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
OF_CLASSES = frozenset(("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl"))
OF_MODULES = frozenset(nn.Module().__dict__)
State = tuple
# Attributes in which code keeps the options of the latest forward, by their objects' ids: see ``foreign.Watched``.
HELD: dict[tuple[int, str], weakref.ReferenceType] = {}


class _Unknown(Exception):
    """Something that may change unseen."""


def look(value: Any, module: nn.Module | None = None, most: int = MOST) -> State | None:
    """What ``value`` and all that its code can reach are now; None if that cannot be known.

    module: the model, whose own parts are looked after elsewhere. most: objects that are worth it.
    """
    try:
        return _Look(module, most).of(value, root=True)
    except _Unknown:
        return None


def states_of(foreign: Sequence[tuple[str, Any]], module: nn.Module) -> tuple[State | None, ...]:
    """``look`` at other packs' code in a model. foreign: (where it is and whose, the code)."""
    return tuple([look(code, module) for _, code in foreign])


def is_held(owner: Any, name: str) -> bool:
    """Whether this attribute is known to hold the options of the latest forward."""
    found = HELD.get((id(owner), name))
    return found is not None and found() is owner


def first_kept(foreign: Sequence[tuple[str, Any]], before: tuple[State | None, ...], module: nn.Module) -> str:
    """The code that keeps something from one call to the next, or may; "" if there is none."""
    for (name, _), old, new in zip(foreign, before, states_of(foreign, module), strict=True):
        if old is None or old != new:
            return name
    return ""


class _Look:
    """One walk."""

    def __init__(self, module: nn.Module | None, most: int) -> None:
        self._module, self._left = module, most
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is given twice
        self._own: set[int] | None = None

    def of(self, value: Any, root: bool = False) -> State:
        """The state of ``value``. root: its code is a patch's, wherever it is from."""
        kind = type(value)
        if isinstance(value, EQUAL) and not isinstance(value, enum.Enum):
            return kind, value
        if id(value) in self._places:
            return "again", self._places[id(value)]
        self._left -= 1
        if self._left < 0:
            raise _Unknown
        self._places[id(value)] = len(self._places)
        self._kept.append(value)
        if isinstance(value, Tensor):
            return "tensor", Same(value), tuple(value.shape), value.dtype, value.device
        if isinstance(value, CONTAINERS):
            return kind, Same(value) if root else None, tuple([self.of(each) for each in value])
        if isinstance(value, DICTS):
            return kind, tuple([(self.of(key), self.of(each)) for key, each in value.items()])
        if isinstance(value, (set, frozenset)) and all(isinstance(each, EQUAL) for each in value):
            return kind, frozenset(value)
        if isinstance(value, FIXED):
            return kind, repr(value)
        if value is os.environ:
            return "environment", tuple(value.items())
        return self._object(value, kind, root)

    def _object(self, value: Any, kind: type, root: bool) -> State:
        if isinstance(value, types.FunctionType):
            return self._function(value, root)
        if isinstance(value, types.MethodType):
            return "method", self.of(value.__func__, root), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return "partial", self.of(value.func, root), self.of(value.args), self.of(value.keywords)
        if isinstance(value, (staticmethod, classmethod)):
            return kind, self.of(value.__func__)
        if isinstance(value, property):
            return kind, *[self.of(each) for each in (value.fget, value.fset, value.fdel)]
        if isinstance(value, weakref.ReferenceType):
            return "weak", self.of(value())
        if isinstance(value, types.ModuleType):
            return "module", Same(value)  # what code reads of it is looked at with the code
        if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, (types.ModuleType, type)):
            return "builtin", value.__name__, self.of(value.__self__)  # a list's append, say
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, BY_IDENTITY):
            return "same", Same(value)
        if isinstance(value, nn.Module):
            return self._part(value)
        if isinstance(value, types.SimpleNamespace):
            return kind, Same(value), tuple(self._attributes(value))
        if is_library(kind.__module__) and not kind.__module__.startswith("comfy"):
            if type(kind) is type and not callable(value):  # a generator, a lock, a file: what it holds is hidden
                raise _Unknown
            return "same", Same(value)  # torch's own operations
        return kind.__qualname__, Same(value), self._class(kind), tuple(self._attributes(value))

    def _attributes(self, value: Any) -> Iterator[tuple[str, State]]:
        slots = slots_of(type(value))
        own = getattr(value, "__dict__", None)
        if own is None and not slots:
            raise _Unknown
        for name in slots:
            if hasattr(value, name):
                yield name, self._of_attribute(value, name, getattr(value, name))
        for name, each in (own or {}).items():
            yield name, self._of_attribute(value, name, each)

    def _of_attribute(self, owner: Any, name: str, value: Any) -> State:
        return ("options",) if HELD and is_held(owner, name) else self.of(value)

    def _function(self, function: types.FunctionType, root: bool) -> State:
        closed = function.__closure__ or ()
        if not root and not closed and is_library(function.__module__ or ""):
            return "same", Same(function)
        cells = []
        for cell in closed:
            try:
                cells.append(self.of(cell.cell_contents))
            except ValueError:  # it is still empty
                cells.append(())
        named = self.of(function.__defaults__), self.of(function.__kwdefaults__), self.of(function.__dict__)
        return "function", Same(function.__code__), tuple(cells), named, tuple(self._globals(function))

    def _globals(self, function: types.FunctionType) -> Iterator[tuple[str, State]]:
        names, there = names_of(function.__code__), function.__globals__
        for name in _globals_of(function.__code__):
            if name in there:
                value = there[name]
                yield name, self.of(value)
                if isinstance(value, types.ModuleType):
                    yield from self._of_module(value, names)

    def _of_module(self, module: types.ModuleType, names: frozenset[str]) -> Iterator[tuple[str, State]]:
        """Those of a module's values that code with these names may read."""
        library, there = is_library(module.__name__), vars(module)
        for name in sorted(names & there.keys()):
            value = there[name] if there[name] is not os.getenv else os.environ
            if isinstance(value, types.ModuleType):
                if id(value) not in self._places:
                    yield name, self.of(value)
                    yield from self._of_module(value, names)
            elif library and not isinstance(value, EQUAL) and value is not os.environ:
                yield name, ("same", Same(value))
            else:
                yield name, self.of(value)

    def _class(self, kind: type) -> State:
        found = []
        for base in kind.__mro__:
            if base is object or is_library(base.__module__):
                found.append(Same(base))
                continue
            if id(base) in self._places and base is not kind:
                continue
            self._places.setdefault(id(base), len(self._places))
            self._kept.append(base)
            for name, value in list(vars(base).items()):
                if name not in OF_CLASSES and not isinstance(value, DESCRIPTORS):
                    found.append((name, self._of_attribute(base, name, value)))
        return "class", Same(kind), tuple(found)

    def _part(self, part: nn.Module) -> State:
        """A module: of the model, or of the patch's own."""
        if self._own is None:
            self._own = {id(each) for each in self._module.modules()} if self._module is not None else set()
        if id(part) in self._own:  # what is watched of every part is left out here
            own = [(n, value) for n, value in part.__dict__.items() if n not in NO_SETTINGS and not callable(value)]
            return "part", Same(part), tuple([(name, self.of(value)) for name, value in own])
        plain = [(name, self.of(value)) for name, value in part.__dict__.items() if name not in OF_MODULES]
        tensors = [(name, self.of(each)) for table in (part._parameters, part._buffers) for name, each in table.items()]
        below = [(name, self.of(child)) for name, child in part._modules.items()]
        hooks = [self.of(hook) for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
        return "module", Same(part), part.training, tuple(plain), tuple(tensors), tuple(below), tuple(hooks)


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
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals that code reads, functions inside of it too."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inside = (_globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
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
