"""Whether the code of a module changed since it was looked at: hooks, methods, classes, layers, plain attributes.

Packs change models at any time and in many ways: a hook, an instance's ``forward``, a class's ``forward`` for every
model at once, another layer in place of one, an attribute that a forward branches on. What was planned or recorded
before is then of another model. Two looks:

- ``Watch.changed`` at each call, 0.3 ms for the 2,000 modules of SDXL;
- ``ModuleFingerprint.full`` at the beginning of a sampling run, some milliseconds. It sees plain attributes too, and
  says what changed and whose it is.

Objects are compared by identity. A ``Watch`` holds the modules: keep it no longer than a sampling run. The fingerprint
itself holds nothing of the module but weak references, so an engine may keep it.
"""

import functools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .parts_seen import PartsSeen, kept
from .tape.named_tensors import modules_of, parts_of

FORWARDS = ("forward", "_forward")
FUNCTIONS = ("weight_function", "bias_function")  # lists of what ComfyUI does to a weight at each call
RECORDING = f"{__package__}.block_forwards"  # whose methods replace those of blocks while another thread records
WATCHED = (*FORWARDS, *FUNCTIONS, "comfy_cast_weights")  # attributes of an instance that quick looks see
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
OF_TORCH = (*FORWARDS, "__call__", "_call_impl")  # methods of torch's own classes that matter
PLAIN = frozenset({int, float, str, bool, type(None), torch.dtype})
TUPLES = frozenset({tuple, torch.Size})  # of plain values
KNOWN = frozenset(("torch", "comfy", "comfy_kitchen", "builtins", "einops"))  # packages whose code keeps nothing
# attributes that every module has, and torch looks after
STANDARD = frozenset(nn.Module().__dict__) - {"training"}
# What ComfyUI notes of weights that it maps in (DynamicVRAM), and does to them then and not at each call: a LoRA is
# another function at each load, and what it makes of the weight lies where the weight lay.
MAPPING = frozenset((
    "_v", "_v_weight", "_v_bias", "_v_signature", "_v_block", "_v_block_faulted", "_prefetch",
    "weight_lowvram_function", "bias_lowvram_function", "seed_key", "_pin_state", "_pins",
))  # fmt: skip
LEFT_OUT = STANDARD | MAPPING


class Watch:
    """A quick look at a module's parts. Holds the modules."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = parts_of(module)
        self._dicts = [part.__dict__ for part in self._modules]
        self._hooks = [part.__dict__[name] for part in self._modules for name in HOOKS]
        self._children = [part._modules for part in self._modules if part._modules]
        self._watched = {name: [d for d in self._dicts if name in d] for name in WATCHED}
        self._methods = [
            (vars(kind), name) for kind in _classes(self._modules) for name in {*_methods(kind), *FORWARDS}
        ]
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether a part was hooked, replaced or set to be cast, or a method of a class replaced for every model."""
        return not all(map(_same, self._seen, self._look()))

    def _look(self) -> list[list[Any]]:
        watched = {name: list(map(dict.get, dicts, repeat(name))) for name, dicts in self._watched.items()}
        functions = chain.from_iterable(watched[name] for name in FUNCTIONS)
        return [
            list(map(len, self._dicts)),  # an attribute was added, or one is gone: most changes are that
            list(map(type, self._modules)),
            *watched.values(),
            list(chain.from_iterable(filter(None, functions))),
            list(chain.from_iterable(map(dict.values, filter(None, self._hooks)))),
            list(chain.from_iterable(map(dict.values, self._children))),
            [methods.get(name) for methods, name in self._methods],
            _global_hooks(),
        ]


class ModuleFingerprint:
    """What a module was when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._watch: Watch | None = Watch(module)
        self._seen = {key: kept(value) for key, value in _objects(module)}
        self._plain = _plain(module)
        self._parts: PartsSeen | None = None  # of the last full look that saw no change

    def quick(self) -> bool:
        """Whether a cheap look sees a change; the first one after ``release`` is a full one."""
        module = self._module()
        if module is None:
            return True
        return self.look() if self._watch is None else self._watch.changed()

    def look(self) -> bool:
        """Whether a full look sees a change; if not, quick ones go on from here."""
        module = self._module()
        watch = None if module is None else Watch(module)
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
        self._parts = None if found else PartsSeen(parts, _is_plain_value, callable, LEFT_OUT, FUNCTIONS, HOOKS)
        return found

    def _classes_are_as_seen(self, parts: list[nn.Module]) -> bool:
        found = list(_shared(parts))
        as_many = len(found) == sum(isinstance(whose, str) for whose, _ in self._seen)
        return as_many and all(key in self._seen and self._seen[key]() is value for key, value in found)

    def _difference(self, module: nn.Module) -> str:
        left = dict(self._seen)
        for key, value in _objects(module):
            ref = left.pop(key, None)
            if ref is None or ref() is not value:
                return f"{_shown(module, key)} ({origin(value)})"
        plain = _plain(module)
        if plain != self._plain:
            return _first_difference(module, self._plain, plain)
        return f"{_shown(module, next(iter(left)))} is gone" if left else ""

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is this very module's."""
        return self._module() is module

    def fits(self, module: nn.Module) -> bool:
        """Whether another module is of the same code, built again: its parts are others, and all else is the same."""
        left = {key: ref for key, ref in self._seen.items() if key[1]}
        for key, value in _objects(module):
            if key[1] and (key not in left or left.pop(key)() is not value):
                return False
        return not left and _plain(module) == self._plain

    def changed(self) -> str:
        """``full`` where a cheap look sees a change, else ""."""
        if not self.quick():
            return ""
        found = self.full()
        if not found:  # ComfyUI put an empty list in place of another, say: from now on that is what is there
            self._watch = Watch(self._module())
        return found

    def release(self) -> None:
        """Lets go of the modules, at the end of a sampling run."""
        self._watch = None


def changed_part(module: nn.Module) -> str:
    """The first part with a hook or with a ``forward`` of its own, and in brackets whose that is; "" if none has."""
    if hooks := _global_hooks():
        return f"every module, {origin(hooks[0])}"
    for number, part in enumerate(parts_of(module)):
        own = [part.__dict__[name] for name in FORWARDS if name in part.__dict__ and _is_replaced(part, name)]
        for found in (*own, *(hook for name in HOOKS for hook in part.__dict__[name].values())):
            return f"{_shown(module, (number, ''))}, {origin(found)}"
    return ""


def _is_replaced(module: nn.Module, name: str) -> bool:
    """Whether the instance's method is another one than its class's, which ComfyUI leaves behind as an attribute."""
    method = module.__dict__[name]
    if origin(method) == RECORDING:
        return False
    return getattr(method, "__func__", None) is not getattr(type(module), name, None)


def foreign_method(kind: type) -> str:
    """A forward of this class, or of a base, that another pack put there, and whose it is; "" if all are its own.

    That is told by the file of its code, so it does not matter who came first.
    """
    return _foreign_method(kind, tuple(vars(base).get(name) for base in kind.__mro__ for name in FORWARDS))


@functools.lru_cache(maxsize=4096)
def _foreign_method(kind: type, methods: tuple[Any, ...]) -> str:
    owners = ((base, name) for base in kind.__mro__ for name in FORWARDS)
    for (base, name), method in zip(owners, methods, strict=True):
        if method is not None and not _is_own(base, method):
            return f"{base.__name__}.{name} of {origin(method)}"
    return ""


def _is_own(kind: type, method: Any) -> bool:
    """Whether a method's code is in the file of its class."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if not file.endswith(".py"):  # built in, made in a session, or without its source
        return True
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is not None and code.co_filename == file


def foreign_code(module: nn.Module) -> list[tuple[str, Any]]:
    """(where it is and whose, the code) of all that other packs hung on a module's parts or put into their classes."""
    found = [
        (f"{_shown(module, key)} of {origin(value)}", value)
        for key, value in _objects(module)
        if key[1] not in ("", "class") and not isinstance(key[0], str) and not _is_known(value)
    ]
    found += [(f"{_shown(module, key)} of {origin(value)}", value) for key, value in _of_every_module()]
    for kind in _classes(parts_of(module)):
        for name in FORWARDS:
            method = vars(kind).get(name)
            if method is not None and not _is_own(kind, method):
                found.append((f"{kind.__name__}.{name} of {origin(method)}", method))
    return found


def _is_known(value: Any) -> bool:
    """Whether code is torch's, ComfyUI's own, Python's or ours."""
    whose = origin(value)
    top = whose.partition(".")[0]
    ours = whose.startswith(f"{__package__}.")
    return isinstance(value, type) or ours or top in KNOWN or top in sys.stdlib_module_names


def _of_every_module() -> Iterator[tuple["Key", Any]]:
    return ((("every module", f"hook {index}"), hook) for index, hook in enumerate(_global_hooks()))


Key = tuple[str | int, str]  # (the number of a part in ``modules()`` or a class, its attribute)


def _objects(module: nn.Module) -> Iterator[tuple[Key, Any]]:
    """All that decides by identity what the module computes: layers, functions of instances and classes, hooks."""
    modules = parts_of(module)
    for number, part in enumerate(modules):
        yield (number, ""), part
        yield (number, "class"), type(part)
        for name, value in part.__dict__.items():
            if name in LEFT_OUT or type(value) in PLAIN:
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
    for kind in _classes(modules):
        shown = f"{kind.__module__}.{kind.__qualname__}"
        named[shown] += 1
        if named[shown] > 1:  # a function makes a class each time it is called
            shown += f" {named[shown]}"
        yield from (((shown, name), vars(kind)[name]) for name in _methods(kind))
    yield from _of_every_module()


def _plain(module: nn.Module) -> list[list[tuple[str, type, Any]]]:
    """The plain attributes of each part. The type as well: 1 is not True in a forward."""
    return [
        [
            (name, type(value), value)
            for name, value in part.__dict__.items()
            if name not in LEFT_OUT and _is_plain_value(value)
        ]
        for part in parts_of(module)
    ]


def _first_difference(module: nn.Module, before: list, now: list) -> str:
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        for name, _, value in [item for item in new if item not in old] + [item for item in old if item not in new]:
            return f"{_shown(module, (number, name))} ({value!r})"
    return "the order of attributes"


def _classes(modules: Iterable[nn.Module]) -> list[type]:
    """The classes of these modules and their bases, each once."""
    bases = chain.from_iterable(kind.__mro__ for kind in dict.fromkeys(map(type, modules)))
    return [kind for kind in dict.fromkeys(bases) if kind is not object]


def _methods(kind: type) -> set[str]:
    """The names of a class's methods; of torch's own only those that a call goes through."""
    if kind.__module__.startswith("torch."):
        return {name for name in OF_TORCH if name in vars(kind)}
    kinds = (staticmethod, property)
    return {name for name, value in vars(kind).items() if callable(value) or isinstance(value, kinds)}


def _global_hooks() -> list[Callable]:
    return list(chain.from_iterable(getattr(torch_module, name, {}).values() for name in GLOBAL_HOOKS))


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _is_plain_value(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) in TUPLES and _is_plain(value))


def _is_plain(value: Any) -> bool:
    return all(type(each) in PLAIN or (type(each) in TUPLES and _is_plain(each)) for each in value)


def origin(value: Any) -> str:
    """The module that a function, a hook or a layer is from."""
    function = getattr(value, "func", value)  # of a functools.partial
    return getattr(function, "__module__", None) or type(function).__module__


def _shown(module: nn.Module, key: Key) -> str:
    part, attribute = key
    if isinstance(part, int):
        paths = [path for path, _ in modules_of(module)]
        part = paths[part] if part < len(paths) else "a part"
    return ".".join(filter(None, (part, attribute))) or "the module"
