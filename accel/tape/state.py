"""Finds what a patch's Python code can see besides its arguments, so that a recording of it can be guarded.

A patch of another node is a function or an object of unknown code. Recorded once, its effect is fixed; so whatever that
code may read must be as it was: closures, defaults, attributes, globals, however deep. ``look`` walks through it and
gives something that can be compared later and keeps nothing alive. What it cannot look into makes it give None: such a
patch is called in each forward.
"""

import collections
import dataclasses
import enum
import functools
import logging
import os
import types
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..parts_seen import NO_SETTINGS
from .code_names import globals_of, imported_by, is_library, names_of
from .companions import companions
from .identity import EQUAL, Role, Same, TensorRole, slots_of
from .named_tensors import parts_of
from .unchanged import Unchanged, form_of

COMPILES = "triton."  # its kernels keep what they compiled, and which of their forms is the fastest
MOST = 1500  # objects in the state of one patch, and in that of a module that belongs to patches
MOST_IN_ALL = 100_000  # objects of looks at the same time
CONTAINERS = (list, tuple, collections.deque)
DICTS = (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType)
FIXED = (type(Ellipsis), type(NotImplemented), range, slice, torch.finfo, torch.iinfo, uuid.UUID)
BY_IDENTITY = (
    logging.Logger, enum.Enum, types.BuiltinFunctionType, torch.dtype, torch.layout, torch.memory_format,
    type(dataclasses.MISSING), type(getattr(dataclasses, "_HAS_DEFAULT_FACTORY", dataclasses.MISSING)),
)  # fmt: skip
DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
OF_CLASSES = frozenset((
    "__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl",
    "__dataclass_fields__", "__dataclass_params__",  # what a dataclass's methods were made of
))  # fmt: skip
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
    return look_at([value], module, most)[0]


def look_at(
    values: Iterable[Any], module: nn.Module | None = None, most: int = MOST, seen: Unchanged | None = None
) -> tuple[State | None, ...]:
    """``look`` at each of them, but at modules of patches that they share only once. seen: notes what there was."""
    glance = Glance(module, seen)
    return tuple([glance.look(value, most) for value in values])


def is_held(owner: Any, name: str) -> bool:
    """Whether this attribute is known to hold the options of the latest forward."""
    found = HELD.get((id(owner), name))
    return found is not None and found() is owner


class Part:
    """The state of a module that is not the model's. Many patches may hold it: two are compared once."""

    __slots__ = ("_same", "state")

    def __init__(self, state: State) -> None:
        self.state, self._same = state, self

    def __eq__(self, other: object) -> bool:
        if other is not self._same and other is not self:
            if not isinstance(other, Part) or other.state != self.state:
                return False
            self._same = other
        return True

    __hash__ = None


class Glance:
    """What several looks at the same time have in common."""

    def __init__(self, module: nn.Module | None, seen: Unchanged | None = None) -> None:
        self.seen = seen or Unchanged()
        self.left = MOST_IN_ALL
        self.parts: dict[int, tuple[nn.Module, Part]] = {}  # modules that are not the model's
        self.functions, self.hides = [], False  # packs' and ComfyUI's own; whether there was other code than those
        self._module = module

    @functools.cached_property
    def own(self) -> set[int]:
        """The parts of the model."""
        return {id(each) for each in parts_of(self._module)} if self._module is not None else set()

    def leads(self, value: Any) -> bool:
        """Whether ComfyUI loads a companion of the model by it: what it notes of that changes with each load."""
        return any(getattr(value, "model", None) is network for network in self._companions)

    @functools.cached_property
    def _companions(self) -> list[nn.Module]:
        return list(companions(self._module).values()) if self._module is not None else []

    def look(self, value: Any, most: int = MOST) -> State | None:
        """See ``look``."""
        try:
            walk = _Look(self, most)
            return walk.with_modules(walk.of(value, root=True))
        except _Unknown:
            return None


class _Look:
    """One walk."""

    def __init__(self, glance: Glance, most: int) -> None:
        self._glance, self._seen, self._left = glance, glance.seen, most
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is given twice
        self._names: set[str] = set()  # of all code that was met
        self._modules: dict[int, types.ModuleType] = {}  # that lie in objects

    def with_modules(self, state: State) -> State:
        """``state``, and what any code that was met may read of the modules that lie in objects."""
        while self._modules:
            modules, names = list(self._modules.values()), frozenset(self._names)
            state = (state, *[tuple(self._of_module(module, names)) for module in modules])
            if len(self._modules) == len(modules) and self._names == names:
                break
        return state

    def of(self, value: Any, root: bool = False) -> State:
        """The state of ``value``. root: its code is a patch's, wherever it is from."""
        kind = type(value)
        if isinstance(value, EQUAL) and not isinstance(value, enum.Enum):
            return kind, value
        if id(value) in self._places:
            return "again", self._places[id(value)]
        self._left -= 1
        self._glance.left -= 1
        if self._left < 0 or self._glance.left < 0:
            raise _Unknown
        self._places[id(value)] = len(self._places)
        self._kept.append(value)
        if isinstance(value, Tensor):
            self._seen.tensor(value)
            return "tensor", TensorRole(value, form_of(value))
        if isinstance(value, CONTAINERS):
            if kind is not tuple:
                self._seen.sequence(value)
            return kind, Same(value) if root else None, tuple([self.of(each) for each in value])
        if isinstance(value, DICTS):
            self._seen.mapping(value)
            return kind, tuple([(self.of(key), self.of(each)) for key, each in value.items()])
        if isinstance(value, (set, frozenset)) and all(isinstance(each, EQUAL) for each in value):
            self._seen.other(lambda: frozenset(value))
            return kind, frozenset(value)
        if isinstance(value, FIXED):
            return kind, repr(value)
        if value is os.environ:
            self._seen.other(lambda: tuple(os.environ.items()))
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
        if isinstance(value, functools._lru_cache_wrapper):  # what it remembers was made of what its function can see
            return "cache", self.of(value.__wrapped__, root)
        if isinstance(value, property):
            return kind, *[self.of(each) for each in (value.fget, value.fset, value.fdel)]
        if isinstance(value, weakref.ReferenceType):
            self._seen.named(lambda name: value(), ("",))
            return "weak", self.of(value())
        if isinstance(value, types.ModuleType):
            self._modules[id(value)] = value
            return "module", Same(value)
        if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, (types.ModuleType, type)):
            return "builtin", value.__name__, self.of(value.__self__)  # a list's append, say
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, BY_IDENTITY):
            return "same", Same(value)
        if isinstance(value, nn.Module):
            return self._part(value)
        if isinstance(value, types.SimpleNamespace):
            return kind, Role(value), tuple(self._attributes(value))
        if is_library(kind.__module__) and not kind.__module__.startswith("comfy"):
            is_kernel = kind.__module__.startswith(COMPILES)
            if type(kind) is type and not (
                callable(value) or is_kernel
            ):  # a generator, a lock: what it holds is hidden
                raise _Unknown
            self._glance.hides |= callable(value)
            return "same", Same(value)  # torch's own operations
        if self._glance.leads(value):
            self._seen.named(lambda name: getattr(value, name, None), ("model",))
            return kind.__qualname__, Role(value), Same(kind), self.of(value.model)
        return kind.__qualname__, Role(value), self._class(kind), tuple(self._attributes(value))

    def _attributes(self, value: Any) -> Iterator[tuple[str, State]]:
        slots, own = slots_of(type(value)), getattr(value, "__dict__", None)
        if own is None and not slots:
            raise _Unknown
        if slots:
            self._seen.named(lambda name: getattr(value, name, None), slots)
        for name in slots:
            if hasattr(value, name):
                yield name, self._of_attribute(value, name, getattr(value, name))
        if HELD and any(is_held(value, name) for name in own or ()):
            self._seen.named(own.get, [name for name in own if not is_held(value, name)])
        elif own:
            self._seen.mapping(own)
        left = _network_of(value)
        for name, each in (own or {}).items():
            yield name, Role(each) if name in left else self._of_attribute(value, name, each)

    def _of_attribute(self, owner: Any, name: str, value: Any) -> State:
        return ("options",) if HELD and is_held(owner, name) else self.of(value)

    def _function(self, function: types.FunctionType, root: bool) -> State:
        closed, of = function.__closure__ or (), function.__module__ or ""
        self._seen.function(function)
        if not is_library(of) or of.startswith("comfy"):
            self._glance.functions.append(function)
        if not root and not closed and is_library(of):
            return "same", Same(function)
        names, cells = names_of(function.__code__), []
        self._names |= names
        for cell in closed:
            try:
                value = cell.cell_contents
            except ValueError:  # it is still empty
                cells.append(())
            else:
                cells.append(self._module(value, names) if isinstance(value, types.ModuleType) else self.of(value))
        cells += [self._module(module, names) for module in imported_by(function)]
        named = self.of(function.__defaults__), self.of(function.__kwdefaults__), self.of(function.__dict__)
        return "function", Same(function.__code__), tuple(cells), named, tuple(self._globals(function))

    def _globals(self, function: types.FunctionType) -> Iterator[tuple[str, State]]:
        names, there = names_of(function.__code__), function.__globals__
        self._seen.named(there.get, globals_of(function.__code__))
        for name in globals_of(function.__code__):
            if name in there:
                value = there[name]
                yield name, self._module(value, names) if isinstance(value, types.ModuleType) else self.of(value)

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> State:
        """A module that code with these names has by a name: what that code may read of it."""
        self._places.setdefault(id(module), len(self._places))
        self._kept.append(module)
        return "module", Same(module), tuple(self._of_module(module, names))

    def _of_module(self, module: types.ModuleType, names: frozenset[str]) -> Iterator[tuple[str, State]]:
        """Those of a module's values that code with these names may read."""
        library, there = is_library(module.__name__), vars(module)
        self._seen.named(there.get, names)
        for name in sorted(names & there.keys()):
            value = there[name] if there[name] is not os.getenv else os.environ
            if isinstance(value, types.ModuleType):
                if id(value) not in self._places:
                    yield name, self._module(value, names)
            elif library and not isinstance(value, EQUAL) and value is not os.environ:
                yield name, ("same", Same(value))
            else:
                yield name, self.of(value)

    def _class(self, kind: type) -> State:
        found = []
        for base in kind.__mro__:
            if base is object or is_library(base.__module__):
                found.append(Same(base))
                self._glance.hides |= base.__module__.startswith("comfy")
                continue
            if id(base) in self._places and base is not kind:
                continue
            self._places.setdefault(id(base), len(self._places))
            self._kept.append(base)
            self._seen.mapping(vars(base))
            for name, value in list(vars(base).items()):
                if name not in OF_CLASSES and not isinstance(value, DESCRIPTORS):
                    found.append((name, self._of_attribute(base, name, value)))
        return "class", Same(kind), tuple(found)

    def _part(self, part: nn.Module) -> State:
        """A module: of the model, or of the patch's own."""
        if id(part) in self._glance.own:  # what is watched of every part is left out here
            self._seen.mapping(part.__dict__)
            own = [(n, value) for n, value in part.__dict__.items() if n not in NO_SETTINGS and not callable(value)]
            return "part", Same(part), tuple([(name, self.of(value)) for name, value in own])
        parts, self._glance.hides = self._glance.parts, True
        if id(part) not in parts:  # a walk for itself, so that every look that comes here may have it
            parts[id(part)] = part, Part(())  # for what leads back to it
            try:
                walk = _Look(self._glance, MOST)
                parts[id(part)] = part, Part(walk.with_modules(walk.foreign_part(part)))
            except _Unknown:
                del parts[id(part)]
                raise
        return "module", parts[id(part)][1]

    def foreign_part(self, part: nn.Module) -> State:
        """A module that is not the model's."""
        tables = [part.__dict__, part._parameters, part._buffers, part._modules]
        hooks = [part._forward_hooks, part._forward_pre_hooks]
        for table in (*tables, *hooks):
            self._seen.mapping(table)
        plain = [(name, self.of(value)) for name, value in part.__dict__.items() if name not in OF_MODULES]
        tensors = [(name, self.of(each)) for table in tables[1:3] for name, each in table.items()]
        below = [(name, self.of(child)) for name, child in part._modules.items()]
        hooked = [self.of(hook) for table in hooks for hook in table.values()]
        return Role(part), Same(type(part)), part.training, *map(tuple, (plain, tensors, below, hooked))


def _network_of(value: Any) -> Collection[str]:
    """The attributes in which an object of ComfyUI's, a VAE, has its network and what loads that.

    They are not looked into. ComfyUI moves its weights, and code that reads one is refused: its origin is not known.
    """
    own = getattr(value, "__dict__", {})
    network = getattr(own.get("patcher"), "model", None)
    if network is None or not type(value).__module__.startswith("comfy."):
        return ()
    return [name for name, each in own.items() if name == "patcher" or each is network]
