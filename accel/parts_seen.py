"""Remembers what the parts of a model look like, and tells whether they have changed.

Most looks see no change, and each prompt waits for one. So a part's attributes are compared as a whole, in half the
time that it takes to find out what changed: their names, the types of their values, the plain values, what lies in
lists and the like, and by identity what may be called. Holds no part and no function.
"""

import operator
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from .origin import is_known
from .tape.identity import kept
from .tape.named_tensors import PLAIN as TENSORS
from .tape.named_tensors import is_dressed, notes_of_tensor, tensor_attributes
from .tape.pictures import is_held, picture, picture_of_notes
from .tape.unchanged import Unchanged
from .tape.untouched import UNTOUCHED

PLAIN = frozenset({int, float, str, bool, type(None), torch.dtype})
TUPLES = frozenset({tuple, torch.Size})  # of plain values
FUNCTIONS = ("weight_function", "bias_function")  # lists of what ComfyUI does to a weight at each call
FORWARDS = ("forward", "_forward")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# attributes that every module has, and torch looks after
STANDARD = frozenset(nn.Module().__dict__) - {"training"}
# What ComfyUI notes of weights that it maps in (DynamicVRAM), and does to them then and not at each call: a LoRA is
# another function at each load, and what it makes of the weight lies where the weight lay. And its graph of a block,
# which comes and goes while its own forward runs.
MAPPING = frozenset((
    "_v", "_v_weight", "_v_bias", "_v_signature", "_v_block", "_v_block_faulted", "_prefetch", "_comfy_graph",
    "weight_lowvram_function", "bias_lowvram_function", "seed_key", "_pin_state", "_pins",
    "dynamic_vbars", "dynamic_pins", "dynamic_patchers", "model_loaded_weight_memory", "model_offload_buffer_memory",
))  # fmt: skip
LEFT_OUT = STANDARD | MAPPING
NO_SETTINGS = LEFT_OUT.union(FUNCTIONS)


def left_out(part: nn.Module) -> Collection[str]:
    """The names of a part's attributes that are not compared."""
    untouched = UNTOUCHED.of(type(part))
    return LEFT_OUT | untouched if untouched else LEFT_OUT


def is_restored(part: nn.Module, name: str) -> bool:
    """Whether an attribute of a part is just its class's method: ComfyUI leaves it there when it takes a patch off."""
    method = part.__dict__.get(name)
    return (
        isinstance(method, types.MethodType)
        and method.__self__ is part
        and method.__func__ is getattr(type(part), name, None)
    )


def original(part: nn.Module) -> nn.Module:
    """What ``torch.compile`` made a part of; the part itself otherwise."""
    kind = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)  # not while that is being imported
    return part._orig_mod if kind is not None and isinstance(part, kind) else part


class PartsSeen:
    """What the parts of a model looked like. tensors: see ``tensor_attributes``.

    What all parts have is compared in rows, one for each kind of look: each prompt waits for it.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        parts = list(parts)
        alike: dict[tuple, Any] = {}
        dicts = [part.__dict__ for part in parts]
        self._parts, self._kinds = list(map(weakref.ref, parts)), list(map(type, parts))
        self._untouched, left = UNTOUCHED.changes, list(map(left_out, parts))
        self._counts = list(map(count, dicts))
        self._every = [
            _getter([name for name in own if name not in out], alike) for own, out in zip(dicts, left, strict=True)
        ]
        self._types = [
            _once(tuple(map(type, every(own))), alike) for every, own in zip(self._every, dicts, strict=True)
        ]
        self._plain = [_getter(_plain_names(own, out), alike) for own, out in zip(dicts, left, strict=True)]
        self._values = [plain(own) for plain, own in zip(self._plain, dicts, strict=True)]
        self._weights = [_once(types, alike) for types in _types_of_weights(dicts)]
        self._empty = [(n, name) for n, own in enumerate(dicts) for name in FUNCTIONS if name in own and not own[name]]
        self._hooked = _hooked(dicts)
        others = [(n, _Others(part)) for n, part in enumerate(parts)]
        self._others = [(n, seen) for n, seen in others if seen.are_any]
        self.tensors = tensor_attributes(parts)

    def fits(self, parts: Sequence[nn.Module]) -> bool:
        """Whether these are the same parts, unchanged. False says little: what changed may not matter."""
        if len(parts) != len(self._parts) or UNTOUCHED.changes != self._untouched:
            return False
        dicts = [part.__dict__ for part in parts]
        try:
            # As many attributes as before, and none of them missing: the same ones. A module that lacks one of torch's
            # own cannot be called.
            types = [tuple(map(type, every(own))) for every, own in zip(self._every, dicts, strict=True)]
        except KeyError:
            return False
        return (
            all(map(operator.is_, parts, [ref() for ref in self._parts]))
            and all(map(operator.is_, map(type, parts), self._kinds))
            and list(map(count, dicts)) == self._counts
            and types == self._types
            and [plain(own) for plain, own in zip(self._plain, dicts, strict=True)] == self._values
            and _types_of_weights(dicts) == self._weights
            and not any([dicts[n][name] for n, name in self._empty])
            and _hooked(dicts) == self._hooked
            and all([seen.fit(parts[n]) for n, seen in self._others])
        )


def settings_of(part: nn.Module) -> list[tuple[str, type, Any]]:
    """(name, type, value) of its plain attributes; of lists, dicts and objects of settings a picture as the value.

    The type as well: 1 is not True in a forward.
    """
    found, left = [], left_out(part)
    for name, value in part.__dict__.items():
        if name in left:
            continue
        if is_plain(value):
            found.append((name, type(value), value))
        elif name not in FUNCTIONS and is_held(value):
            found.append((name, type(value), picture(value)))
    return found + notes_of(part)


def notes_of(part: nn.Module, wrapped: bool = True, seen: Unchanged | None = None) -> list[tuple[str, type, Any]]:
    """What weights of another tensor class say of themselves: how they are packed, what patches them.

    wrapped: those too that are made of other tensors (quantised ones), which nobody changes but for another one.
    seen: notes what holds others.
    """
    found = []
    for name, weight in part._parameters.items():
        kind = type(weight)
        if kind in TENSORS or weight is None:
            continue
        if is_dressed(kind):
            if seen is not None:
                seen.mapping(part._parameters)
                seen.mapping(weight.__dict__)
            found.append((name, kind, picture_of_notes(notes_of_tensor(weight), seen)))
        elif wrapped and (flatten := getattr(weight, "__tensor_flatten__", None)):
            found.append((name, kind, picture(flatten()[1])))
    return found


def is_hooked(part: nn.Module) -> bool:
    """Whether another pack's code is attached to this very part."""
    own = part.__dict__
    if own.keys().isdisjoint(FORWARDS):  # as nearly all
        return any(_hooks(own))
    return any(_hooks(own)) or any(name in own and not is_known(own[name]) for name in FORWARDS)


def is_plain(value: Any) -> bool:
    """Whether it is compared as it is: a number, a word, a dtype, or a tuple of them."""
    return type(value) in PLAIN or (type(value) in TUPLES and all(map(is_plain, value)))


class _Others:
    """What is neither plain nor empty of one part: hooks, functions, lists and objects of settings."""

    __slots__ = ("code", "held", "lists", "tables", "notes")

    def __init__(self, part: nn.Module) -> None:
        own = part.__dict__
        self.lists = [(name, list(map(kept, own[name]))) for name in FUNCTIONS if own.get(name)]
        self.tables = [list(map(kept, table.values())) for table in _hooks(own)] if any(_hooks(own)) else []
        left = left_out(part)
        others = [item for item in own.items() if not (item[0] in left or item[0] in FUNCTIONS or is_plain(item[1]))]
        self.code = [(name, kept(value)) for name, value in others if callable(value)]
        self.held = [(name, picture(value)) for name, value in others if is_held(value)]
        self.notes = notes_of(part)

    @property
    def are_any(self) -> bool:
        return bool(self.lists or self.tables or self.code or self.held or self.notes)

    def fit(self, part: nn.Module) -> bool:
        own = part.__dict__
        return (
            all([_same(refs, own[name]) for name, refs in self.lists])
            and (not self.tables or self._tables_fit(own))
            and all([ref() is own[name] for name, ref in self.code])
            and all([picture(own[name]) == seen for name, seen in self.held])
            and (not self.notes or notes_of(part) == self.notes)
        )

    def _tables_fit(self, own: dict[str, Any]) -> bool:
        return all(_same(refs, table.values()) for refs, table in zip(self.tables, _hooks(own), strict=True))


_hooks = operator.itemgetter(*HOOKS)


def _hooked(dicts: Sequence[dict[str, Any]]) -> list[int]:
    """The places of parts with hooks."""
    if not any(chain.from_iterable(map(_hooks, dicts))):
        return []
    return [n for n, own in enumerate(dicts) if any(_hooks(own))]


def count(own: dict[str, Any]) -> int:
    """Of its attributes; ComfyUI's notes of weights that it maps in come and go with each step."""
    return len(own) - len(MAPPING.intersection(own)) if "_v" in own else len(own)


def _plain_names(own: dict[str, Any], left: Collection[str]) -> list[str]:
    return [name for name, value in own.items() if name not in left and is_plain(value)]


def _types_of_weights(dicts: Iterable[dict[str, Any]]) -> list[tuple[type, ...]]:
    tables = [own["_parameters"] for own in dicts]
    return [tuple(map(type, table.values())) if table else () for table in tables]


def _once(found: tuple, alike: dict[tuple, Any]) -> tuple:
    return alike.setdefault(found, found)


def _getter(names: Sequence[str], alike: dict[tuple, Any]) -> Callable[[dict[str, Any]], tuple]:
    """What gives the values of these names as a tuple."""
    if not names:
        return lambda own: ()
    key = ("values of", *names)
    if key not in alike:
        alike[key] = operator.itemgetter(*names) if len(names) > 1 else operator.itemgetter(*names, *names)
    return alike[key]


def _same(refs: list[Callable[[], Any]], values: Collection[Any]) -> bool:
    if not refs:
        return not values
    return len(refs) == len(values) and all(ref() is value for ref, value in zip(refs, values, strict=True))
