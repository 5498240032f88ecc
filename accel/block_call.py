"""One call of a block, with its arguments split into tensors and everything else that a program depends on."""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .errors import AnyShapeError
from .origin import is_known
from .reasons import say
from .tape.blocks import NUMBERS
from .tape.identity import bundled
from .tape.swaps import contents, swapped

OPTIONS = "transformer_options"


class NotUsed(AnyShapeError):
    """Raised where a block must run in eager; says why."""


@dataclass
class Given:
    """The arguments of one call of a block, taken apart."""

    args: tuple
    kwargs: dict[str, Any]
    passed: Mapping[Any, Any] | None = None  # its options, if it was passed any
    tensors: list[Tensor] = field(default_factory=list)  # each once
    key: list[Hashable] = field(default_factory=list)  # all the rest, and the tensors' forms
    functions: bool = False  # whether the key may hold functions of which it can say no more than which they are
    home: str = ""  # the block's module
    entered: list[int] = field(default_factory=list)  # ids of functions whose contents are being walked

    @property
    def options(self) -> Mapping[Any, Any]:
        """The options that it was passed."""
        return {} if self.passed is None else self.passed

    def was_changed(self, kind: type) -> bool:
        """Whether the block, of class ``kind``, has changed a list or dict among them."""
        try:
            after = take_apart(kind, self.args, self.kwargs, self.functions)
        except NotUsed:  # it has put something there that has no key
            return True
        return after.key != self.key or list(map(id, after.tensors)) != list(map(id, self.tensors))

    def call(
        self, own: Callable[..., Any], options: Mapping[Any, Any] | None = None, swap: Mapping[int, Any] | None = None
    ) -> Any:
        """``own`` with other options, and other objects in place of those whose ids are in ``swap``."""
        swap = dict(swap or {})
        if self.passed is not None and options is not None:
            swap[id(self.passed)] = options
        return own(*swapped(self.args, swap), **swapped(self.kwargs, swap))


def take_apart(kind: type, args: tuple, kwargs: dict[str, Any], functions: bool = False) -> Given:
    """Splits the arguments of a call of a block of class ``kind``. functions: see ``Given``.

    Raises ``NotUsed`` if an argument has no key.
    """
    given = Given(args, kwargs, functions=functions, home=kind.__module__)
    place = _place_of_options(kind.forward)
    if OPTIONS in kwargs or 0 <= place < len(args):
        passed = kwargs[OPTIONS] if OPTIONS in kwargs else args[place]
        if isinstance(passed, dict):
            given.passed = passed
    places: dict[int, int] = {}
    given.key.append(len(args))
    for item in args:
        _walk(item, given, places)
    for name, item in kwargs.items():
        given.key.append(name)
        _walk(item, given, places)
    return given


@functools.lru_cache(maxsize=256)
def _place_of_options(forward: Callable[..., Any]) -> int:
    """The position of the options among a call's arguments, or -1."""
    names = list(inspect.signature(forward).parameters)[1:]
    return names.index(OPTIONS) if OPTIONS in names else -1


def _walk(item: Any, given: Given, places: dict[int, int], inside: bool = False) -> None:
    """inside: of an object, which may lead back to where it is held."""
    kind, key = type(item), given.key
    if kind is Tensor or kind is nn.Parameter:
        place = places.setdefault(id(item), len(given.tensors))
        if place == len(given.tensors):
            given.tensors.append(item)
        key.append((place, item.shape, item.stride(), item.dtype, item.device))
    elif item is given.passed and item is not None:
        key.append(OPTIONS)
    elif kind is FunctionType and _walk_function(item, given, places, inside):
        return
    elif isinstance(item, NUMBERS) or kind is torch.Size or (kind is FunctionType and given.functions):
        key.append((kind, item))
    elif kind is list or kind is tuple:
        key.append((kind, len(item)))
        for each in item:
            _walk(each, given, places, inside)
    elif kind is dict:
        key.append((kind, tuple(item)))
        for each in item.values():
            _walk(each, given, places, inside)
    elif not (inside or given.entered) and (held := bundled(item)) is not None:
        key.append((kind, tuple(held)))
        for each in held.values():
            _walk(each, given, places, inside=True)
    else:
        raise NotUsed(say("block_argument", kind=kind.__name__))


def _walk_function(function: FunctionType, given: Given, places: dict[int, int], inside: bool) -> bool:
    """Whether a function is known by its code and what it was made with: an attention with its cached keys, say.

    An object that it holds may be what it writes into, so there must be none.
    """
    known = (is_known(function) or function.__module__ == given.home) and not function.__dict__
    held = contents(function) if known and id(function) not in given.entered else None
    if held is None:
        return False
    keys, tensors, before = len(given.key), len(given.tensors), dict(places)
    given.key.append((FunctionType, function.__code__))
    given.entered.append(id(function))
    try:
        _walk(held, given, places, inside)
        return True
    except NotUsed:
        del given.key[keys:], given.tensors[tensors:]
        places.clear()
        places.update(before)
        return False
    finally:
        given.entered.pop()
