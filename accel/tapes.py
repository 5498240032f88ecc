"""Holds the programs of one model: recorded at the first call of a size, found again at later ones.

A take is one recording. It fits a call if the inputs have its shapes, the options that the forward read are as they
were, and the model's code has not changed since.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .block_calls import BlockCalls
from .block_copies import BlockCopies
from .block_forwards import Blocks
from .clock import Clock
from .foreign import Held, Watched
from .key import ShapeKey
from .reasons import say
from .tape.called_patches import LiveCall, Played
from .tape.middle import BlockCall
from .tape.options import Guards, NotedOptions, Reads, at
from .tape.patches import PatchBook, Patches, code_of
from .tape.program import Program
from .tape.record import Recorder, record
from .tape.refusals import FETCHED, HARMLESS
from .tape.state import Looks
from .tape.values import Tape, Weight
from .weights import low_vram

NONE: frozenset = frozenset()
NEVER = 0  # the number of a take that was not recorded
MAX_TAKES = 48  # per model; the least recently used goes with what it holds
MAX_OF_A_SIZE = 12
MAX_IN_VAIN = 4  # recordings of one size that no later call could use: an option differs in each


@dataclass(frozen=True)
class Skipping:
    """What a call of a run that skips blocks asks for: the whole forward, with the features of what may be left out.

    depth: how many blocks at either end always run; None: as many as are cheap. key: of the call that is given the
    features and leaves the blocks out.
    """

    depth: int | None
    key: Callable[[Sequence[Tensor]], ShapeKey]


@dataclass(frozen=True)
class FullStep:
    """A forward's result, and its features [rows, ...] (see ``tape.cut``); depth, share: those of the cut.

    In place of features: why there never are any; None if there are none just now. apart: why the forward is on no
    tape, where its blocks may be left out all the same (see ``skip.unrecorded``).
    """

    out: Any
    features: tuple[Tensor, ...] | str | None
    depth: int = 0
    share: float = 0.0
    apart: str = ""


@dataclass(frozen=True)
class Taped:
    """A call whose forward may be recorded."""

    module: nn.Module
    forward: Callable[[Mapping[Any, Any]], Any]  # ComfyUI's own, with these options in place of the call's
    options: Mapping[Any, Any]
    structure: int  # changes with the model's code and with what else decides a result besides inputs and weights
    prepare: Callable[[NotedOptions, Recorder], None]  # puts what a recording needs into its options
    changed: Callable[[], str] = str  # what the forward changed of the model itself; "" if nothing
    # has just these weights lie channels last, if they may; gives the weights' fingerprint from the one that is known
    lay_out: Callable[[frozenset[Weight], int], int] = lambda wanted, known: known
    lean: bool = False  # see ``Tape.lean``
    places: Callable[..., frozenset[str]] = lambda block, uncalled=False: NONE  # see ``BlockCopies``
    calls_others: bool = False  # it calls patches of other packs, which may count their calls
    foreign: Sequence[tuple[str, Any]] = ()  # other packs' code in the model, and where it is
    run: int = 0  # the number of the sampling run
    looks: Looks = field(default_factory=Looks)  # at other packs' code in that run
    unknown: str = ""  # why the whole is not recorded: an argument that no guard can compare; its blocks may be
    skipping: Skipping | None = None
    leaves_out: bool = False  # its program is made with that of the whole forward, and never by recording this call
    # has the weights stay where they are, until ``let_go`` or ComfyUI's own forward; why they are gone, or ""
    hold: Callable[[], str] = str
    let_go: Callable[[], None] = lambda: None
    no_graph: Callable[[], str] = str  # why there is no room for a graph, now
    rest: Callable[[ShapeKey, str], None] = lambda key, why: None  # such calls gain nothing, and why
    fetches: Callable[[nn.Module], bool] = lambda block: False  # whether its weights come from elsewhere at each call


@dataclass(eq=False)
class Take:
    """One recording of one size, and the program that runs it."""

    guards: Guards
    structure: int
    number: int
    program: Program | None = None
    reason: str = ""  # why there is no program
    in_blocks: bool = False  # it is about the whole alone, so blocks may have programs of their own
    twice: bool = False  # and its forward may run twice
    again: bool = False  # the reason is mended: the next call is recorded once more
    among: frozenset = NONE  # the patches of other packs in its options
    live: list[LiveCall | Played] = field(default_factory=list)  # patches that are called at each replay
    holds: bool = False  # what those give is kept in a replay: they must not be called twice
    weights: int | None = None  # fingerprint of the weights that the program is bound to
    graph: bool = False  # whether a graph pays
    code: tuple = ()  # the state of other packs' code in the model, see ``tape.state``
    held: list[Held] = field(default_factory=list)  # where that code keeps the options of the latest forward
    called: str = ""  # what of other packs is called between the pieces of its graph
    needs_graph: int | None = None  # the budget in MB with which it must have one: without, eager is faster
    used: bool = False  # by a call after the one that was recorded
    clock: Clock | None = None  # of the whole forward, where one ran
    copies: int = 0  # blocks that were written down as copies of others
    left_out: int = 0  # of these, did not run
    short: bool = False  # its forward's result is void
    calls: list[BlockCall] = field(default_factory=list)  # of blocks, until the tape is cut
    features: int = 0  # results behind the forward's own
    depth: int = 0  # blocks at either end that always run
    share: float = 0.0  # of the work that is left on a skipped step
    rest: ShapeKey | None = None  # of the take that is given the features
    why_whole: str = ""  # why there is none, although one was asked for
    form: Callable[[Any], Any] = field(default=lambda out: out)  # the forward's result from the program's own part

    def inputs(self, given: Mapping[str, Tensor], options: Mapping[Any, Any]) -> dict[str, Tensor]:
        """The call's tensors and those that the forward takes from its options."""
        return dict(given) | {f"option {key}": options[key] for key in self.guards.tensors}

    def own(self, out: Any) -> Any:
        """The forward's own results among the program's."""
        return out[: -self.features] if self.features else out

    def lacks_rest(self, there: list["Take"] | None) -> bool:
        """Whether there is no take of skipped steps: it is forgotten, or was broken off. there: those of its key."""
        return bool(self.features and self.program) and not (self.why_whole or there)

    def result(self, out: Any) -> Any:
        """The forward's result, with its features where they were asked for."""
        own = self.form(self.own(out))
        if self.why_whole:
            return FullStep(own, self.why_whole)
        return FullStep(own, tuple(out[-self.features :]), self.depth, self.share) if self.features else own


class Tapes:
    """The takes of one model. Holds no module, and weights only between ``bind`` and ``release``."""

    def __init__(self) -> None:
        self._takes: OrderedDict[tuple[ShapeKey, bool], list[Take]] = OrderedDict()
        self._count = 0
        self._blocks = Blocks()
        self._one_by_one: int | None = None  # a structure whose blocks are not alike, as it turned out
        self._kept: dict[tuple[ShapeKey, bool], int] = {}  # runs in which a forward left a tensor in the model
        self.patches = PatchBook()
        self._lock = threading.RLock()

    def find(self, key: ShapeKey, fuse: bool, taped: Taped, but: Sequence[Take] = ()) -> Take | None:
        """Returns the take that fits this call, or None. but: takes that turned out not to fit."""
        with self._lock:
            takes = self._takes.get((key, fuse), [])
            for take in takes[:]:
                if take.structure != taped.structure:
                    takes.remove(take)  # the model is another one now
                elif take not in but and not self._differs(take, taped):
                    if not take.lacks_rest(self._takes.get((take.rest, fuse))):
                        self._takes.move_to_end((key, fuse))
                        take.used = True
                        return take
                    takes.remove(take)
            return self._of_blocks(key, fuse, taped, taped.unknown) if taped.unknown else None

    def _differs(self, take: Take, taped: Taped) -> str:
        """What a call would read that the take has read otherwise; "" if it fits."""
        if take.number == NEVER and take.among != self.patches.among(taped.options):
            return "patches"
        if take.code:
            changed = taped.looks.changed((code for _, code in taped.foreign), take.code, taped.module)
            if changed is not None:
                return taped.foreign[changed][0]
        return take.guards.differs(taped.options, taped.module, looks=taped.looks)

    def in_vain(self, key: ShapeKey, fuse: bool, taped: Taped) -> str:
        """Says why another recording of this size would be of no use; "" if it may be."""
        with self._lock:
            among = self.patches.among(taped.options)
            last = [take for take in self._takes.get((key, fuse), []) if take.among == among][-MAX_IN_VAIN:]
            if len(last) < MAX_IN_VAIN or any(take.used for take in last):
                return ""
            option = self._differs(last[-1], taped)
            place = last[-1].guards.changed_state(taped.options, taped.module, taped.looks)
            if place is not None:  # what a patch reads differs in each call: from now on it is called
                self.patches.live(code_of(at(taped.options, place)))
                return ""
            if option not in taped.options and option in dict(taped.foreign):
                reason = say("foreign_state", name=option)
            else:
                reason = say("option_differs", option=repr(option))
            self._of_blocks(key, fuse, taped, reason)
            return reason

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
        """(ComfyUI's own result, the new take, its tape). Errors are those of ComfyUI's own forward.

        turned: see ``Recorder``. short: see ``BlockCopies``; a take without a tape is then not kept.
        """
        recorder = Recorder(list(inputs.values()), taped.module, key.device, turned)
        recorder.lean, recorder.short = taped.lean, short
        reads = Reads(recorder.add_input)
        noted = NotedOptions(taped.options, reads)
        taped.prepare(noted, recorder)
        patches = Patches(noted, recorder, self.patches)
        clock, watched = Clock(key.device), Watched(taped.foreign, recorder)
        copies = BlockCopies(recorder, self._blocks, taped.places, short)
        calls = BlockCalls(recorder) if taped.skipping is not None else None

        def forward() -> Any:
            in_blocks = _own if taped.lean or self._one_by_one == taped.structure else copies.forward
            if in_blocks is _own and calls is None:
                return taped.forward(noted)
            recorder.guarded(lambda: self._blocks.look(taped.module, taped.structure))
            with self._blocks.ours(taped.module, in_blocks if calls is None else calls.noting(in_blocks)):
                return taped.forward(noted)

        out, tape = record(lambda: clock.run(forward), recorder)
        recorder.guarded(patches.finish)
        changed = taped.changed()
        reason = recorder.refusal or (say("changes_itself", change=changed) if changed else "")
        kept, again = watched.kept(taped.options), watched.again or patches.again
        if kept and not reason:
            reason = say("foreign_state", name=kept)
        guards = Guards(reads)
        if not reason and (option := guards.changed(taped.options)):  # a cache, say, which a replay would not fill
            reason = say("option_written", option=repr(option))
        with self._lock:
            self._count += 1
            take = Take(guards, taped.structure, self._count, reason=reason, among=self.patches.among(taped.options))
            take.in_blocks = bool(reason) and not changed and not recorder.keeps
            take.twice = take.in_blocks and reason.startswith(HARMLESS) and not (kept or taped.calls_others)
            if reason.startswith(FETCHED):  # ComfyUI fetches weights ahead of the blocks, into buffers of its own
                take.reason = low_vram(taped.module, key.device) or reason
            take.code, take.held, take.short = () if reason else watched.states, watched.held, short
            take.live, take.holds = [*patches.calls, *recorder.played], patches.holds
            take.called = patches.shown() or (say("attention_called") if recorder.played else "")
            take.clock, take.copies, take.left_out = None if short else clock, copies.count, copies.left_out
            take.calls = calls.calls if calls is not None and tape is not None else []
            take.again = again or bool(changed and taped.skipping)
            take.reason = take.reason or (say("patch_again") if again else "")
            if again or (short and reason):
                return out, take, None
            if reason and copies.count:  # perhaps that is why
                self._one_by_one, take.again = taped.structure, taped.skipping is not None and not take.twice
                return out, take, None
            if recorder.keeps and self._kept.get((key, fuse)) != taped.run:  # perhaps it has that tensor from now on
                self._kept[key, fuse], take.again = taped.run, True
                return out, take, None
            self.keep(key, fuse, take)
        return out, take, None if reason else tape

    def like(self, whole: Take) -> Take:
        """A new take of what ``whole`` recorded. It is not found until it is kept."""
        with self._lock:
            self._count += 1
            take = Take(whole.guards, whole.structure, self._count, called=whole.called)
            take.weights, take.live, take.holds, take.held = whole.weights, whole.live, whole.holds, whole.held
        return take

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

    def drop(self, take: Take) -> None:
        """Forgets one take."""
        with self._lock:
            for takes in self._takes.values():
                if take in takes:
                    takes.remove(take)

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


def named_features(features: Sequence[Tensor]) -> dict[str, Tensor]:
    """The inputs of a skipped step besides the call's."""
    return {f"feature.{place}": tensor for place, tensor in enumerate(features)}


def _own(path: str, block: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """In place of a block's forward: that forward."""
    return own(*args, **kwargs)


def obstacle(tape: Tape, model: nn.Module | None = None) -> str:
    """Says why a tape may not be replayed; "" if it may. model: its model, unless the tape is of a single block."""
    for value in tape.leaves():
        if value.device != tape.device and not (value.is_constant and not value.shape):
            return (low_vram(model, tape.device) if model is not None else "") or say("weights_elsewhere")
    return ""


def bound(take: Take, module: nn.Module, weights: int) -> Program:
    """The take's program on the weights of ``module``. Raises ``NotBound``."""
    if take.weights != weights or not take.program.tighten():
        take.program.bind(module)
        take.weights = weights
    return take.program
