"""What is known of a model's code from one sampling run to the next: which it was, and what gained nothing."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..block_forwards import MAX_STRUCTURES
from ..fingerprint import ModuleFingerprint
from ..foreign import foreign_code, replaced_in_torch
from ..functions_read import FunctionsRead
from ..key import ShapeKey
from ..tape.named_tensors import classes_of, parts_of
from ..weights import Whereabouts
from .known_pages import KnownPages
from .shortages import Shortages
from .steady_blocks import KnownBlocks

MOST_RESTING = 96  # kinds of calls of one model
MOST_EARLIER = MAX_STRUCTURES - 1  # fingerprints of a model besides that of now; a look with each takes a while


class Fingerprints:
    """Numbers for what a model's code was: the same number, the same code.

    A workflow may use a model with another node's patch of its modules and without, in turn. So the last few are known.
    """

    def __init__(self) -> None:
        self._current: ModuleFingerprint | None = None
        self.read: FunctionsRead | None = None  # of the model at the last look
        self._number = self._count = 0
        self._earlier: list[tuple[int, ModuleFingerprint, FunctionsRead]] = []  # what it was before, the latest last
        self._has_foreign, self._seen = False, (0, 0)  # whether, and of which code
        self.replaced = ""  # a function of torch's that another pack replaced
        self.restless = self.why = ""  # what changed at each call in an earlier run, and the reason that said so
        self.blocks = KnownBlocks()
        self._resting: dict[ShapeKey, str] = {}  # calls that gain nothing, and why
        self._whereabouts = Whereabouts(())  # of the weights meanwhile
        self.shortages, self.pages = Shortages(), KnownPages()

    def of(self, model: nn.Module) -> int:
        """The number of the model as it is now; a new one if it is not as it was at one of the last looks."""
        if self._current is None or self._current.look():
            known = next((each for each in reversed(self._earlier) if not each[1].look()), None)
            if known is not None:
                self._earlier.remove(known)
            if self._current is not None:
                self.release()
                self._earlier.append((self._number, self._current, self.read))
                del self._earlier[:-MOST_EARLIER]
            if known is None:
                self._count += 1
                known = self._count, ModuleFingerprint(model), FunctionsRead(classes_of(parts_of(model)))
            self._number, self._current, self.read = known
        return self._number

    def functions(self) -> int:
        """As ``FunctionsRead.state``, of the model at the last look."""
        return self.read.state() if self.read is not None else 0

    def holds(self) -> bool:
        """Whether the functions, and the methods of classes, are those of the last look."""
        functions, current = self.read, self._current
        return (functions is None or functions.holds()) and (current is None or current.methods_hold())

    def parts(self, model: nn.Module) -> tuple[Sequence[nn.Module], Sequence[tuple[int, str]] | None]:
        """(its parts, ``tensor_attributes`` of them if they are known), as of the last look."""
        current = self._current
        if current is None or not current.parts:
            return parts_of(model), None
        return current.parts, current.tensors

    def hold(self) -> None:
        """Holds the functions that the model's code names until ``release``: looks at them are quick then."""
        if self.read is not None:
            self.read.hold()

    def foreign(self, model: nn.Module) -> list[tuple[str, Any]]:
        """Other packs' code in the model. Not kept: it may hold the model."""
        if self._seen == (self._number, self.functions()):
            return foreign_code(model, self.read) if self._has_foreign else []
        found = foreign_code(model, self.read)
        self._has_foreign, self._seen = bool(found), (self._number, self.functions())
        self.replaced = replaced_in_torch(self.read)
        return found

    def changed(self) -> bool:
        """A quick look."""
        return self._current is None or self._current.quick()

    def changes(self) -> str:
        """What is not as it was at the last look, and whose it is; "" if all is."""
        return self._current.full() if self._current is not None else ""

    def settings_changed(self) -> list[tuple[nn.Module, str]]:
        """(part, name) of the settings that are not as they were at the last look."""
        return self._current.settings_changed() if self._current is not None else []

    def brings_functions(self) -> bool:
        """Whether other packs replaced functions that the model's code names: what these read is not known."""
        return self.read is None or next(iter(self.read.brought()), None) is not None

    def latest(self) -> str:
        """The function that was replaced last."""
        return self.read.latest if self.read is not None else ""

    def rest(self, key: ShapeKey, why: str, weights: Sequence[Tensor]) -> None:
        """Such calls gain nothing while these weights lie where they do: looks at the model would only take time."""
        if len(self._resting) >= MOST_RESTING or not self._whereabouts.unchanged():
            self._resting = {}
        if not self._resting:
            self._whereabouts = Whereabouts(weights)
        self._resting[key] = why

    @property
    def has_resting(self) -> bool:
        """Whether ``resting`` is worth a key."""
        return bool(self._resting)

    def resting(self, key: ShapeKey) -> str:
        """Why such a call gains nothing, without a look at the model's code; "" if that is not known, or past."""
        why = self._resting.get(key, "")
        if why and not self._whereabouts.unchanged():
            self._resting, why = {}, ""
        return why

    def release(self) -> None:
        """Lets go of the model."""
        if self._current is not None:
            self._current.release()
        if self.read is not None:
            self.read.release()


_FINGERPRINTS: "weakref.WeakKeyDictionary[nn.Module, Fingerprints]" = weakref.WeakKeyDictionary()


def fingerprints(model: nn.Module) -> Fingerprints:
    """Those of ``model``: one for all clones of its patcher."""
    return _FINGERPRINTS.setdefault(model, Fingerprints())
