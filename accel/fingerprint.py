"""Whether the code of a module changed since it was looked at: hooks, methods, classes, layers, plain attributes.

Packs change models at any time and in many ways: a hook, an instance's ``forward``, a class's ``forward`` for every
model at once, another layer in place of one, an attribute that a forward branches on. What was planned or recorded
before is then of another model. Two looks:

- ``Watch.changed`` at each call, 0.5 ms for the 2,000 modules of SDXL. It sees settings of the model itself and of
  other packs' parts, and of all parts what lies in lists, dicts and objects;
- ``ModuleFingerprint.full`` at the beginning of a sampling run, some milliseconds. It sees all plain attributes, and
  says what changed and whose it is.

Objects are compared by identity. A ``Watch`` holds the modules: keep it no longer than a sampling run. The fingerprint
itself holds nothing of the module but weak references, so an engine may keep it.
"""

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .origin import is_known, origin
from .parts_seen import (
    FORWARDS,
    FUNCTIONS,
    HOOKS,
    LEFT_OUT,
    NO_SETTINGS,
    PartsSeen,
    is_hooked,
    is_plain,
    kept,
    notes_of,
    settings_of,
)
from .tape.named_tensors import modules_of, parts_of
from .tape.pictures import picture

RECORDING = f"{__package__}.block_forwards"  # whose methods replace those of blocks while another thread records
WATCHED = (*FORWARDS, *FUNCTIONS, "comfy_cast_weights")  # attributes of an instance that quick looks see
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
OF_TORCH = (*FORWARDS, "__call__", "_call_impl")  # methods of torch's own classes that matter


class Watch:
    """A quick look at a module's parts. Holds the modules.

    held: (number of a part, name) of its lists, dicts and objects of settings.
    """

    def __init__(self, module: nn.Module, held: Iterable[tuple[int, str]] = ()) -> None:
        self._modules = parts_of(module)
        self._dicts = [part.__dict__ for part in self._modules]
        self._hooks = [part.__dict__[name] for part in self._modules for name in HOOKS]
        self._children = [part._modules for part in self._modules if part._modules]
        self._watched = {name: [d for d in self._dicts if name in d] for name in WATCHED}
        self._methods = [
            (vars(kind), name) for kind in classes_of(self._modules) for name in {*_methods(kind), *FORWARDS}
        ]
        self._classes = [vars(kind) for kind in classes_of(self._modules)]
        self._held = [(self._dicts[number], name) for number, name in held if number < len(self._dicts)]
        self._noted = [part for part in self._modules if part._parameters and notes_of(part)]
        # Other packs change settings in mid-run too, of the model as a whole and of what they brought.
        theirs = {kind for kind in set(map(type, self._modules)) if not is_known(kind)}
        watched = [part for part in self._modules if part is module or type(part) in theirs or is_hooked(part)]
        self._settings = [(part.__dict__, _names_of_settings(part)) for part in watched]
        self._seen, self._pictures, self._values = self._look(), self._picture(), self._now()

    def changed(self) -> bool:
        """Whether a part was hooked, replaced or set to be cast, or a method of a class replaced for every model.

        Settings too: those of the model itself and of other packs' parts, and of all parts what lies in lists.
        """
        same = all(map(_same, self._seen, self._look())) and self._pictures == self._picture()
        return not (same and all(map(_is_equal, self._values, self._now())))

    def _now(self) -> list[Any]:
        return [own.get(name) for own, names in self._settings for name in names]

    def _picture(self) -> list[Any]:
        return [picture(own.get(name)) for own, name in self._held] + [notes_of(part) for part in self._noted]

    def _look(self) -> list[list[Any]]:
        watched = {name: list(map(dict.get, dicts, repeat(name))) for name, dicts in self._watched.items()}
        functions = chain.from_iterable(watched[name] for name in FUNCTIONS)
        return [
            list(map(len, self._dicts)),  # an attribute was added, or one is gone: most changes are that
            list(map(type, self._modules)),
            list(map(len, self._classes)),
            *watched.values(),
            list(chain.from_iterable(filter(None, functions))),
            list(chain.from_iterable(map(dict.values, filter(None, self._hooks)))),
            list(chain.from_iterable(map(dict.values, self._children))),
            [methods.get(name) for methods, name in self._methods],
            global_hooks(),
        ]


class ModuleFingerprint:
    """What a module was when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._seen = {key: kept(value) for key, value in objects_of(module)}
        self._plain = [settings_of(part) for part in parts_of(module)]
        self._watch: Watch | None = self._watched(module)
        self._parts: PartsSeen | None = None  # of the last full look that saw no change

    def _watched(self, module: nn.Module) -> Watch:
        settings = enumerate(self._plain)
        held = [(number, name) for number, found in settings for name, _, value in found if not is_plain(value)]
        return Watch(module, held)

    def quick(self) -> bool:
        """Whether a cheap look sees a change; the first one after ``release`` is a full one."""
        module = self._module()
        if module is None:
            return True
        return self.look() if self._watch is None else self._watch.changed()

    def look(self) -> bool:
        """Whether a full look sees a change; if not, quick ones go on from here."""
        module = self._module()
        watch = None if module is None else self._watched(module)
        if self.full():
            return True
        self._watch = watch
        return False

    def full(self) -> str:
        """What changed: the part or the class, its attribute, and in brackets whose the new value is; "" if nothing."""
        module = self._module()
        if module is None:
            return "the module is gone"
        parts = parts_of(module)
        if self._parts is not None and self._parts.fits(parts) and self._classes_are_as_seen(parts):
            return ""
        found = self._difference(module)
        self._parts = None if found else PartsSeen(parts)
        return found

    def _classes_are_as_seen(self, parts: list[nn.Module]) -> bool:
        found = list(_shared(parts))
        as_many = len(found) == sum(isinstance(whose, str) for whose, _ in self._seen)
        return as_many and all(key in self._seen and self._seen[key]() is value for key, value in found)

    def _difference(self, module: nn.Module) -> str:
        left = dict(self._seen)
        for key, value in objects_of(module):
            ref = left.pop(key, None)
            if ref is None or ref() is not value:
                return f"{shown(module, key)} ({origin(value)})"
        plain = [settings_of(part) for part in parts_of(module)]
        if plain != self._plain:
            return _first_difference(module, self._plain, plain)
        return f"{shown(module, next(iter(left)))} is gone" if left else ""

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is this very module's."""
        return self._module() is module

    def fits(self, module: nn.Module) -> bool:
        """Whether another module is of the same code, built again: its parts are others, and all else is the same."""
        left = {key: ref for key, ref in self._seen.items() if key[1]}
        for key, value in objects_of(module):
            if key[1] and (key not in left or left.pop(key)() is not value):
                return False
        return not left and [settings_of(part) for part in parts_of(module)] == self._plain

    def changed(self) -> str:
        """``full`` where a cheap look sees a change, else ""."""
        if not self.quick():
            return ""
        found = self.full()
        if not found:  # ComfyUI put an empty list in place of another, say: from now on that is what is there
            self._watch = self._watched(self._module())
        return found

    def release(self) -> None:
        """Lets go of the modules, at the end of a sampling run."""
        self._watch = None


Key = tuple[str | int, str]  # (the number of a part in ``modules()`` or a class, its attribute)


def objects_of(module: nn.Module) -> Iterator[tuple[Key, Any]]:
    """All that decides by identity what the module computes: layers, functions of instances and classes, hooks."""
    modules = parts_of(module)
    for number, part in enumerate(modules):
        yield (number, ""), part
        yield (number, "class"), type(part)
        for name, value in part.__dict__.items():
            if name in LEFT_OUT or is_plain(value):
                continue
            if name in FUNCTIONS and value:
                yield from (((number, f"{name}[{index}]"), each) for index, each in enumerate(value))
            elif callable(value):
                yield (number, name), value
        for name in HOOKS:
            if hooks := part.__dict__[name]:
                yield from (((number, f"{name}[{index}]"), hook) for index, hook in enumerate(hooks.values()))
    yield from _shared(modules)


def _shared(modules: list[nn.Module]) -> Iterator[tuple[Key, Any]]:
    """Of those the ones that no part has for itself: methods of classes, and hooks of every module."""
    named: Counter[str] = Counter()
    for kind in classes_of(modules):
        shown = f"{kind.__module__}.{kind.__qualname__}"
        named[shown] += 1
        if named[shown] > 1:  # a function makes a class each time it is called
            shown += f" {named[shown]}"
        yield from (((shown, name), vars(kind)[name]) for name in _methods(kind))
    yield from ((("every module", f"hook {index}"), hook) for index, hook in enumerate(global_hooks()))


def _first_difference(module: nn.Module, before: list, now: list) -> str:
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        for name, _, value in [item for item in new if item not in old] + [item for item in old if item not in new]:
            return f"{shown(module, (number, name))} ({repr(value) if is_plain(value) else 'what lies in it'})"
    return "the order of attributes"


def classes_of(modules: Iterable[nn.Module]) -> list[type]:
    """The classes of these modules and their bases, each once."""
    bases = chain.from_iterable(kind.__mro__ for kind in dict.fromkeys(map(type, modules)))
    return [kind for kind in dict.fromkeys(bases) if kind is not object]


def _methods(kind: type) -> set[str]:
    """The names of a class's methods and settings; of torch's own only the methods that a call goes through."""
    if kind.__module__.startswith("torch."):
        return {name for name in OF_TORCH if name in vars(kind)}
    kinds = (staticmethod, property)
    return {
        name for name, value in vars(kind).items() if callable(value) or isinstance(value, kinds) or is_plain(value)
    }


def _names_of_settings(part: nn.Module) -> list[str]:
    own = part.__dict__.items()
    return [name for name, value in own if name not in NO_SETTINGS and not isinstance(value, torch.Tensor)]


def global_hooks() -> list[Callable]:
    """Hooks that torch calls for every module."""
    return list(chain.from_iterable(getattr(torch_module, name, {}).values() for name in GLOBAL_HOOKS))


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _is_equal(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and is_plain(now) and before == now)


def shown(module: nn.Module, key: Key) -> str:
    """Where that is, for people."""
    part, attribute = key
    if isinstance(part, int):
        paths = [path for path, _ in modules_of(module)]
        part = paths[part] if part < len(paths) else "a part"
    return ".".join(filter(None, (part, attribute))) or "the module"
