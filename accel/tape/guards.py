"""Tells whether a forward would read of its options what it read when it was recorded."""

import copy
import weakref
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor, nn

from .decisions import followed
from .likeness import Pairs, differing
from .looks import Looks
from .options import MISSING, Reads, frozen, tensor_spec
from .this_forward import numbers_of


class Guards:
    """What a recording depends on besides its inputs. named: see ``options.Reads.forget``."""

    def __init__(self, reads: Reads, named: Set[str] | None = None) -> None:
        reads.settle(over=True)
        reads.forget(named)
        self.tensors = list(reads.tensors)
        self._kept, self._specs, self._keys = dict(reads.kept), dict(reads.tensors), reads.keys
        self._called = dict(reads.called)
        self._places, self._states = tuple(reads.states), tuple(reads.states.values())
        self._used, self._leaves, self._idle = frozenset(reads.used), dict(reads.leaves), frozenset(reads.idle)
        self._decisions = {option: tuple(found.values()) for option, found in reads.decisions.items()}

    def differs(
        self, options: Mapping[Any, Any], module: nn.Module | None = None, free: frozenset[str] = frozenset(),
        looks: Looks | None = None,
    ) -> str:  # fmt: skip
        """The first option that is not as it was; "" if all are.

        module: the model. free: options that do not matter. looks: of this run.
        """
        if key := self._other_tensor(options) or self.changed(options, free):
            return key
        place = self.changed_state(options, module, looks)
        return str(place[0]) if place else ""

    def _other_tensor(self, options: Mapping[Any, Any]) -> str:
        """The first option whose tensor is of another form, or decides otherwise; or one more, or one less."""
        for key, spec in self._specs.items():
            if tensor_spec(options.get(key)) != spec:
                return str(key)
        for key, decisions in self._decisions.items():
            numbers = numbers_of(options[key])
            if any(followed(numbers, path) != answer for path, answer in decisions):
                return str(key)
        if self._keys is not None and frozenset(options) - self._keys[1] != self._keys[0]:
            return next(iter(map(str, (frozenset(options) - self._keys[1]) ^ self._keys[0])))
        return ""

    def taken_over(
        self, options: Mapping[Any, Any], module: nn.Module | None, looks: Looks, called: Set[tuple]
    ) -> tuple["Guards", dict[int, Tensor]] | None:
        """Guards of the same recording for options that differ in the objects of patches alone.

        With the tensors that have taken the place of those that recorded ones kept, by their ids. None if more differs.
        called: the places of patches that are called at each replay, and have the same code. They may keep other
        tensors, or anything if they keep what they see.
        """
        if self._other_tensor(options):
            return None
        now = {key: frozen(options.get(key, MISSING), key in self._used) for key in self._kept}
        places = {place for key, old in self._kept.items() for place in differing(old, now[key], (key,))}
        if not places <= {*self._places, *self._idle, *called}:
            return None
        states, pairs = looks.at([at(options, place) for place in self._places], module), Pairs(self._leaves)
        if not (places or self._places) or not pairs.alike(self._states, states):
            return None
        kept = {place: state for place, state in self._called.items() if state is not None}
        if not Pairs(None).alike(tuple(kept.values()), looks.at([at(options, place) for place in kept], module)):
            return None
        heir = copy.copy(self)
        heir._kept, heir._states = now, states
        stayed = {number: ref for number, ref in self._leaves.items() if number not in pairs.tensors}
        heir._leaves = stayed | {id(tensor): weakref.ref(tensor) for tensor in pairs.tensors.values()}
        return heir, pairs.tensors

    @property
    def decided(self) -> frozenset[tuple]:
        """The answers that noise levels gave (which part of a patch's range it is), and what was asked."""
        asked = ((key, path, answer) for key, decisions in self._decisions.items() for path, answer in decisions)
        return frozenset((str(key), repr(path), answer) for key, path, answer in asked)

    @property
    def writes_down(self) -> bool:
        """Whether patches are in the recording."""
        return bool(self._places)

    @property
    def is_over(self) -> bool:
        """Whether a tensor is gone that a recorded patch kept, so that nothing will ever be as it was."""
        return any(tensor() is None for tensor in self._leaves.values())

    def changed(self, options: Mapping[Any, Any], free: frozenset[str] = frozenset()) -> str:
        """The first option that is no tensor and not as it was when it was read; "" if all are. free: as above."""
        for key, old in self._kept.items():
            if key not in free and old != frozen(options.get(key, MISSING), key in self._used):
                return str(key)
        return ""

    def changed_state(
        self, options: Mapping[Any, Any], module: nn.Module | None, looks: Looks | None = None
    ) -> tuple | None:
        """The place of a recorded patch whose code would read other values now; None if there is none."""
        if not self._places:
            return None
        patches = [at(options, place) for place in self._places]
        changed = (looks or Looks()).changed(patches, self._states, module)
        return None if changed is None else self._places[changed]


def at(options: Any, place: tuple) -> Any:
    """What lies at ``place`` in nested containers; None if nothing does."""
    for key in place:
        try:
            options = options[key]
        except (KeyError, IndexError, TypeError):
            return None
    return options
