"""Runs a call on the tape: replay a graph, run a program, or record.

The first call of a size is ComfyUI's own forward, recorded. Its program runs at once and is compared with it, so the
check costs no extra forward, and the first call returns what later calls will return. Where a plan was right at other
sizes, blocks that are alike need not run for the recording, and each kernel is checked by itself (``tape.trust``).
"""

import logging
from traceback import format_exception
from typing import Any

import torch
from torch import Tensor

from . import devices, kernels
from .attempt import attempt, named
from .block_tier import BlockTier
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
from .stats import STATS, ModelStats, ShapeStats
from .take import NONE, FullStep, Take, bound, ran
from .take_graphs import NO_GRAPHS, TakeGraphs
from .tape import called_patches, kernel_check, this_forward
from .tape.binding import NotBound
from .tape.cost import waits_for_host
from .tape.guards import at
from .tape.patch_book import code_of
from .tape.this_forward import Forward
from .tape.values import Tape, Weight
from .tapes import Tapes, obstacle

log = logging.getLogger(__name__)

LONG_MS = 250.0  # a forward that takes longer on the GPU leaves much memory in its graph's pool
MAX_FORMS = 4  # recordings of one size for patches that give results of several forms
HOST_SHARE = 0.5  # of the GPU's time: if launching takes less, it is not what a forward waits for
GONE = say("skipped_gone")


class TapeTier:
    """Holds the programs of one model, and decides which of them runs.

    owner: stands for the model among graphs. uses_graphs: False where they would only take memory.
    """

    def __init__(
        self, stats: ModelStats, owner: int, passthrough: tuple[type[BaseException], ...], uses_graphs: bool = True
    ) -> None:
        self.stats, self._passthrough, self._uses_graphs = stats, passthrough, uses_graphs
        self._tapes, self._graphs = Tapes(), TakeGraphs(stats, owner)
        self._maker = Maker(stats, self._tapes)
        self._turned: dict[int, frozenset[Weight]] = {}  # what lies channels last in programs, by the model's structure
        self._told = False  # why nothing is fused
        self._blocks = BlockTier(
            stats, passthrough, lambda tape, call: self._maker.made(tape, True, call), self._maker.count,
            self._tapes.patches,
        )  # fmt: skip
        self._halves = Halves(stats, self._tapes, passthrough, self._maker.made, self._maker.count)

    def run(self, call: Call, settings: Settings, shape: ShapeStats) -> Any:
        """Returns ComfyUI's result for this call, from a graph, a program, or ComfyUI's own forward."""
        tried: list[Take] = []
        with this_forward.forward(call.taped.options) as forward:
            while True:
                try:
                    return self._run(call, settings, shape, forward, tried)
                except called_patches.FormChanged as error:
                    given = tried[-1].not_again(error, forward, call.taped, call.key.device)
                    if given is None and len(tried) < MAX_FORMS:
                        continue  # it was in vain, and changed nothing: another recording may fit
                    self._tapes.misfit(tried[-1], error, call.taped.options)
                    self.stats.note(shape, "eager", say("patch_form", patch=error.name))
                    if not given or call.taped.leaves_out:
                        return call.eager()
                    return call.taped.forward(called_patches.replaying(call.taped.options, given))

    def _run(self, call: Call, settings: Settings, shape: ShapeStats, forward: Forward, tried: list[Take]) -> Any:
        """As ``run``. Raises ``FormChanged``, with the take at the end of ``tried``."""
        fuse = settings.mode == "auto" and self._can_fuse(call.key.device)
        key = call.tape_key
        take = self._tapes.find(key, fuse, call.taped, tried)
        if take is None:
            self._graphs.drop(self._tapes.over())
            if reason := call.taped.leaves_out and GONE or self._tapes.in_vain(key, fuse, call.taped):
                self.stats.note(shape, "eager", reason)
                return call.eager()
            take = self._tapes.heir(key, fuse, call.taped, tried)
        if take is None:
            out = self._first(call, settings, shape, fuse, forward)
            if tried and (new := self._tapes.find(key, fuse, call.taped, tried)) is not None:
                self._tapes.first(new)
            return out
        if take.program is None:
            if take.needs_graph in (None, settings.graph_budget_mb):
                return self._unrecorded(call, settings, shape, take, fuse)
            self._tapes.drop(take)  # with another budget it may have one
            return self._run(call, settings, shape, forward, tried)
        if take.needs_graph and not settings.graph_budget_mb:
            self.stats.note(shape, "eager", say("patches_slower", why=NO_GRAPHS))
            return call.eager()
        self._tapes.patches.went_well(take.guards.writes_down)
        for place in take.held:
            place.put(call.taped.options)
        call = call.laid_out(take.program.permuted)
        inputs = take.inputs(call.inputs, call.taped.options)
        if take.live:
            tried.append(take)
            forward.begin(take.holds, call.key.device)
        out = self._graphs.replay(call, take, inputs) if take.graph and settings.graph_budget_mb else None
        if replayed := out is not None:
            shape.state, shape.reason, shape.note = "graph", "", take.called
            shape.replays += 1
        else:
            try:
                bound(take, call.taped, call.weights)
            except NotBound:  # other weights altogether
                self._tapes.forget(take.program)
                return self._run(call, settings, shape, forward, tried)
            out = self._graphs.again(call, settings, shape, take, inputs)
            replayed = out is not None
            out = out if replayed else self._ran(call, shape, take, inputs, forward)
            if out is None:
                return call.eager()
        taped = call.taped
        place = take.guards.changed_state(taped.options, taped.module, taped.looks) if take.holds else None
        if place is not None:  # a patch that is called has changed what one that is written down reads
            raise called_patches.FormChanged(code_of(at(call.taped.options, place)))
        if take.live and len(tried) > 1:
            self._tapes.first(take)
        if not replayed:
            self._graphs.settle(call, settings, shape, take, inputs, out)
        return take.result(out)

    def _ran(
        self, call: Call, shape: ShapeStats, take: Take, inputs: dict[str, Tensor], forward: Forward
    ) -> Output | None:  # fmt: skip
        """What the program gives; None where its steps cannot fetch their weights, so that ComfyUI's forward does."""
        try:
            return ran(take.program, call.taped, inputs, take.others)
        except Exception as error:
            if call.taped.stream is None or not (isinstance(error, NotBound) or is_out_of_memory(error)):
                raise
            let_go(error)
        if forward.drawn is not None:  # patches that were called keep nothing, and draw the same numbers again
            forward.drawn.restore()
        self.stats.note(shape, "eager", call.taped.stream.end())
        return None

    def _can_fuse(self, device: torch.device) -> bool:
        """``can_fuse``; where an NVIDIA GPU cannot, the reason is counted once."""
        if can_fuse(device):
            return True
        if devices.is_nvidia(device) and not self._told:
            self._told = True
            STATS.fallback(self.stats.name, f"operations run unfused: {kernels.why_not(device)}")
        return False

    def loosen(self) -> None:
        """Holds weights no longer than their model does."""
        self._tapes.loosen()
        self._blocks.loosen()

    def release(self) -> None:
        """Releases weights, because the model was unloaded."""
        self._tapes.release()
        self._blocks.release()

    def _unrecorded(self, call: Call, settings: Settings, shape: ShapeStats, take: Take, fuse: bool) -> Any:
        """ComfyUI's own forward, with programs for its blocks if it is only the whole that cannot be recorded."""
        if not (fuse and take.in_blocks):
            self.stats.note(shape, "eager", take.reason)
            return _apart(call, take, call.own(take.twice))
        with self._blocks.visit(call, settings, self._maker.is_first(call, fuse), take.reason) as visit:
            out = call.own(take.twice)
        state, reason, note = visit.told(take.reason)
        shape.note = note or shape.note
        self.stats.note(shape, state, reason)
        return _apart(call, take, out)

    # The first call of a size ---------------------------------------------------------------------------------------

    def _first(self, call: Call, settings: Settings, shape: ShapeStats, fuse: bool, forward: Forward) -> Any:
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
            shape.state, shape.reason = "eager", take.reason
            return own() if call.taped.skipping is None else FullStep(own(), None)
        if take.reason:
            take.calls, take.live = [], []
            # once more, as later calls will run: the same seed, the same picture, and the same features
            if take.twice and (fuse or call.taped.skipping is not None):
                return self._unrecorded(call, settings, shape, take, fuse)
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


def _apart(call: Call, take: Take, out: Any) -> Any:
    return FullStep(out, None, apart=take.reason) if call.taped.skipping is not None and take.twice else out


def can_fuse(device: torch.device) -> bool:
    """Whether generated kernels run on this device."""
    return devices.is_nvidia(device) and kernels.available(device)
