"""Holds the programs of one model: recorded at the first call of a size, found again at later ones.

A take is one recording. It fits a call if the inputs have its shapes, the options that the forward read are as they
were, and the model's code has not changed since.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .block_forwards import MAX_STRUCTURES, Blocks
from .capture import collector_off
from .key import ShapeKey
from .reasons import say
from .recorded import Recorded
from .take import NONE, Take, Taped
from .tape.called_patches import FormChanged, LiveCall
from .tape.guards import Guards, at
from .tape.named_tensors import with_others
from .tape.options import Reads
from .tape.patch_book import PatchBook, code_of
from .tape.program import Program
from .tape.refusals import OF_THE_CODE
from .tape.rules.resident import is_fetched
from .tape.values import Tape, Weight
from .weights import low_vram

NEVER = 0  # the number of a take that was not recorded
MAX_TAKES = 48  # per model; the least recently used goes with what it holds
MAX_OF_A_SIZE = 12
MAX_MET = 1024  # sizes
MAX_IN_VAIN = 4  # recordings of one size that no later call could use: an option differs in each
ENOUGH = 2  # sizes whose forward was refused: those of further ones are not recorded, as they would be, too


class Tapes:
    """The takes of one model. Holds no module, and weights only between ``bind`` and ``release``."""

    def __init__(self) -> None:
        self._takes: OrderedDict[tuple[ShapeKey, bool], list[Take]] = OrderedDict()
        self._numbers = itertools.count(NEVER + 1)  # of takes
        self._blocks = Blocks()
        self._one_by_one: int | None = None  # a structure whose blocks are not alike, as it turned out
        self._structures: OrderedDict[int, None] = OrderedDict()  # the last few, the latest last
        self._gone: list[tuple[ShapeKey, int]] = []  # takes of earlier ones, until ``over``
        self._met: OrderedDict[ShapeKey, int] = OrderedDict()  # and in which run of one step it came first
        self._kept: dict[tuple[ShapeKey, bool], int] = {}  # runs in which a forward left something behind
        self._has_changed = False  # whether a recorded forward has changed the model
        self.patches = PatchBook()
        self._lock = threading.RLock()

    def find(self, key: ShapeKey, fuse: bool, taped: Taped, but: Sequence[Take] = ()) -> Take | None:
        """Returns the take that fits this call, or None. but: takes that turned out not to fit."""
        with self._lock:
            self._meet(taped.structure)
            takes = self._takes.get((key, fuse), [])
            for take in takes[:]:
                if take.structure == taped.structure and take not in but and not self._differs(take, taped):
                    if not take.lacks_rest(self._takes.get((take.rest, fuse))):
                        self._takes.move_to_end((key, fuse))
                        take.used = True
                        return take
                    takes.remove(take)
            if taped.unknown:
                return self._of_blocks(key, fuse, taped, taped.unknown)
            refused = self._refused_elsewhere(fuse, taped) if not but else None
            if refused is None:
                return None
            take = replace(refused, number=NEVER, run=None, clock=None, among=self.patches.among(taped.options))
            self.keep(key, fuse, take)
            return take

    def _meet(self, structure: int) -> None:
        """Forgets the takes of what the model was, but for the last few: one of those may come again."""
        self._structures[structure] = None
        self._structures.move_to_end(structure)
        while len(self._structures) > MAX_STRUCTURES:
            old, _ = self._structures.popitem(last=False)
            for (key, _), takes in self._takes.items():
                self._gone += [(key, take.number) for take in takes if take.structure == old]
                takes[:] = [take for take in takes if take.structure != old]

    def _differs(self, take: Take, taped: Taped) -> str:
        """What a call would read that the take has read otherwise; "" if it fits."""
        if take.number == NEVER and take.among != self.patches.among(taped.options):
            return "patches"
        if take.number == NEVER and take.run not in (None, taped.run):
            return "run"
        if take.code:
            changed = taped.looks.changed((code for _, code in taped.foreign), take.code, taped.module)
            if changed is not None:
                return taped.foreign[changed][0]
        return take.guards.differs(taped.options, taped.module, looks=taped.looks)

    def in_vain(self, key: ShapeKey, fuse: bool, taped: Taped) -> str:
        """Says why another recording of this size would be of no use; "" if it may be."""
        with self._lock:
            if taped.once and self._met.setdefault(key, taped.run) == taped.run:
                while len(self._met) > MAX_MET:
                    self._met.popitem(last=False)
                return say("one_step")
            among = self.patches.among(taped.options)
            takes = [take for take in self._takes.get((key, fuse), []) if take.among == among]
            never = [take for take in takes if take.number == NEVER]
            last = [take for take in takes if take.structure == taped.structure and take.number != NEVER][-MAX_IN_VAIN:]
            early = len(last) < MAX_IN_VAIN
            # A pack that patches the model again in each run does in this one what it did in the last few. What was
            # given up early tells nothing of later runs: so after some it is tried again as often as at first.
            before = {take.reason for take in never if take.structure != taped.structure and take.run is None}
            if any(take.used for take in last) or (early and not (before and last and last[-1].run == taped.run)):
                return ""
            option = self._differs(last[-1], taped)
            place = last[-1].guards.changed_state(taped.options, taped.module, taped.looks)
            if place is not None:  # what a patch reads differs in each call: from now on it is called
                if not early:
                    self.patches.live(code_of(at(taped.options, place)))
                return ""
            if option not in taped.options and option in dict(taped.foreign):
                reason = say("foreign_state", name=option)
            else:
                reason = say("option_differs", option=repr(option))
            if early and reason not in before:
                return ""
            take = self._of_blocks(key, fuse, taped, reason)
            take.run = taped.run if early else None  # in the next one it may settle
            return reason

    def _refused_elsewhere(self, fuse: bool, taped: Taped) -> Take | None:
        """A take of another size that was refused for what the model's code does, as this one would be."""
        takes = [take for (_, fused), takes in self._takes.items() if fused == fuse for take in takes]
        takes = [take for take in takes if take.structure == taped.structure]
        refused = [
            take for take in takes
            if take.number != NEVER and take.reason.startswith(OF_THE_CODE) and not self._differs(take, taped)
        ]  # fmt: skip
        able = len(refused) < ENOUGH or any(take.program is not None for take in takes)
        return None if able else refused[-1]

    def _of_blocks(self, key: ShapeKey, fuse: bool, taped: Taped, reason: str) -> Take:
        """A take that stands for the blocks alone; from now on it is found."""
        take = Take(Guards(Reads(lambda tensor: None)), taped.structure, NEVER, reason=reason, in_blocks=True)
        take.twice, take.among = reason == taped.unknown, self.patches.among(taped.options)
        self.keep(key, fuse, take)
        return take

    def record(
        self, key: ShapeKey, fuse: bool, taped: Taped, inputs: Mapping[str, Tensor], turned: frozenset[Weight] = NONE,
        short: bool = False,
    ) -> tuple[Any, Take, Tape | None]:  # fmt: skip
        """(ComfyUI's own result, the new take, its tape), see ``Own``. Errors are those of ComfyUI's own forward.

        turned, short: see ``Recorded``; a short take without a tape is not kept.
        """
        recorded = Recorded(key, taped, inputs, self._blocks, self.patches, turned, short, in_blocks=fuse)
        out, tape = recorded.forward(copying=self._one_by_one != taped.structure)
        take = recorded.take(next(self._numbers))
        with self._lock:
            if not (short and take.reason) and self._may_keep(key, fuse, taped, take, recorded):
                self.keep(key, fuse, take)
                return out, take, None if take.reason else tape
        return out, take, None

    def _may_keep(self, key: ShapeKey, fuse: bool, taped: Taped, take: Take, recorded: Recorded) -> bool:
        """Whether ``find`` may find the take. Otherwise the next call is recorded once more, by what is noted here."""
        if recorded.again:
            return False
        if recorded.changed and not self._has_changed:  # perhaps its first forward makes what it has from now on
            self._has_changed = take.again = True
            take.afresh = not (recorded.moves or taped.meets_others)  # what is kept, or counted, is not to be twice
        if take.reason and take.copies:  # perhaps that is why
            self._one_by_one = taped.structure
            take.again = take.again or (taped.skipping is not None and not take.twice)
            return False
        if recorded.moves and self._kept.get((key, fuse)) != taped.run:  # perhaps it has what it keeps from now on
            self._kept[key, fuse], take.again = taped.run, True
            return False
        return True

    def like(self, whole: Take) -> Take:
        """A new take of what ``whole`` recorded. It is not found until it is kept."""
        take = Take(whole.guards, whole.structure, next(self._numbers), called=whole.called, code=whole.code)
        take.weights, take.live, take.holds, take.held = whole.weights, whole.live, whole.holds, whole.held
        return take

    def heir(self, key: ShapeKey, fuse: bool, taped: Taped, but: Sequence[Take] = ()) -> Take | None:
        """A take of a recording whose patches were others of the same kind: the same program, on their tensors.

        None if there is none. It is found from now on, and so is the one of its skipped steps. but: as in ``find``.
        """
        with self._lock, collector_off():  # so many small objects at once would set it off
            for take in reversed(self._takes.get((key, fuse), [])):
                able = take.program is not None and take.structure == taped.structure and take not in but
                if not able or taped.looks.changed((c for _, c in taped.foreign), take.code, taped.module) is not None:
                    continue
                calls = [each for each in take.live if isinstance(each, LiveCall)]
                if any(self.patches.is_misfit(take.program, at(taped.options, each.place)) for each in calls):
                    continue
                called = {each.place for each in calls if code_of(at(taped.options, each.place)) is each.who}
                taken = take.guards.taken_over(taped.options, taped.module, taped.looks, called)
                if taken is not None:
                    rest = [each for each in self._takes.get((take.rest, fuse), []) if each.guards is take.guards]
                    for each in rest:
                        self._heir(take.rest, fuse, each, *taken)
                    return self._heir(key, fuse, take, *taken)
        return None

    def _heir(
        self, key: ShapeKey, fuse: bool, take: Take, guards: Guards, tensors: Mapping[int, Tensor]
    ) -> Take:  # fmt: skip
        if take.guards.is_over:
            self.drop(take)
        number, others = next(self._numbers), with_others(take.others, tensors)
        new = replace(take, guards=guards, number=number, others=others, weights=None, used=False, over=False)
        new.heir = True
        self.keep(key, fuse, new)
        return new

    def over(self) -> list[tuple[ShapeKey, int]]:
        """The keys and numbers of takes that fit no call any more, each once.

        Where patches are others, the takes stay, for their programs may have heirs.
        """
        with self._lock:
            every = [(key, take) for (key, _), takes in self._takes.items() for take in takes if not take.over]
            found = [(key, take) for key, take in every if take.guards.is_over]
            for _, take in found:
                take.over = True
            gone, self._gone = self._gone, []
        return [(key, take.number) for key, take in found] + gone

    def keep(self, key: ShapeKey, fuse: bool, take: Take) -> None:
        """Makes ``find`` find ``take`` for calls of this key from now on."""
        with self._lock:
            takes = self._takes.setdefault((key, fuse), [])
            takes.append(take)
            del takes[:-MAX_OF_A_SIZE]
            while len(self._takes) > MAX_TAKES:
                self._takes.popitem(last=False)

    def first(self, take: Take) -> None:
        """Tries this take first from now on, if several fit."""
        with self._lock:
            for takes in self._takes.values():
                takes.sort(key=lambda each: each is not take)

    def doubt(self, take: Take) -> bool:
        """Notes that the take's program was wrong. Returns whether copied blocks may be why; none are copied then."""
        if take.copies:
            self._one_by_one = take.structure
            self.drop(take)
        return bool(take.copies)

    def misfit(self, take: Take, error: FormChanged, options: Mapping[Any, Any]) -> None:
        """Forgets a take whose patch gave another form of result than in the recording.

        That one was of another patch, perhaps: then this patch may have a recording to itself.
        """
        if take.heir and error.place:
            self.patches.misfit(take.program, at(options, error.place))
        else:
            self.patches.odd(error.who)
        self.drop(take)

    def drop(self, take: Take) -> None:
        """Forgets one take."""
        with self._lock:
            for takes in self._takes.values():
                if take in takes:
                    takes.remove(take)

    def forget(self, program: Program) -> None:
        """Forgets the takes of a program."""
        with self._lock:
            for takes in self._takes.values():
                takes[:] = [take for take in takes if take.program is not program]

    def loosen(self) -> None:
        """Holds the weights no longer than their model does."""
        with self._lock:
            for take in [take for takes in self._takes.values() for take in takes if take.program is not None]:
                take.program.loosen()

    def release(self) -> None:
        """Releases the weights, because the model is unloaded."""
        with self._lock:
            for takes in self._takes.values():
                for take in takes:
                    if take.program is not None:
                        take.program.unbind()
                    take.weights = None


def obstacle(tape: Tape, model: nn.Module | None = None) -> str:
    """Says why a tape may not be replayed; "" if it may. model: its model, unless the tape is of a single block."""
    for value in tape.leaves():
        if value.device != tape.device and not (is_fetched(value) or (value.is_constant and not value.shape)):
            return (low_vram(model, tape.device) if model is not None else "") or say("weights_elsewhere")
    return ""
