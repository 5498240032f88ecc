"""One forward of ComfyUI's while it is recorded: what watches it, and the take that comes of it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from .block_calls import BlockCalls
from .block_copies import BlockCopies
from .block_forwards import Blocks, Ours, packs_layers
from .clock import Clock
from .foreign import Watched
from .key import ShapeKey
from .reasons import say
from .take import NONE, Take, Taped
from .tape.guards import Guards
from .tape.options import NotedOptions, Reads
from .tape.patch_book import PatchBook
from .tape.patches import Patches
from .tape.record import Recorder, record
from .tape.refusals import FETCHED, HARMLESS
from .tape.values import Tape, Weight
from .weights import low_vram


class Recorded:
    """A call whose forward is recorded, once: ``forward``, then ``take``.

    again: one more recording may go better. moves: the forward left something behind in the model. changed: what of
    the model is another than before. is_void: there is no result of the forward that could be used.
    """

    def __init__(
        self, key: ShapeKey, taped: Taped, inputs: Mapping[str, Tensor], blocks: Blocks, book: PatchBook,
        turned: frozenset[Weight] = NONE, short: bool = False, in_blocks: bool = False,
    ) -> None:  # fmt: skip
        """turned: see ``Recorder``. short: see ``BlockCopies``.

        in_blocks: if the whole cannot be recorded, the forward runs once more, on programs of its blocks. So it is
        broken off where that shows.
        """
        self.again, self.moves, self.changed, self.is_void = False, False, "", short
        self._taped, self._blocks, self._book = taped, blocks, book
        self._device = key.device
        self._recorder = recorder = Recorder(list(inputs.values()), taped.module, key.device, turned)
        recorder.lean, recorder.short = taped.lean, short
        self._reads = Reads(recorder.add_input)
        self._noted = NotedOptions(taped.options, self._reads)
        taped.prepare(self._noted, recorder)
        self._patches = Patches(self._noted, recorder, book)
        self._clock, self._watched = Clock(key.device), Watched(taped.foreign, recorder)
        self._copies = BlockCopies(recorder, blocks, taped.places, short, taped.altered)
        self._calls = BlockCalls(recorder) if taped.skipping is not None else None
        if in_blocks and not (short or taped.meets_others):  # code of others may count its calls
            recorder.refuse.breaks_off = self._breaks_off

    def forward(self, copying: bool) -> tuple[Any, Tape | None]:
        """(ComfyUI's own result, unless it ``is_void``; the tape). copying: blocks like an earlier one are copied.

        Errors are those of ComfyUI's own forward.
        """
        self._content = self._taped.content()

        def forward() -> Any:
            stream = self._taped.stream
            with stream.in_forward(self._recorder) if stream is not None else nullcontext():
                return self._clock.run(lambda: self._noted_forward(copying))

        try:
            out, self._tape = record(forward, self._recorder)
        finally:
            self._recorder.refuse.breaks_off = bool  # or each would hold the other
        if self._tape is not None:
            self._tape.streamed = self._taped.stream is not None
        self._recorder.guarded(self._patches.finish)
        return out, self._tape

    def _breaks_off(self) -> bool:
        """Whether the forward ends here: unless blocks that were taken for alike may be why it cannot be recorded."""
        self.is_void = not (self._copies.count or self._recorder.calls_packs)
        return self.is_void

    def _noted_forward(self, copying: bool) -> Any:
        """The forward, with its blocks watched or copied."""
        taped, blocks, recorder = self._taped, self._blocks, self._recorder
        in_blocks = self._copies.forward if copying and not taped.lean else _own
        if in_blocks is _own and self._calls is None:
            with self._layers(()):
                return taped.forward(self._noted)
        recorder.guarded(lambda: blocks.look(taped.module, taped.structure))
        with self._layers(blocks.paths):
            return self._in_blocks(in_blocks)

    def _layers(self, paths: Sequence[str]) -> AbstractContextManager[None]:
        """Within it, calls of other packs' layers may become steps. paths: of blocks, whose likeness is seen before."""
        module, likeness = self._taped.module, self._blocks.likeness
        if not self._taped.foreign:
            return nullcontext()
        return packs_layers(
            self._recorder, module, lambda: [likeness(path, module.get_submodule(path)) for path in paths]
        )

    def _in_blocks(self, in_blocks: Ours) -> Any:
        """The forward, with this in place of its blocks' own."""
        taped, blocks, recorder = self._taped, self._blocks, self._recorder
        if taped.meets_others:
            recorder.guarded(lambda: blocks.watch(taped.module, again=True))
        if self._calls is None:
            ours, methods = in_blocks, None
        else:
            ours, methods = self._calls.noting(in_blocks), self._calls.noting(_own)
        with blocks.ours(taped.module, ours, methods=methods):
            return taped.forward(self._noted)

    def take(self, number: int) -> Take:
        """The take of this forward, without a program; ``reason``: why there cannot be one.

        Sets again, moves and changed.
        """
        taped, recorder, watched = self._taped, self._recorder, self._watched
        self.changed, refusal = taped.changed(), recorder.refusal
        kept = watched.kept(taped.options)
        self.again = watched.again or self._patches.again
        guards = Guards(self._reads, taped.named(self._patches.glance))
        reason = refusal or self._why_not(kept, guards)
        self.moves = recorder.keeps or taped.content() != self._content
        take = Take(guards, taped.structure, number, reason=reason, among=self._book.among(taped.options))
        take.in_blocks = bool(reason) and not self.changed and not self.moves
        take.twice = take.in_blocks and reason.startswith(HARMLESS) and not (kept or taped.calls_others)
        if reason.startswith(FETCHED):  # ComfyUI fetches weights ahead of the blocks, into other memory
            take.reason = low_vram(taped.module, self._device) or reason
        take.run = taped.run
        take.code, take.held, take.short = () if reason else watched.states, watched.held, self.is_void
        self._called(take)
        take.clock, take.copies = None if self.is_void else self._clock, self._copies.count
        take.left_out = self._copies.left_out
        take.calls = self._calls.calls if self._calls is not None and self._tape is not None else []
        take.again = self.again or bool(self.changed and taped.skipping)
        take.reason = take.reason or (say("patch_again") if self.again else "")
        return take

    def _why_not(self, kept: str, guards: Guards) -> str:
        """Why a forward that could be recorded may not be replayed; "" if it may."""
        if self.changed:
            return say("changes_itself", change=self.changed)
        if kept:
            return say("foreign_state", name=kept)
        option = guards.changed(self._taped.options)  # a cache, say, which a replay would not fill
        return say("option_written", option=repr(option)) if option else ""

    def _called(self, take: Take) -> None:
        """What of other packs each replay of ``take`` calls."""
        patches, played = self._patches, self._recorder.played
        take.live, take.holds = [*patches.calls, *played], patches.holds
        take.called = patches.shown() or (say("attention_called") if played else "")


def _own(path: str, block: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """In place of a block's forward: that forward."""
    return own(*args, **kwargs)
