"""The two programs of a run that skips blocks, from one recording: the whole forward, and the one without its middle.

The first call of a size is a full step. Its tape is cut (``tape.cut``). The whole forward's program is checked as any
other. The other one is given the features that this one has just made, and must come to the same result.
"""

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from . import verify
from .attempt import attempt, named
from .call import Call, Settings
from .errors import AnyShapeError, WrongResult
from .outputs import Output
from .reasons import say
from .stats import STATS, ModelStats
from .take import Take, named_features, ran
from .tape.cut import Cut, cut
from .tape.middle import NotCut
from .tape.named_tensors import NO_OTHERS
from .tape.program import Program
from .tape.values import Tape
from .tapes import Tapes

log = logging.getLogger(__name__)


class Halves:
    """The second programs of one model. make, count: see ``BlockTier``."""

    def __init__(
        self, stats: ModelStats, tapes: Tapes, passthrough: tuple[type[BaseException], ...],
        make: Callable[[Tape, bool, Call], Program], count: Callable[[Program, bool, Call], None],
    ) -> None:  # fmt: skip
        self._stats, self._tapes, self._passthrough = stats, tapes, passthrough
        self._make, self._count = make, count

    def cut(self, call: Call, take: Take, tape: Tape) -> Cut | None:
        """Cuts the tape; None, and the take says why, where there is nothing to leave out."""
        calls, take.calls = take.calls, []
        rows = len(next(iter(call.inputs.values())))
        found, reason = attempt(
            lambda: cut(tape, calls, call.taped.skipping.depth, rows, len(call.inputs)),
            _why_whole,
            self._passthrough,
        )
        if found is None:
            take.why_whole = reason
            return None
        take.features, take.depth, take.share = found.features, found.depth, found.share
        return found

    def finish(
        self, call: Call, settings: Settings, take: Take, halves: Cut, out: Output, fuse: bool, first: bool
    ) -> None:
        """Makes the program of skipped steps. out: what the whole one gave. first: of all sizes."""
        features = tuple(out[-take.features :])
        _, reason = attempt(
            lambda: self._rest(call, settings, take, halves, features, take.own(out), fuse, first),
            self._failed,
            self._passthrough,
        )
        halves.skipped.dissolve()
        if reason:
            take.why_whole = say("no_middle", why=reason)

    def _rest(
        self, call: Call, settings: Settings, whole: Take, halves: Cut, features: tuple[Tensor, ...],
        result: Output, fuse: bool, first: bool,
    ) -> None:  # fmt: skip
        take, tape = self._tapes.like(whole), halves.skipped
        given = call.inputs | named_features(features)
        inputs = take.inputs(given, call.taped.options)
        program = self._make(tape, fuse, call)
        self._count(program, first, call)
        if settings.verify and not self._is_right(call, program, inputs, result):
            program = Program(tape, fuse=False)
            if not self._is_right(call, program, inputs, result):
                raise WrongResult(
                    "with features in place of the skipped blocks, the result differs from the full forward's"
                )
        if call.taped.stream is None:
            program.bind(call.taped.module)
        program.settled()
        take.program, take.form = program, whole.form
        take.graph = call.key.device.type == "cuda" and not program.fetches and call.taped.stream is None
        whole.rest = replace(call, key=call.taped.skipping.key(features)).tape_key
        self._tapes.keep(whole.rest, fuse, take)

    def _is_right(self, call: Call, program: Program, inputs: dict[str, Tensor], result: Output) -> bool:
        if call.taped.stream is None:
            program.bind(call.taped.module)
        out = ran(program, call.taped, inputs, NO_OTHERS)
        try:
            verify.compare("a skipped step", out, result)
            return True
        except WrongResult as error:
            STATS.fallback(self._stats.name, str(error))
            return False

    def _failed(self, error: Exception) -> str:
        if not isinstance(error, AnyShapeError):
            text = "".join(traceback.format_exception(error))
            log.warning("AnyShape: %s: the program of skipped steps failed\n%s", self._stats.name, text)
        return str(error) if isinstance(error, AnyShapeError) else f"its program failed, {named(error)}"


def _why_whole(error: Exception) -> str:
    return say("no_middle", why=error if isinstance(error, NotCut) else f"cutting failed, {named(error)}")
