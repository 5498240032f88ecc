"""Tells whether a module's code has changed since the last look: hooks, methods, classes, layers, plain attributes.

Packs change models at any time and in many ways: a hook, an instance's ``forward``, a class's ``forward`` for every
model at once, another layer in place of one, an attribute that a forward branches on. What was planned or recorded
before is then of another model. Two looks:

- ``Watch.changed`` at each call, 0.3 ms for the 2,000 modules of SDXL. It sees settings of the model itself and of
  other packs' parts, and of all parts what lies in lists, dicts and objects;
- ``ModuleFingerprint.full`` at the beginning of a sampling run, some milliseconds. It sees all plain attributes, and
  says what changed and whose it is.

Objects are compared by identity. A ``Watch`` holds the modules: keep it no longer than a sampling run. The fingerprint
itself holds nothing of the module but weak references, so an engine may keep it.
"""

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .origin import is_known, readable, whose
from .parts_seen import (
    FORWARDS,
    FUNCTIONS,
    HOOKS,
    LEFT_OUT,
    PartsSeen,
    count,
    is_hooked,
    is_plain,
    left_out,
    notes_of,
    settings_of,
)
from .tape.identity import kept
from .tape.named_tensors import classes_of, modules_of, parts_of
from .tape.pictures import picture
from .tape.unchanged import Unchanged
from .tape.untouched import UNTOUCHED

WATCHED = (*FORWARDS, *FUNCTIONS, "comfy_cast_weights")  # attributes of an instance that quick looks see
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
OF_TORCH = (*FORWARDS, "__call__", "_call_impl")  # methods of torch's own classes that matter


class ToWatch:
    """What there is to watch in a module, by the numbers of its parts and classes. Holds none of them.

    held: (number of a part, name) of its lists, dicts and objects of settings.
    """

    def __init__(self, parts: Sequence[nn.Module], held: Iterable[tuple[int, str]] = ()) -> None:
        classes = classes_of(parts)
        self.parts, self.classes = len(parts), len(classes)
        self.watched = [(n, name) for name in WATCHED for n, part in enumerate(parts) if name in part.__dict__]
        self.methods = [(n, name) for n, kind in enumerate(classes) for name in {*_methods(kind), *FORWARDS}]
        self.held = [(number, name) for number, name in held if number < len(parts)]
        self.noted = [n for n, part in enumerate(parts) if part._parameters and notes_of(part, wrapped=False)]
        # Other packs change settings in mid-run too, of the model as a whole and of what they brought.
        theirs = {kind for kind in set(map(type, parts)) if not is_known(kind)}
        watched = [n for n, part in enumerate(parts) if not n or type(part) in theirs or is_hooked(part)]
        self.settings = [(n, name) for n in watched for name in _names_of_settings(parts[n])]

    def may_fit(self, parts: Sequence[nn.Module]) -> bool:
        """Whether a ``Watch`` of these parts can be made by it. It is right only if they look as they did."""
        return self.parts == len(parts) and self.classes == len(classes_of(parts))


class Watch:
    """A quick look at a module's parts. Holds them. wanted: what there is to watch, if that is known."""

    def __init__(self, parts: Sequence[nn.Module], wanted: ToWatch | None = None) -> None:
        wanted, classes = wanted or ToWatch(parts), list(map(vars, classes_of(parts)))
        self.parts, self._classes, self._untouched = parts, classes, UNTOUCHED.changes
        self._dicts = dicts = [part.__dict__ for part in parts]
        self._hooks = list(chain.from_iterable(map(operator.itemgetter(*HOOKS), dicts)))
        self._children = [part._modules for part in parts if part._modules]
        self._owners, self._names = [dicts[n] for n, _ in wanted.watched], [name for _, name in wanted.watched]
        self._methods = [(classes[n], name) for n, name in wanted.methods]
        self._held = [(dicts[n], name) for n, name in wanted.held]
        self._noted = [parts[n] for n in wanted.noted]
        self._settings = [(dicts[n], name) for n, name in wanted.settings]
        self._counts, self._kinds = self._counted(), list(map(type, parts))
        self._own_counts = self._counted(count)
        self._seen, self._below, self._code = list(self._now()), [*self._layers(), _END], self._functions()
        self._lists = [seen for seen, name in zip(self._seen, self._names, strict=True) if name in FUNCTIONS]
        self._called, self._pictures, self._values = self._hung(), self._picture(), self._set()
        self._holders = Unchanged()
        self._notes = [notes_of(part, wrapped=False, seen=self._holders) for part in self._noted]

    def changed(self) -> bool:
        """Whether a part was hooked, replaced or set to be cast, or a method of a class replaced for every model.

        Settings too: those of the model itself and of other packs' parts, and of all parts what lies in lists.
        """
        # Nothing is copied where nothing has changed: each step of a sampling run waits for this.
        return not (
            self._untouched == UNTOUCHED.changes
            and (self._counts == self._counted() or self._own_counts == self._counted(count))
            and all(map(operator.is_, self._kinds, map(type, self.parts)))
            and all(map(operator.is_, self._seen, self._now()))
            and all(map(operator.is_, self._below, chain(self._layers(), (_END,))))
            and _same(self._called, self._hung())
            and _same(self._code, self._functions())
            and self._pictures == self._picture()
            and (self._holders.holds() or self._notes == [notes_of(part, wrapped=False) for part in self._noted])
            and all(map(_is_equal, self._values, self._set()))
        )

    def methods_hold(self) -> bool:
        """Whether the methods of all classes are what they were."""
        return _same(self._code, self._functions())

    def _counted(self, of: Callable[[dict[str, Any]], int] = len) -> list[int]:
        """An attribute was added, or one is gone: most changes are that. of: how many a part has."""
        return [*map(of, self._dicts), *map(len, self._classes)]

    def _now(self) -> Iterator[Any]:
        return map(dict.get, self._owners, self._names)

    def _layers(self) -> Iterator[nn.Module | None]:
        return chain.from_iterable(map(dict.values, self._children))

    def _hung(self) -> list[Callable]:
        """Hooks, and what ComfyUI does to weights at each call."""
        tables, lists = filter(None, self._hooks), filter(None, self._lists)
        return [*chain.from_iterable(map(dict.values, tables)), *chain.from_iterable(lists), *global_hooks()]

    def _functions(self) -> list[Any]:
        return [methods.get(name) for methods, name in self._methods]

    def _picture(self) -> list[Any]:
        return [picture(own.get(name)) for own, name in self._held]

    def _set(self) -> list[Any]:
        return [own.get(name) for own, name in self._settings]


_END = object()  # behind a row that is compared, so that a longer one is another one


class ModuleFingerprint:
    """What a module was when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        parts = parts_of(module)
        self._seen = {key: kept(value) for key, value in objects_of(module)}
        self._plain = [settings_of(part) for part in parts]
        self._parts: PartsSeen | None = None  # of the last full look that saw no change
        self._wanted: ToWatch | None = None  # of parts that look like these
        self._watch: Watch | None = Watch(parts, self._to_watch(parts))

    def _to_watch(self, parts: Sequence[nn.Module]) -> ToWatch:
        settings = enumerate(self._plain)
        return ToWatch(parts, [(n, name) for n, found in settings for name, _, value in found if not is_plain(value)])

    @property
    def parts(self) -> Sequence[nn.Module]:
        """Those of the module at the last look, until ``release``."""
        return self._watch.parts if self._watch is not None else ()

    @property
    def tensors(self) -> Sequence[tuple[int, str]] | None:
        """See ``tensor_attributes``: of ``parts``, if that is known."""
        return self._parts.tensors if self._parts is not None and self._watch is not None else None

    def methods_hold(self) -> bool:
        """Whether the methods of classes are those of the last look, until ``release``."""
        return self._watch is None or self._watch.methods_hold()

    def quick(self) -> bool:
        """Whether a cheap look sees a change; the first one after ``release`` is a full one."""
        module = self._module()
        if module is None:
            return True
        return self.look() if self._watch is None else self._watch.changed()

    def look(self) -> bool:
        """Whether a full look sees a change; if not, quick ones go on from here."""
        module = self._module()
        if module is None:
            return True
        parts, known = parts_of(module), self._wanted
        wanted = known if known is not None and known.may_fit(parts) else self._to_watch(parts)
        watch = Watch(parts, wanted)
        if not self._is_as_seen(parts):
            if wanted is known:
                wanted = self._to_watch(parts)
                watch = Watch(parts, wanted)
            if self._difference(module):
                self._parts = self._wanted = None
                return True
            self._parts = PartsSeen(parts)
        self._wanted, self._watch = wanted, watch
        return False

    def full(self) -> str:
        """What changed: the part or the class, its attribute, and in brackets whose the new value is; "" if nothing."""
        module = self._module()
        if module is None:
            return "the module is gone"
        parts = parts_of(module)
        if self._is_as_seen(parts):
            return ""
        found = self._difference(module)
        self._parts, self._wanted = None if found else PartsSeen(parts), None
        return found

    def _is_as_seen(self, parts: list[nn.Module]) -> bool:
        return self._parts is not None and self._parts.fits(parts) and self._classes_are_as_seen(parts)

    def _classes_are_as_seen(self, parts: list[nn.Module]) -> bool:
        found = list(_shared(parts))
        as_many = len(found) == sum(isinstance(whose, str) for whose, _ in self._seen)
        return as_many and all(key in self._seen and self._seen[key]() is value for key, value in found)

    def _difference(self, module: nn.Module) -> str:
        left = dict(self._seen)
        for key, value in objects_of(module):
            ref = left.pop(key, None)
            if ref is None or ref() is not value:
                return f"{shown(module, key)} ({whose(value)})"
        plain = [settings_of(part) for part in parts_of(module)]
        if len(plain) == len(self._plain) and plain != self._plain:  # else parts are gone
            return _first_difference(module, self._plain, plain)
        return f"{shown(module, next(iter(left)))} is gone" if left else ""

    def settings_changed(self) -> list[tuple[nn.Module, str]]:
        """(part, name) of the settings that are others than when this was made."""
        parts = parts_of(self._module())
        seen = zip(parts, self._plain, map(settings_of, parts), strict=False)
        return [(part, name) for part, old, new in seen if old != new for name, _, _ in _unlike(old, new)]

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
            parts = parts_of(self._module())
            self._wanted = self._wanted or self._to_watch(parts)
            self._watch = Watch(parts, self._wanted)
        return found

    def release(self) -> None:
        """Releases the modules, at the end of a sampling run."""
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
        shown = f"{readable(kind.__module__)}.{kind.__qualname__}"
        named[shown] += 1
        if named[shown] > 1:  # a function makes a class each time it is called
            shown += f" {named[shown]}"
        yield from (((shown, name), vars(kind)[name]) for name in _methods(kind))
    yield from ((("every module", f"hook {index}"), hook) for index, hook in enumerate(global_hooks()))


def _first_difference(module: nn.Module, before: list, now: list) -> str:
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        for name, _, value in _unlike(old, new):
            return f"{shown(module, (number, name))} ({repr(value) if is_plain(value) else 'what lies in it'})"
    return "the order of attributes"


def _unlike(old: list, new: list) -> list:
    """The settings of one part that are not in both."""
    return [item for item in new if item not in old] + [item for item in old if item not in new]


def _methods(kind: type) -> set[str]:
    """The names of a class's settings and methods; of torch's methods only those that a call goes through."""
    of_torch, kinds = kind.__module__.startswith("torch."), (staticmethod, property)
    return {
        name
        for name, value in vars(kind).items()
        if is_plain(value) or (name in OF_TORCH if of_torch else callable(value) or isinstance(value, kinds))
    }


def _names_of_settings(part: nn.Module) -> list[str]:
    own, left = part.__dict__.items(), left_out(part)
    return [name for name, value in own if not (name in left or name in FUNCTIONS or isinstance(value, torch.Tensor))]


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
