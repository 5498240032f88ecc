"""Makes and counts the programs of one model, and checks them against the recorded forward."""

from typing import Any

from torch import Tensor

from . import sensitivity, verify
from .artifacts import KEEPER
from .call import Call, Settings
from .errors import AnyShapeError, KernelFailed, WrongResult
from .outputs import Output, flat
from .reasons import say
from .stats import STATS, ModelStats
from .take import Take
from .tape import diagnose, rules
from .tape.layout import outermost_first
from .tape.program import Program
from .tape.reuse import Outlines
from .tape.rows import MAX_JOINED
from .tape.values import Tape
from .tapes import Tapes

NOT_COMPARED = say("not_finite")


class NotCompared(AnyShapeError):
    """Raised where a program's first result could not be checked; it is then not used."""


class Maker:
    """Makes the programs. begun: kinds of calls whose first size is done, with kernels or without."""

    def __init__(self, stats: ModelStats, tapes: Tapes) -> None:
        self.stats, self._tapes, self._outlines = stats, tapes, Outlines()
        self.begun: set[tuple] = set()
        self._whole: int | None = None  # a structure of the model that is not worth a short recording, as it turned out
        self._rules = True  # whether tapes are rewritten by rules
        self._noise = verify.NOTHING  # how far rounding carries the model, if that was measured
        self._told = ""  # and what the user reads of it

    def is_first(self, call: Call, fuse: bool, take: Take | None = None) -> bool:
        """Whether no size of this kind has had its first forward: residuals, say, or code of others, need kernels.

        take: the recording. Each part of a range of noise levels is another kind.
        """
        return (*self._kind(call), _decided(take), fuse) not in self.begun

    def made(self, tape: Tape, fuse: bool, call: Call) -> Program:
        """Makes the program of ``tape``, without kernels where they cannot be compiled here."""
        if not fuse:
            return Program(tape, fuse=False)
        KEEPER.watch(call.key.device, _functions)
        if self._rules:
            self.stats.inexact = sorted({*self.stats.inexact, *rules.apply(tape)})
        try:
            return Program(tape, fuse=True, outlines=self._outlines)
        except KernelFailed as error:
            STATS.fallback(self.stats.name, f"{error}: operations run unfused")
            return Program(tape, fuse=False)

    def _kind(self, call: Call) -> tuple:
        """What calls must have in common for one to compile nothing after the other: all but sizes.

        Other patches, other code, another depth of Skip Blocks, the second piece of a video, or one piece that is left
        of pairs make other operations, which need other kernels. So does an input of one row that several share (a
        ControlNet's hint), or one that lies otherwise in memory (its residuals, channels first or last).
        """
        taped, skipping = call.taped, call.taped.skipping
        code = tuple([name for name, _ in taped.foreign]), taped.structure
        depth = (skipping.depth,) if skipping is not None else ()
        depth += ("fetched",) if taped.stream is not None else ()
        rows = call.key.inputs[0].shape[:1]
        inputs = [
            (name, tensor.shape[:1] == (1,) != rows, outermost_first(tensor.stride()))
            for name, tensor in call.inputs.items()
        ]
        # More pieces than one kernel joins are a join by themselves. If they are made two at a time, one may be left.
        pieces = min(call.pieces, MAX_JOINED + 1), call.pieces % 2
        return call.key.inputs[0].dtype, self._tapes.patches.among(taped.options), code, depth, tuple(inputs), pieces

    def count(self, program: Program, first: bool, call: Call, take: Take | None = None) -> None:
        """Counts what was compiled for ``program``. first: whether compiling was expected. take: its recording."""
        made, seconds = program.report.compiled, program.report.compile_seconds
        again = 0 if first else made
        self.stats.kernels += made
        self.stats.compile_seconds += seconds
        self.stats.recompiles += again
        STATS.totals.compiled(self.stats.kind, made, again, seconds)
        self.begun.add((*self._kind(call), _decided(take), program.report.kernels > 0))
        if made:
            KEEPER.save_soon()

    def may_be_short(self, call: Call, settings: Settings) -> bool:
        """Whether a short recording is enough for this call: its plan may be one that was right at other sizes."""
        taped = call.taped
        others = taped.calls_others or taped.foreign
        if self.is_first(call, True) or taped.lean or others or self._whole == taped.structure:
            return False
        return self._outlines.are_trusted(*_of(call, settings))

    def needs_whole(self, call: Call) -> None:
        """Has this model's forwards recorded whole from now on: a short one cannot be, or spares nothing."""
        self._whole = call.taped.structure

    def is_trusted(self, call: Call, settings: Settings, program: Program) -> bool:
        """Whether the plan of ``program`` was right at sizes like this call's."""
        return program.trust.covers(*_of(call, settings))

    def trust(self, call: Call, settings: Settings, program: Program, long: bool) -> None:
        """Notes that ``program`` gave what a whole forward did; long: that took the GPU long."""
        program.trust.add(*_of(call, settings), long)

    def is_brief(self, call: Call, program: Program) -> bool:
        """Whether forwards of this call's size are known not to take the GPU long."""
        return program.trust.is_brief(_elements(call))

    def checked(
        self, call: Call, take: Take, tape: Tape, out: Output, recorded: Output, inputs: list[Tensor]
    ) -> Output:
        """``out``, if it is ComfyUI's own result but for rounding; else that of a program without what is wrong.

        Where rounding alone makes another result of a model, each kernel must be right on eager's own inputs.
        """
        what = f"the tape at {call.width}x{call.height}"
        try:
            if self._agrees(what, call, take.own(out), recorded):
                return out
            raise NotCompared(NOT_COMPARED)
        except WrongResult as error:
            if call.taped.stream is not None:  # eager's own values of each kernel need weights that stay
                raise
            wrong = diagnose.wrong_kernels(tape, take.program, inputs, call.taped.module)
            if take.program.launches and not wrong and verify.is_noise(take.own(out), recorded, self._noise):
                self._tell()
                return out
            STATS.fallback(self.stats.name, str(error))
        self._outlines = Outlines()  # the next size is planned by itself
        for program in (Program(tape, fuse=True, wrong=wrong), Program(tape, fuse=False)):
            program.bind(call.taped.module)
            take.program, out = program, flat(program.run(inputs))
            try:
                verify.compare(what, take.own(out), recorded, self._noise)
                return out
            except WrongResult:
                continue
        if self._tapes.doubt(take):
            raise WrongResult(say("wrong_copies", what=what))
        if self._rules:  # they have changed the tape itself: the next call records it again, without them
            self._rules = False
            self._tapes.drop(take)
        raise WrongResult(say("wrong_unfused", what=what))

    def _agrees(self, what: str, call: Call, out: Output, recorded: Output) -> bool:
        """Whether rounding explains how ``out`` differs; False where nothing can be said. Raises ``WrongResult``.

        A model whose result is beyond the usual bounds is asked how far rounding carries it, once for each size.
        """
        try:
            return bool(verify.compare(what, out, recorded, self._noise))
        except WrongResult:
            noise = sensitivity.measured(call, recorded)
            if noise.whole <= self._noise.whole and noise.part <= self._noise.part:
                raise
            self._noise = noise
            found = bool(verify.compare(what, out, recorded, noise))
            self._tell()
            return found

    def _tell(self) -> None:
        """The user is told how far rounding carries the model."""
        before, self._told = self._told, say("amplifies", share=f"{self._noise.whole:.1%}")
        self.stats.inexact = sorted({*self.stats.inexact, self._told} - {before})


def _of(call: Call, settings: Settings) -> tuple[tuple[int, bool], tuple[int, ...]]:
    """What a plan's trust is about, and the sizes that it is asked about. Without ``verify`` nothing was compared."""
    return (call.taped.structure, settings.verify), _elements(call)


def _elements(call: Call) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in call.inputs.values())


def _functions() -> list[Any]:
    from .tape.kernels import functions

    return functions()


def _decided(take: Take | None) -> frozenset:
    return take.guards.decided if take is not None else frozenset()
