"""One recording of one size, what it is of, and what it gives."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from .clock import Clock
from .foreign import Held
from .key import ShapeKey
from .outputs import Output, flat
from .tape.binding import Bound
from .tape.called_patches import LiveCall, Played
from .tape.guards import Guards
from .tape.looks import Looks
from .tape.middle import BlockCall
from .tape.named_tensors import NO_OTHERS, OfPatch
from .tape.options import NotedOptions
from .tape.program import Program
from .tape.record import Recorder
from .tape.state import Glance
from .tape.values import Weight

NONE: frozenset = frozenset()


@dataclass(frozen=True)
class Skipping:
    """What a call of a run that skips blocks asks for: the whole forward, with the features of what may be left out.

    depth: how many blocks at either end always run; None: as many as are cheap. key: of the call that is given the
    features and leaves the blocks out. watched: ComfyUI's own forward, for one that is on no tape and may run twice: it
    gives features, too.
    """

    depth: int | None
    key: Callable[[Sequence[Tensor]], ShapeKey]
    watched: Callable[[], Any] | None = None


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


class Stream(Protocol):
    """The weights of a call, where each step of a program fetches its own (see ``tape.fetched``).

    why: what the user reads of it.
    """

    why: str

    def end(self) -> str:
        """From now on ComfyUI's own forwards fetch them, because something failed. What the user reads of that."""

    def bound(self, program: Program, others: Mapping[int, OfPatch]) -> Bound:
        """The program's values, for ``Program.run``. Raises ``NotBound``."""

    def in_forward(self, recorder: Recorder) -> AbstractContextManager[None]:
        """The body is ComfyUI's own forward, which ``recorder`` hears."""

    def of_block(self, path: str, block: nn.Module) -> "Stream":
        """Those of one block of the model."""


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
    altered: Callable[[], bool] = bool  # whether a patch that runs has changed what the model's code calls
    calls_others: bool = False  # it calls patches of other packs, which may count their calls
    foreign: Sequence[tuple[str, Any]] = ()  # other packs' code in the model, and where it is
    # a number for what lies in functions and methods that other packs put in the place of ComfyUI's, where blocks may
    # call them; None if that cannot be known
    content: Callable[[], int | None] = int
    named: Callable[[Glance], frozenset[str] | None] = lambda glance: None  # see ``options.Reads.forget``
    run: int = 0  # the number of the sampling run
    once: bool = False  # that run makes one step
    looks: Looks = field(default_factory=Looks)  # at other packs' code in that run
    unknown: str = ""  # why the whole is not recorded: an argument that no guard can compare; its blocks may be
    left: frozenset[str] = NONE  # the paths of blocks that may not be, either
    skipping: Skipping | None = None
    stream: "Stream | None" = None  # where its weights do not fit
    leaves_out: bool = False  # its program is made with that of the whole forward, and never by recording this call
    # has the weights stay where they are, until ``let_go`` or ComfyUI's own forward; why they are gone, or ""
    hold: Callable[[], str] = str
    let_go: Callable[[], None] = lambda: None
    no_graph: Callable[[], str] = str  # why there is no room for a graph, now
    rest: Callable[[ShapeKey, str], None] = lambda key, why: None  # such calls gain nothing, and why
    fetches: Callable[[nn.Module], bool] = lambda block: False  # whether its weights come from elsewhere at each call

    @property
    def meets_others(self) -> bool:
        """Whether other packs' code may run in it."""
        return self.calls_others or bool(self.foreign)


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
    heir: bool = False  # it was recorded with other patches of the same code
    run: int | None = None  # of the recording; where there is none: the one that it stands for, None: for all
    again: bool = False  # the reason is mended: the next call is recorded once more
    afresh: bool = False  # and this one may be
    among: frozenset = NONE  # the patches of other packs in its options
    live: list[LiveCall | Played] = field(default_factory=list)  # patches that are called at each replay
    holds: bool = False  # what those give is kept in a replay: they must not be called twice
    weights: int | None = None  # fingerprint of the weights that the program is bound to
    graph: bool = False  # whether a graph pays
    code: tuple = ()  # the state of other packs' code in the model, see ``tape.state``
    held: list[Held] = field(default_factory=list)  # where that code keeps the options of the latest forward
    others: Mapping[int, OfPatch] = field(default_factory=lambda: NO_OTHERS)  # see ``PartsByPath``
    like: Output | None = None  # what the program gives, as tensors on no device
    called: str = ""  # what of other packs is called between the pieces of its graph
    note: str = ""  # why it has no graph, where one does not pay
    needs_graph: int | None = None  # the budget in MB with which it must have one: without, eager is faster
    over: bool = False  # a patch's tensor is gone: it fits no call any more
    used: bool = False  # by a call after the one that was recorded
    clock: Clock | None = None  # of the whole forward, where one ran
    copies: int = 0  # blocks that were written down as copies of others
    left_out: int = 0  # of these, did not run
    short: bool = False  # its forward's result is void: blocks were left out, or it was broken off
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


def named_features(features: Sequence[Tensor]) -> dict[str, Tensor]:
    """The inputs of a skipped step besides the call's."""
    return {f"feature.{place}": tensor for place, tensor in enumerate(features)}


def ran(program: Program, taped: Taped, inputs: Mapping[str, Tensor], others: Mapping[int, OfPatch]) -> Output:
    """What a take's program gives on the weights that it is bound to, or fetches. Raises ``NotBound``.

    others: the take's.
    """
    fetched = None if taped.stream is None else taped.stream.bound(program, others)
    return flat(program.run(list(inputs.values()), fetched))


def bound(take: Take, taped: Taped, weights: int) -> Program:
    """The take's program on the model's weights, whose fingerprint that is. Raises ``NotBound``.

    As it is where it fetches them.
    """
    program, state = take.program, (taped.run, weights)
    if taped.stream is not None:
        return program
    if take.weights != weights or program.others is not take.others or not program.tighten():
        program.bind(taped.module, take.others, state)
        take.weights = weights
    program.renew(state)
    return program
