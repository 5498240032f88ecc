"""Runs a call on the tape: replay a graph, run a program, or record.

The first call of a size is another file's (``first_call``).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import devices, kernels
from .block_tier import BlockTier
from .call import Call, Settings
from .errors import is_out_of_memory, let_go
from .first_call import FirstCalls
from .maker import Maker
from .outputs import Output
from .reasons import say
from .stats import STATS, ModelStats, ShapeStats
from .take import FullStep, Take, bound, ran
from .take_graphs import NO_GRAPHS, TakeGraphs
from .tape import called_patches, this_forward
from .tape.binding import NotBound
from .tape.guards import at
from .tape.patch_book import code_of
from .tape.this_forward import Forward
from .tapes import Tapes

MAX_FORMS = 4  # recordings of one size for patches that give results of several forms
GONE = say("skipped_gone")


class TapeTier:
    """Holds the programs of one model, and decides which of them runs.

    owner: stands for the model among graphs. uses_graphs: False where they would only take memory.
    """

    def __init__(
        self, stats: ModelStats, owner: int, passthrough: tuple[type[BaseException], ...], uses_graphs: bool = True
    ) -> None:
        self.stats = stats
        self._tapes, self._graphs = Tapes(), TakeGraphs(stats, owner)
        self._maker = Maker(stats, self._tapes)
        self._told = False  # why nothing is fused
        self._blocks = BlockTier(
            stats, passthrough, lambda tape, call: self._maker.made(tape, True, call), self._maker.count,
            self._tapes.patches,
        )  # fmt: skip
        self._first = FirstCalls(
            stats, self._tapes, self._graphs, self._maker, self._unrecorded, passthrough, uses_graphs
        )

    def run(self, call: Call, settings: Settings, shape: ShapeStats) -> Any:
        """Returns ComfyUI's result for this call, from a graph, a program, or ComfyUI's own forward."""
        tried: list[Take] = []
        with this_forward.forward(call.taped.options) as forward:
            while True:
                try:
                    return self._run(call, settings, shape, forward, tried)
                except called_patches.FormChanged as error:
                    given = forward.broken_off()
                    if given is None and len(tried) < MAX_FORMS:
                        continue  # it was in vain, and changed nothing: another recording may fit
                    self._tapes.misfit(tried[-1], error, call.taped.options)
                    self.stats.note(shape, "eager", say("patch_form", patch=error.name))
                    return _eager(call, given)

    def _run(self, call: Call, settings: Settings, shape: ShapeStats, forward: Forward, tried: list[Take]) -> Any:
        """As ``run``. Raises ``FormChanged``, with the take at the end of ``tried``."""
        fuse = settings.mode == "auto" and self._can_fuse(call.key.device)
        key, taped = call.tape_key, call.taped
        take = self._tapes.find(key, fuse, taped, tried)
        if take is None:
            self._graphs.drop(self._tapes.over())
            if reason := taped.leaves_out and GONE or self._tapes.in_vain(key, fuse, taped):
                self.stats.note(shape, "eager", reason)
                return call.eager()
            take = self._tapes.heir(key, fuse, taped, tried)
        if take is None:
            out = self._first.run(call, settings, shape, fuse, forward)
            if tried and (new := self._tapes.find(key, fuse, taped, tried)) is not None:
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
            place.put(taped.options)
        call = call.laid_out(take.program.permuted)
        inputs = take.inputs(call.inputs, taped.options)
        if take.live:
            tried.append(take)
            forward.begin(take.holds, call.key.device, lambda patch: taped.looks.at([patch], taped.module)[0])
        out = self._graphs.replay(call, take, inputs) if take.graph and settings.graph_budget_mb else None
        if replayed := out is not None:
            shape.state, shape.reason, shape.note = "graph", "", take.called
            shape.replays += 1
        else:
            try:
                bound(take, taped, call.weights)
            except NotBound:  # other weights altogether
                self._tapes.forget(take.program)
                return self._run(call, settings, shape, forward, tried)
            out = self._graphs.again(call, settings, shape, take, inputs)
            replayed = out is not None
            out = out if replayed else self._ran(call, shape, take, inputs)
            if out is None:
                return _eager(call, forward.broken_off())
        place = take.guards.changed_state(taped.options, taped.module, taped.looks) if take.holds else None
        if place is not None:  # a patch that is called has changed what one that is written down reads
            raise called_patches.FormChanged(code_of(at(taped.options, place)))
        if take.live and len(tried) > 1:
            self._tapes.first(take)
        if not replayed:
            self._graphs.settle(call, settings, shape, take, inputs, out)
        return take.result(out)

    def _ran(self, call: Call, shape: ShapeStats, take: Take, inputs: dict[str, Tensor]) -> Output | None:
        """What the program gives; None where its steps cannot fetch their weights, so that ComfyUI's forward does."""
        try:
            return ran(take.program, call.taped, inputs, take.others)
        except Exception as error:
            if call.taped.stream is None or not (isinstance(error, NotBound) or is_out_of_memory(error)):
                raise
            let_go(error)
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


def _eager(call: Call, given: Sequence[tuple[tuple, Any]] | None) -> Any:
    """ComfyUI's own forward. given: what patches gave in one that was broken off, which they may keep."""
    if not given or call.taped.leaves_out:
        return call.eager()
    return call.taped.forward(called_patches.replaying(call.taped.options, given))


def _apart(call: Call, take: Take, out: Any) -> Any:
    return FullStep(out, None, apart=take.reason) if call.taped.skipping is not None and take.twice else out


def can_fuse(device: torch.device) -> bool:
    """Whether generated kernels run on this device."""
    return devices.is_nvidia(device) and kernels.available(device)
