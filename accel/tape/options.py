"""Notes what a forward reads of its options, and tells whether it would read the same now.

ComfyUI hands a dict of options down to every block (``transformer_options``). A recorded forward gets it as a dict that
notes what was read. What was read must be the same for a replay: plain values by equality, functions by identity.
Tensors are inputs of the tape.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from typing import Any

from torch import Tensor, nn

from .decisions import Decisions, Path, followed
from .identity import EQUAL, PLAIN, Same
from .likeness import Pairs, differing
from .state import Looks, look
from .this_forward import numbers_of

MISSING = object()
GONE = Same(MISSING)
MOST = 200  # objects in the state of one option
# Different in every run, and copied along with all the rest by code that does not look at them.
COPIED_ALONG = frozenset(
    ("uuids", "sigmas", "sample_sigmas", "cond_or_uncond", "wrappers", "callbacks", "context_window")
)
# Of those, what a plain copy of all options leaves out: ``{**options}``, whose reads nobody sees. Tensors of another
# number of steps would be another recording; if the copy's are used after all, that is refused.
LEFT_OUT = COPIED_ALONG - {"cond_or_uncond", "sigmas"}


class Reads:
    """What was read: values by key as they were then, the tensors among them, and which keys there were."""

    def __init__(self, on_tensor: Callable[[Tensor], None]) -> None:
        self.tensors: dict[Any, tuple] = {}
        self.kept: dict[Any, Any] = {}
        self.used: set[Any] = set()  # of those: what was asked for by its name, not just copied with the rest
        self.keys: tuple[frozenset, frozenset] | None = None  # the caller's, and those that the forward had written
        self.decisions: Mapping[Any, Mapping[str, tuple[Path, bool]]] = {}  # by the numbers of tensors
        self.states: dict[tuple, tuple] = {}  # of recorded patches by their places in the options: see ``state``
        self.idle: Set[tuple] = frozenset()  # the places of patches that were not called
        self.called: dict[tuple, Any] = {}  # states of patches that must be called; None where they keep what they see
        self.leaves: dict[int, Callable[[], Tensor | None]] = {}  # tensors that those keep, by id: leaves, if read
        self._on_tensor = on_tensor
        self._asked: list[tuple[Any, Any]] = []  # what was asked for in the order of all keys; perhaps a copy of all

    def ask(self, key: Any, value: Any) -> None:
        """Code that has listed all keys asks for them in that order: perhaps to copy them all."""
        if key not in LEFT_OUT:
            self.note(key, value, used=False)
        self._asked.append((key, value))

    def copied(self) -> None:
        """It has asked for all of them: it has made a copy."""
        self._asked.clear()

    def settle(self, over: bool = False) -> None:
        """What was asked for so far is no copy of everything, but was asked for by name. over: so is the forward."""
        asked, self._asked = self._asked, []
        for key, value in asked:
            if not (over and isinstance(value, Tensor)):  # nothing was computed with it
                self.note(key, value)

    def note(self, key: Any, value: Any, used: bool = True) -> None:
        """``key`` was asked for, and ``value`` was there (or ``MISSING``). used: not just copied with the rest."""
        if (key in self.kept and (key in self.used or not used)) or key in self.tensors:
            return
        if isinstance(value, Tensor):
            self.tensors[key] = _spec(value)
            self._on_tensor(value)
        else:
            self.kept[key] = frozen(value, used)
            if used:
                self.used.add(key)

    def note_keys(self, keys: Iterator[Any], own: Iterable[Any]) -> None:
        """Notes that code looked at all keys, so that one more or one less may matter."""
        if self.keys is None:
            own = COPIED_ALONG | frozenset(own)
            self.keys = frozenset(keys) - own, own


class NotedOptions(MutableMapping, dict):
    """A dict that notes what is read of it; copies of it do too. What was written to it is its own affair.

    Of ``MutableMapping`` are the methods that read by way of those here; ``dict``'s own would read past them.
    heard: what was read of this copy, its own writes too; None if nobody asks.
    """

    def __init__(self, options: Mapping[Any, Any], reads: Reads, own: frozenset[Any] = frozenset()) -> None:
        dict.__init__(self, options)
        self._reads, self._own, self._passing = reads, set(own), MISSING
        self._listed: list[Any] = []  # keys that code has listed and not asked for yet, the next one last
        self._looked = False  # whether it has asked for any since it began to list them
        self.heard: dict[Any, Any] | None = None
        self.strict = False  # while code of another pack has it: whatever that copies, it may read
        self.decisions: Decisions | None = None  # while a patch that is written down has it
        self._theirs: dict[Any, Any] = {}  # what is hidden, where a read of it is noted as of the caller's

    def hide(self, key: Any, value: Any = MISSING, noted: bool = False) -> None:
        """Puts ``value`` in place of what the caller gave, or nothing. noted: a read of it is noted all the same."""
        if noted:
            self._theirs[key] = dict.get(self, key, MISSING)
        self._own.add(key)
        if value is MISSING:
            dict.pop(self, key, None)
        else:
            dict.__setitem__(self, key, value)

    def notes(self, key: Any) -> bool:
        """Whether what is there is the caller's, whose reads are noted."""
        return key not in self._own

    def _note(self, key: Any) -> None:
        if key is self._passing and key in COPIED_ALONG and not self.strict:
            return
        value, self._looked = dict.get(self, key, MISSING), True
        if self.heard is not None and value is not MISSING:
            self.heard[key] = value
        listed, self._listed = self._listed, []
        if listed and key is listed[-1] and not self.strict:
            self._listed = listed[:-1]
            if key not in self._own:
                self._reads.ask(key, value)
            elif key in self._theirs:
                self._reads.ask(key, self._theirs[key])
            if not self._listed:
                self._reads.copied()
            return
        self._reads.settle()
        if key not in self._own:
            self._reads.note(key, value, key is not self._passing)
        elif key in self._theirs:
            self._reads.note(key, self._theirs[key], key is not self._passing)

    def _note_keys(self) -> None:
        self._reads.note_keys(dict.keys(self), self._own)

    def __len__(self) -> int:
        self._note_keys()
        return dict.__len__(self)

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        value = dict.__getitem__(self, key)
        if self.decisions is None or type(value) is not Tensor or key in self._own:
            return value
        return self.decisions.level(key, value)

    def __iter__(self) -> Iterator[Any]:
        """``dict(options)`` and ``{**options}`` list all keys first, and then ask for each of them."""
        self._note_keys()
        self._looked = False
        try:
            for key in dict.__iter__(self):
                self._passing = key
                yield key
            if not self._looked:
                self._listed = list(dict.__reversed__(self))
        finally:
            self._passing = MISSING

    def __reversed__(self) -> Iterator[Any]:
        self._note_keys()
        return dict.__reversed__(self)

    def copy(self) -> "NotedOptions":  # noqa: D102
        copied = NotedOptions(dict(dict.items(self)), self._reads, frozenset(self._own))
        copied.heard, copied.strict, copied.decisions = self.heard, self.strict, self.decisions
        copied._theirs = dict(self._theirs)
        return copied

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own.add(key)
        self._theirs.pop(key, None)
        dict.__setitem__(self, key, value)

    def popitem(self) -> tuple[Any, Any]:  # noqa: D102
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:  # noqa: D102
        self._own.update(dict.keys(self))
        self._theirs.clear()
        dict.clear(self)

    def __ior__(self, other: Any) -> "NotedOptions":
        self.update(other)
        return self

    def __delitem__(self, key: Any) -> None:
        self._own.add(key)
        self._theirs.pop(key, None)
        dict.__delitem__(self, key)

    def update(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class Guards:
    """What a recording depends on besides its inputs."""

    def __init__(self, reads: Reads) -> None:
        reads.settle(over=True)
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
            if _spec(options.get(key)) != spec:
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
    def is_over(self) -> bool:
        """Whether a tensor is gone that a recorded patch kept, so that nothing will ever be as it was."""
        return any(tensor() is None for tensor in self._leaves.values())

    def changed(self, options: Mapping[Any, Any], free: frozenset[str] = frozenset()) -> str:
        """The first option that is no tensor and not as it was when it was read; "" if all are. free: as above."""
        for key, old in self._kept.items():
            if key not in free and old != frozen(options.get(key, MISSING), key in self._used):
                return str(key)
        return ""

    def is_changed(self, place: tuple, options: Mapping[Any, Any], module: nn.Module) -> bool:
        """Whether the patch there, which is called, is in another state than when it was recorded."""
        before = self._called.get(place)
        return before is None or look(at(options, place), module) != before

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


def frozen(value: Any, deep: bool = False) -> Any:
    """``value`` as something that can be compared later and keeps no model alive.

    Functions by identity. deep: objects of settings not by identity alone, but by what lies in them.
    """
    if value is MISSING:
        return GONE
    if isinstance(value, EQUAL):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(frozen(item, deep) for item in value)
    if isinstance(value, dict):
        return dict, tuple((key, frozen(item, deep)) for key, item in dict.items(value))
    if isinstance(value, (set, frozenset)) and all(isinstance(item, PLAIN) for item in value):
        return type(value), frozenset(value)
    state = look(value, most=MOST) if deep and not isinstance(value, Tensor) and not callable(value) else None
    return Same(value) if state is None else (Same(value), state)


def _spec(value: Any) -> tuple | None:
    return (tuple(value.shape), value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else None
