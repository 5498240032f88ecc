"""Notes what a forward reads of its options. ``guards`` tells whether it would read the same now.

ComfyUI hands a dict of options down to every block (``transformer_options``). A recorded forward gets it as a dict that
notes what was read. What was read must be the same for a replay: plain values by equality, functions by identity.
Tensors are inputs of the tape.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .decisions import Decisions, Path
from .identity import EQUAL, PLAIN, Same
from .state import look

MISSING = object()
GONE = Same(MISSING)
MOST = 200  # objects in the state of one option
OWN = "comfy."  # ComfyUI's own package
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
        self._loose: set[Any] = set()  # of those: what only a loop of ComfyUI's own has read, to copy it with the rest
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

    def note(self, key: Any, value: Any, used: bool = True, loose: bool = False) -> None:
        """``key`` was asked for, and ``value`` was there (or ``MISSING``). used: not just copied with the rest.

        loose: by a loop of ComfyUI's own.
        """
        if not loose:
            self._loose.discard(key)
        elif key not in self.kept and type(key) is str:
            self._loose.add(key)
        if (key in self.kept and (key in self.used or not used)) or key in self.tensors:
            return
        if isinstance(value, Tensor):
            self.tensors[key] = tensor_spec(value)
            self._on_tensor(value)
        else:
            self.kept[key] = frozen(value, used)
            if used:
                self.used.add(key)

    def forget(self, named: Set[str] | None) -> None:
        """Lets go of what a loop of ComfyUI's own copied and nobody can have read: no code in the model names it.

        named: what code in the model names; None if other code may have had the copy.
        """
        for key in self._loose - named if named is not None else ():
            self.kept.pop(key, None)

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
        self._loose = False  # whether a loop of ComfyUI's own goes through it now
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

    @contextmanager
    def heard_in(self, heard: dict[Any, Any]) -> Iterator[None]:
        """While the body runs, what it reads is noted in ``heard``, too."""
        outer, self.heard = self.heard, heard
        try:
            yield
        finally:
            self.heard = outer
            if outer is not None:
                outer.update(heard)

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
            self._reads.note(key, value, key is not self._passing, key is self._passing and self._loose)
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
        self._looked, self._loose = False, sys._getframe(1).f_globals.get("__name__", "").startswith(OWN)
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


def tensor_spec(value: Any) -> tuple | None:
    return (tuple(value.shape), value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else None
