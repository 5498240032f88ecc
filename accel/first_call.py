"""The first call of a size: it is recorded, and its program is made, run and checked.

The recorded forward is ComfyUI's own. Its program runs at once and is compared with it, so the check costs no extra
forward, and the first call returns what later calls will return. Where a plan was right at other sizes, blocks that are
alike need not run for the recording, and each kernel is checked by itself (``tape.trust``).
"""

import logging
from collections.abc import Callable
from traceback import format_exception
from typing import Any

import torch

from .attempt import attempt, named
from .call import Call, Settings
from .capture import collector_off
from .clock import timed
from .errors import AnyShapeError, is_out_of_memory, let_go
from .halves import Halves
from .maker import Maker
from .outputs import Output, empty_like, flat, odd_form, tensors_of
from .own_result import Own
from .preparing import preparing
from .reasons import say
from .stats import ModelStats, ShapeStats
from .take import NONE, FullStep, Take, bound, ran
from .take_graphs import NO_GRAPHS, TakeGraphs
from .tape import kernel_check
from .tape.binding import NotBound
from .tape.cost import waits_for_host
from .tape.this_forward import Forward
from .tape.values import Tape, Weight
from .tapes import Tapes, obstacle

log = logging.getLogger(__name__)

LONG_MS = 250.0  # a forward that takes longer on the GPU leaves much memory in its graph's pool
HOST_SHARE = 0.5  # of the GPU's time: if launching takes less, it is not what a forward waits for


class FirstCalls:
    """Those of one model. uses_graphs: see ``TapeTier``.

    in_blocks: what runs a call whose whole forward cannot be recorded, with its take and whether operations fuse.
    """

    def __init__(
        self, stats: ModelStats, tapes: Tapes, graphs: TakeGraphs, maker: Maker,
        in_blocks: Callable[[Call, Settings, ShapeStats, Take, bool], Any],
        passthrough: tuple[type[BaseException], ...], uses_graphs: bool,
    ) -> None:  # fmt: skip
        self.stats, self._tapes, self._graphs, self._maker = stats, tapes, graphs, maker
        self._in_blocks, self._passthrough, self._uses_graphs = in_blocks, passthrough, uses_graphs
        self._turned: dict[int, frozenset[Weight]] = {}  # what lies channels last in programs, by the model's structure
        self._halves = Halves(stats, tapes, passthrough, maker.made, maker.count)

    def run(self, call: Call, settings: Settings, shape: ShapeStats, fuse: bool, forward: Forward) -> Any:
        """ComfyUI's result for a call that no recording fits. It is recorded, and so is why it cannot be."""
        shape.note = ""  # of an earlier recording
        with preparing(self.stats.name, shape.size), collector_off():  # so many new objects would set it off
            return self._recorded(call, settings, shape, fuse, forward)

    def _recorded(self, call: Call, settings: Settings, shape: ShapeStats, fuse: bool, forward: Forward) -> Any:
        # The library of convolutions plans them once for each layout of the weights, which takes longer than they do.
        lie_so = fuse and not (call.taped.lean or call.taped.stream is not None)
        turned = self._turned.get(call.taped.structure, NONE) if lie_so else NONE
        call = call.laid_out(turned)
        recorded, take, tape = self._short(call, settings, fuse, turned) or self._tapes.record(
            call.tape_key, fuse, call.taped, call.inputs, turned
        )
        own = Own(call, take, recorded)
        forward.playing = True  # patches were called in this forward, so what runs from here on must not call them
        if why := call.taped.hold():  # weights went in mid-forward, so nothing that it said of them counts
            self._tapes.drop(take)
            self.stats.note(shape, "eager", why)
            return own() if call.taped.skipping is None else FullStep(own(), None)
        if tape is not None:
            take.reason = obstacle(tape, call.taped.module) or odd_form(recorded)
            tape.resident = fuse and self._graphs.may_stay(call, settings, tape)
            take.in_blocks = bool(take.reason)
            take.twice = take.in_blocks and not take.live
            if take.live and call.taped.skipping is None and waits_for_host(tape):
                take.needs_graph = settings.graph_budget_mb
                if not (self._uses_graphs and settings.graph_budget_mb):
                    take.reason = take.reason or say("patches_slower", why=NO_GRAPHS)
        if take.holds and call.taped.stream is not None:  # what patches gave is kept, and would push weights out
            take.reason = take.reason or call.taped.stream.end()
        if take.again:
            # each run of one seed is to skip the same steps, so the first one needs features, too
            if take.afresh and (again := call.afresh()) is not None:
                return self._recorded(again, settings, shape, fuse, forward)
            shape.state, shape.reason = "eager", take.reason
            return own() if call.taped.skipping is None else FullStep(own(), None)
        if take.reason:
            take.calls, take.live = [], []
            # once more, as later calls will run: the same seed, the same picture, and the same features
            if take.twice and (fuse or call.taped.skipping is not None):
                return self._in_blocks(call, settings, shape, take, fuse)
            self.stats.note(shape, "eager", take.reason)
            return own()
        operations, first, known = len(tape.operations), self._maker.is_first(call, fuse, take), {*self._maker.begun}
        take.form = type(recorded) if isinstance(recorded, (list, tuple)) else lambda out: tensors_of(out)[0]
        halves = self._halves.cut(call, take, tape) if call.taped.skipping is not None else None
        try:
            out, _ = attempt(
                lambda: self._programmed(call, settings, shape, take, tape, own, fuse),
                lambda error: self._failed(take, shape, error),
                self._passthrough,
            )
        except BaseException:  # the user's interrupt: the next call begins again
            self._tapes.drop(take)
            self._maker.begun = known
            raise
        if halves is not None and out is not None:
            self._halves.finish(call, settings, take, halves, out, fuse, first)
        if take.clock is not None:
            if not turned:  # eager has other convolutions
                shape.eager.note(take.clock.eager_ms(operations))
            if take.program is not None:
                self._maker.trust(call, settings, take.program, take.clock.is_long(LONG_MS))
            take.clock = None
        for each in take.live:
            each.recorded = None
        tape.dissolve()
        if take.program is not None:
            take.program.settled()
            take.like = None if out is None else empty_like(out, "meta")
            if call.taped.stream is None:
                self._turned = {call.taped.structure: take.program.permuted}
        return own() if out is None else take.result(out)

    def _short(
        self, call: Call, settings: Settings, fuse: bool, turned: frozenset[Weight]
    ) -> tuple[Any, Take, Tape] | None:
        """A short recording; None where there is to be a whole one."""
        if not (fuse and self._maker.may_be_short(call, settings)):
            return None
        found, _ = attempt(
            lambda: self._tapes.record(call.tape_key, fuse, call.taped, call.inputs, turned, short=True),
            _astray,
            self._passthrough,
        )
        failed = found is None or found[2] is None
        if failed or not found[1].left_out:  # where nothing can be left out it spares nothing
            self._maker.needs_whole(call)
        return None if failed else found

    def _programmed(
        self, call: Call, settings: Settings, shape: ShapeStats, take: Take, tape: Tape, own: Own, fuse: bool
    ) -> Output:
        """The result of the new program, checked."""
        device, first = call.key.device, self._maker.is_first(call, fuse, take)
        take.program = program = self._maker.made(tape, fuse, call)
        self._maker.count(program, first, call, take)
        inputs = take.inputs(call.inputs, call.taped.options)
        if settings.verify and take.short and not self._maker.is_trusted(call, settings, program):
            own.whole()
        call = call.laid_out(program.permuted)
        bound(take, call.taped, call.weights)
        if device.type != "cuda" and not (first or take.features or take.short):  # as in the first size: compared
            self._graphs.settle(call, settings, shape, take, inputs, None)
            return flat(own.like)

        def checked(out: Output) -> Output:
            if not settings.verify:
                return out
            given = list(inputs.values())
            if take.short and kernel_check.are_right(tape, program, given, tensors_of(out)):
                return out
            return self._maker.checked(call, take, tape, out, own.whole(), given)

        graphic = device.type == "cuda" and self._uses_graphs and not program.fetches
        may = graphic and settings.graph_budget_mb and not call.taped.no_graph()
        if may and not (take.features or self._is_long(call, take)):
            out = self._graphs.first(call, settings, shape, take, inputs, flat(own.like), checked)
            if out is not None:
                return out
        try:
            out, host, elapsed = timed(lambda: ran(program, call.taped, inputs, take.others), device)
        except NotBound as error:  # a step reads a weight that another one fetches, say
            raise AnyShapeError(call.taped.stream.end()) from error
        out = checked(out)
        take.graph = graphic and call.taped.stream is None and (elapsed < LONG_MS or host > HOST_SHARE * elapsed)
        if graphic and not take.graph and call.taped.stream is None:
            take.note = say("gpu_limit", elapsed=f"{elapsed:.0f}", host=f"{host:.0f}")
        self._graphs.settle(call, settings, shape, take, inputs, out)
        return out

    def _is_long(self, call: Call, take: Take) -> bool:
        """Whether the forward takes the GPU long, or may: a short recording does not show it."""
        if take.clock is None:
            return not self._maker.is_brief(call, take.program)
        return take.clock.is_long(LONG_MS)

    def _failed(self, take: Take, shape: ShapeStats, error: Exception) -> str:
        """What goes wrong with a new program costs nothing: ComfyUI's own result is there."""
        take.program = None
        if is_out_of_memory(error):
            let_go(error)
            torch.cuda.empty_cache()
            take.reason = say("no_memory")
        else:
            take.reason = str(error) if isinstance(error, AnyShapeError) else say("tape_failed", error=named(error))
            log.warning("AnyShape: %s: %s\n%s", self.stats.name, take.reason, "".join(format_exception(error)))
        self.stats.note(shape, "eager", take.reason)
        return take.reason


def _astray(error: Exception) -> str:
    """Void numbers may have led a forward there. The whole one, which comes next, says whether the call is wrong."""
    let_go(error)
    return named(error)
