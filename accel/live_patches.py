"""Runs programs that call patches of other packs, where they are faster than ComfyUI's own forward.

There is no graph around such a patch, so the host launches every step. Where the host is the limit that may take
longer than ComfyUI's forward. Both are timed, in turns, within the first calls of a recording.
"""

from typing import Any

from torch import Tensor

from .call import Call
from .clock import timed
from .outputs import flat
from .reasons import say
from .stats import ModelStats, ShapeStats
from .tape.called_patches import FormChanged, Forward
from .tape.options import at
from .tape.patches import code_of
from .tape.program import Program
from .tapes import NONE, Take, Tapes

TURNS = 2  # of each; the faster one counts, as something else may run on the machine


class Race:
    """The program of one take against ComfyUI's own forward: milliseconds of each."""

    def __init__(self) -> None:
        self.ours: list[float] = []
        self.eager: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether both have had their turns."""
        return len(self.eager) == TURNS

    @property
    def is_lost(self) -> bool:
        """Whether ComfyUI's own forward is faster."""
        return self.is_over and min(self.eager) < min(self.ours)


class LivePatches:
    """The calls of takes with patches that are called in each forward."""

    def __init__(self, stats: ModelStats, tapes: Tapes) -> None:
        self._stats, self._tapes = stats, tapes

    def run(
        self, call: Call, shape: ShapeStats, take: Take, program: Program, inputs: dict[str, Tensor], forward: Forward,
        tried: list[Take],
    ) -> Any:  # fmt: skip
        """ComfyUI's result. Raises ``FormChanged``, with the take at the end of ``tried``."""
        race = take.race = take.race or Race()
        shape.state, shape.reason = "tape", ""

        def replayed() -> Any:
            return take.result(self._replayed(call, take, program, inputs, forward, tried))

        if race.is_over or not _is_fair(call):
            return replayed()
        if len(race.ours) <= len(race.eager):
            turn, times = replayed, race.ours
        else:
            turn, times = call.eager, race.eager
            call.taped.lay_out(NONE, call.weights)
        out, _, elapsed = timed(turn, call.key.device)
        times.append(elapsed)
        return out

    def lost(self, call: Call, shape: ShapeStats, take: Take) -> Any:
        """ComfyUI's result, by its own forward, which is faster."""
        ours, eager = (f"{min(times):.0f}" for times in (take.race.ours, take.race.eager))
        shape.note = ""
        self._stats.note(shape, "eager", say("patches_slower", why=take.graph_obstacle, ours=ours, eager=eager))
        call.taped.lay_out(NONE, call.weights)
        return call.eager()

    def _replayed(
        self, call: Call, take: Take, program: Program, inputs: dict[str, Tensor], forward: Forward, tried: list[Take]
    ) -> Any:
        again = bool(tried)
        tried.append(take)
        forward.log = [] if take.holds else None
        out = flat(program.run(list(inputs.values())))
        place = take.guards.changed_state(call.taped.options, call.taped.module) if take.holds else None
        if place is not None:  # a patch that is called has changed what one that is written down reads
            raise FormChanged(code_of(at(call.taped.options, place)))
        if again:
            self._tapes.first(take)
        return out


def _is_fair(call: Call) -> bool:
    """Whether the two can be compared: not on a CPU, where they are the same, nor where blocks are skipped."""
    return call.key.device.type == "cuda" and call.taped.skipping is None and not call.taped.leaves_out
