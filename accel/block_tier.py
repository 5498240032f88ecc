"""Programs for repeated blocks, where the whole forward cannot be recorded: a value comes back to the host, say.

The model's forward is ComfyUI's own. While it runs, its repeated blocks have a ``forward`` of ours, for that call and
that thread only. The first call of a block records it; the program fits every block that is alike, on that block's
weights. It is compared with the recorded result, and used if it is right. It is also timed beside eager, for the note
in the stats alone: what runs must not depend on a clock, or the same seed would give another picture.

A block that writes into its inputs is recorded on copies of them, and what became of the copies is copied back.
"""

import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import verify
from .attempt import attempt, named
from .block_call import Given, NotUsed, take_apart
from .block_forwards import Blocks
from .block_take import NO_GAIN, BlockTake, Recorded, Visit, record_block
from .call import Call, Settings
from .clock import timed
from .errors import AnyShapeError, WrongResult, is_out_of_memory
from .preparing import preparing
from .reasons import say
from .stats import STATS, ModelStats
from .take import Taped
from .tape import diagnose, this_forward
from .tape.binding import Bound, NotBound, loose, tight
from .tape.named_tensors import NO_OTHERS
from .tape.patch_book import PatchBook
from .tape.program import Program
from .tape.values import Input, Tape, tensors_in

log = logging.getLogger(__name__)

MAX_KEYS = 96  # of block calls, per model; the least recently used goes
MAX_TAKES = 6  # of one key: a block that reads its own number of the options would make one each
ROUNDS = 3
LONG_MS = 30.0  # a block that takes longer is timed once
FEW = 0.25  # of the blocks: one of 9 gained less than a look at the model takes at each call, 4 of 9 gained (H100)
ELSEWHERE = say("weights_elsewhere")
PASSING = say("block_passing")


class BlockTier:
    """The programs of one model's blocks.

    make: a fused program of a tape. count: notes what a program compiled, in a first forward or a later one.
    """

    def __init__(
        self, stats: ModelStats, passthrough: tuple[type[BaseException], ...],
        make: Callable[[Tape, Call], Program], count: Callable[[Program, bool, Call], None],
        patches: PatchBook,
    ) -> None:  # fmt: skip
        self.stats, self._passthrough, self._make, self._count = stats, passthrough, make, count
        self._patches = patches
        self._blocks = Blocks(stages=True)  # of the model that all of the following is about
        self._takes: OrderedDict[tuple, list[BlockTake]] = OrderedDict()
        self._writes: dict[Hashable, set[int]] = {}  # the inputs that blocks of a likeness write into
        self._idle: set[Hashable] = set()  # calls of the model in which no block gains, with its weights where they are
        self._weights: int | None = None  # fingerprint of those in the takes' ``bound``
        self._elsewhere: set[str] = set()  # blocks that run in eager, because weights are fetched at each call

    @contextmanager
    def visit(self, call: Call, settings: Settings, first: bool, whole: str) -> Iterator[Visit]:
        """In the body, which is one forward of the model, its blocks are ours. whole: why that is not recorded."""
        visit = Visit(call, settings, first)
        with ExitStack() as stack:
            content = call.taped.content()  # blocks call functions of other packs in their programs, too
            if torch.is_inference_mode_enabled() and content is not None:
                new = self._look(call, content)
                if call.key not in self._idle:
                    if self._elsewhere:
                        visit.reasons[ELSEWHERE] = None
                    ours = partial(self._forward, visit)
                    if call.taped.meets_others:
                        self._blocks.watch(call.taped.module, again=new)
                    stack.enter_context(self._blocks.ours(call.taped.module, ours, self._elsewhere | call.taped.left))
            yield visit
        if visit.reasons and not visit.ran:
            if len(self._idle) >= MAX_KEYS:
                self._idle.clear()
            self._idle.add(call.key)
            call.taped.rest(call.key, whole)

    def loosen(self) -> None:
        """Holds the weights no longer than their model does."""
        for take in [take for takes in list(self._takes.values()) for take in takes if take.program is not None]:
            take.bound = {path: loose(bound, take.program.weight_slots) for path, bound in take.bound.items()}

    def release(self) -> None:
        """Releases the weights, because the model is unloaded."""
        self._weights = None
        self._idle.clear()
        for take in [take for takes in list(self._takes.values()) for take in takes]:
            take.bound.clear()

    # The blocks' forwards -----------------------------------------------------------------------------------------

    def _look(self, call: Call, content: int) -> bool:
        """Whether the model's code or its weights are not as they were at the last call."""
        new = self._blocks.look(call.taped.module, hash((call.taped.structure, content)))
        if new:
            for key in [key for key in self._takes if not self._blocks.is_known(key[0])]:
                del self._takes[key]
            self._writes = {alike: each for alike, each in self._writes.items() if self._blocks.is_known(alike)}
        new = new or self._weights != call.weights
        if new:
            self.release()
            self._weights, self._elsewhere = call.weights, self._fetching(call.taped)
        return new

    def _fetching(self, taped: Taped) -> set[str]:
        """The blocks that fetch weights at each call; all of them where only a few have theirs on the device."""
        paths = set(self._blocks.paths)
        found = {path for path in paths if taped.fetches(taped.module.get_submodule(path))}
        return paths if found and len(paths) - len(found) < FEW * len(paths) else found

    def _forward(
        self, visit: Visit, path: str, block: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """What runs in place of a block's own forward."""
        done, reason = attempt(
            lambda: self._fast(visit, path, block, args, kwargs), lambda error: _reason(error), self._passthrough
        )
        if done is None:
            visit.reasons[reason] = None
            return own(*args, **kwargs)
        if isinstance(done, Given):
            with preparing(self.stats.name, visit.size):
                return self._first(visit, path, block, own, done)
        return done[0]

    def _fast(
        self, visit: Visit, path: str, block: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any] | Given:
        """The result of the block's program; its arguments if it has not been recorded. Raises why it runs in eager."""
        if self._blocks.is_altered(path, block, visit.call.taped.altered) or self._blocks.likeness(path, block) is None:
            raise NotUsed(say("foreign_block"))
        given = take_apart(type(block), args, kwargs)
        take = self._find(visit, path, block, given)
        if take is None:
            return given
        if take.program is None:
            raise NotUsed(take.reason)
        if why := visit.call.taped.hold():
            raise NotUsed(why)
        try:
            out = self._replay(take, path, block, given, visit)
            visit.note(take)
            return (out,)
        except Exception as error:
            if not isinstance(error, self._passthrough):
                self._failed(take, error)
            raise
        finally:
            visit.call.taped.let_go()

    def _key(self, visit: Visit, path: str, block: nn.Module, given: Given) -> tuple:
        """Of the takes that a call may find. Programs whose steps fetch weights are others."""
        return self._blocks.likeness(path, block), *given.key, visit.call.taped.stream is not None

    def _find(self, visit: Visit, path: str, block: nn.Module, given: Given) -> BlockTake | None:
        takes = self._takes.get(self._key(visit, path, block, given), ())
        return next((take for take in takes if not take.differs(given.options, block)), None)

    def _bound(self, visit: Visit, take: BlockTake, program: Program, path: str, block: nn.Module) -> Bound:
        """The block's weights, for a program of the take."""
        stream = visit.stream_of(path, block)
        if stream is not None:
            return stream.bound(program, NO_OTHERS)  # it keeps them, for this run
        bound = take.bound[path] = tight(take.bound.get(path)) or program.bound_to(block)
        return bound

    def _replay(self, take: BlockTake, path: str, block: nn.Module, given: Given, visit: Visit) -> Any:
        bound = self._bound(visit, take, take.program, path, block)
        return take.written_back(*take.program.run(take.inputs(given), bound), given)

    # The first call of a structure --------------------------------------------------------------------------------

    def _first(self, visit: Visit, path: str, block: nn.Module, own: Callable[..., Any], given: Given) -> Any:
        """The block's result, recorded; later calls find a take. The block's own errors are raised as they are."""
        alike, key = self._blocks.likeness(path, block), self._key(visit, path, block, given)
        takes = self._takes.setdefault(key, [])
        self._takes.move_to_end(key)
        while len(self._takes) > MAX_KEYS:
            self._takes.popitem(last=False)
        if len(takes) >= MAX_TAKES:
            visit.reasons[say("block_options")] = None
            return given.call(own)
        before, writes = [tensor.clone() for tensor in given.tensors], self._writes.setdefault(alike, set())
        while True:
            recorded, reason = attempt(
                lambda: record_block(visit, self._patches, path, block, own, given, tuple(sorted(writes))),
                _reason,
                self._passthrough,
            )
            new = getattr(recorded, "written", None)
            again = isinstance(new, Input) and new.index < len(before) and new.index not in writes
            if again and recorded.take.played:  # another pack's attention, which must not be called twice: not now
                writes.add(new.index)
                return recorded.take.written_back(recorded.out, recorded.copies, given)
            if again:
                given.tensors[new.index].copy_(before[new.index])
            if reason:  # ours, or the block's own: that one is raised again below
                for tensor, old in zip(given.tensors, before, strict=True):
                    if not torch.equal(tensor, old):
                        tensor.copy_(old)
                visit.reasons[reason] = None
                return given.call(own)
            if not again:
                break
            writes.add(new.index)
        take, done = recorded.take, None
        why = visit.call.taped.hold()
        if why or take.reason:
            visit.call.taped.let_go()
        if why:  # the next call records it
            visit.reasons[why] = None
            return take.written_back(recorded.out, recorded.copies, given)
        takes.append(take)
        if not take.reason:
            try:
                with this_forward.forward(given.options) as forward:
                    forward.playing = True
                    done, _ = attempt(
                        lambda: self._programmed(visit, path, block, own, given, before, recorded),
                        lambda error: self._failed(take, error),
                        self._passthrough,
                    )
            except BaseException:  # the user's interrupt: the next call begins again
                takes.remove(take)
                raise
            finally:
                visit.call.taped.let_go()
        if done is None:
            visit.reasons[take.reason] = None
            return take.written_back(recorded.out, recorded.copies, given)
        visit.note(take)
        return take.written_back(*done, given)

    def _programmed(
        self, visit: Visit, path: str, block: nn.Module, own: Callable[..., Any], given: Given, before: list[Tensor],
        recorded: Recorded,
    ) -> tuple[Any, list[Tensor]]:  # fmt: skip
        """What the new program gives, checked. Raises ``NotUsed`` if there is nothing to gain."""
        take = recorded.take
        program = self._make(recorded.tape, visit.call)
        self._count(program, visit.first, visit.call)
        if not program.report.kernels:
            raise NotUsed(NO_GAIN)
        inputs = take.inputs(given)
        out = program.run(inputs, self._bound(visit, take, program, path, block))
        if visit.settings.verify:
            program, out = self._checked(visit, recorded, program, inputs, out, path, block)
        take.program = program
        if self._find(visit, path, block, given) is not take:
            raise NotUsed(PASSING)
        for each in take.played:
            each.recorded = None
        if _is_timed(visit) and not take.played:
            take.slower = self._is_slower(visit, take, path, block, own, given, before)
        return out

    def _checked(
        self, visit: Visit, recorded: Recorded, program: Program, inputs: list[Tensor], out: Any, path: str,
        block: nn.Module,
    ) -> tuple[Program, Any]:  # fmt: skip
        """The program, without kernels that are wrong, and its result."""
        what, wanted = f"the tape of a block ({type(block).__name__})", (*tensors_in((recorded.out, recorded.copies)),)
        try:
            verify.compare(what, (*tensors_in(out),), wanted)
            return program, out
        except WrongResult as error:
            if visit.call.taped.stream is not None:  # what each kernel should give needs weights that stay
                raise
            STATS.fallback(self.stats.name, str(error))
        program.bind(block)
        wrong = diagnose.wrong_kernels(recorded.tape, program, inputs, block)
        program, bound = Program(recorded.tape, fuse=True, wrong=wrong), recorded.take.bound
        bound[path] = program.bound_to(block)
        out = program.run(inputs, bound[path])
        verify.compare(what, (*tensors_in(out),), wanted)
        return program, out

    def _is_slower(
        self, visit: Visit, take: BlockTake, path: str, block: nn.Module, own: Callable[..., Any], given: Given,
        before: list[Tensor],
    ) -> bool:  # fmt: skip
        """Whether the program is no faster than eager, with all that finding it takes on the host."""
        device = visit.call.key.device
        written = [before[place] for place in take.writes]  # copies, which may be written into again and again
        swap = {id(given.tensors[place]): copy for place, copy in zip(take.writes, written, strict=True)}

        def eager() -> None:
            given.call(own, given.options, swap)

        def program() -> None:
            self._find(visit, path, block, take_apart(type(block), given.args, given.kwargs))
            _, new = take.program.run(take.inputs(given), take.bound[path])
            for copy, tensor in zip(written, new, strict=True):
                copy.copy_(tensor)

        best = {eager: float("inf"), program: float("inf")}
        for _ in range(ROUNDS):
            for way in best:
                best[way] = min(best[way], timed(way, device)[2])
            if best[eager] > LONG_MS:
                break
        return best[program] >= best[eager]

    def _failed(self, take: BlockTake, error: Exception) -> str:
        """A block whose program fails runs in eager from then on."""
        take.program, take.reason = None, _reason(error)
        take.bound.clear()
        if is_out_of_memory(error):
            torch.cuda.empty_cache()
        elif not isinstance(error, (AnyShapeError, NotBound)):
            text = "".join(traceback.format_exception(error))
            log.warning("AnyShape: %s: %s\n%s", self.stats.name, take.reason, text)
        if isinstance(error, NotBound) and not take.streamed:  # a weight has another form now: other blocks are alike
            self._blocks.forget()
        return take.reason


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, AnyShapeError) else say("block_failed", error=named(error))


def _is_timed(visit: Visit) -> bool:
    """Elsewhere nothing is fused, unless a test wants it; and fetching weights takes longer than what is timed."""
    return visit.call.key.device.type == "cuda" and visit.call.taped.stream is None
