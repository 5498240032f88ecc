"""One recording of a block's call: which calls it fits, and how it is made."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .block_call import Given
from .block_forwards import packs_layers
from .call import Call, Settings
from .reasons import say
from .take import Stream
from .tape.binding import Bound
from .tape.blocks import is_plain
from .tape.called_patches import Played
from .tape.guards import Guards
from .tape.options import NotedOptions, Reads
from .tape.patch_book import PatchBook
from .tape.patches import Patches
from .tape.program import Program
from .tape.record import Recorder, record
from .tape.swaps import swapped
from .tape.values import Constant, Input, Tape, Weight
from .tapes import obstacle

NO_GAIN = say("blocks_no_gain")


@dataclass(eq=False)
class BlockTake:
    """One recording of one block's call, for all blocks that are alike."""

    guards: Guards
    program: Program | None = None
    reason: str = ""  # why there is none
    writes: tuple[int, ...] = ()  # the inputs that it writes into
    slower: bool = False  # than eager, when it was timed
    bound: dict[str, Bound] = field(default_factory=dict)  # the weights of each block, by its path
    played: list[Played] = field(default_factory=list)  # other packs' functions that it calls
    streamed: bool = False  # its program's steps fetch their weights
    free: frozenset[str] = frozenset()  # options that only say which block it is, and do not matter to it

    def differs(self, options: Mapping[Any, Any], block: nn.Module) -> str:
        """See ``Guards``."""
        return self.guards.differs(options, block, self.free)

    def inputs(self, given: Given) -> list[Tensor]:
        """The program's."""
        return given.tensors + [given.options[key] for key in self.guards.tensors]

    def written_back(self, out: Any, written: Sequence[Tensor], given: Given) -> Any:
        """``out``, after the block's inputs got what it wrote into them."""
        swap = {}
        for place, new in zip(self.writes, written, strict=True):
            given.tensors[place].copy_(new)
            swap[id(new)] = given.tensors[place]
        return swapped(out, swap) if swap else out


@dataclass
class Recorded:
    """What one recording gave. ``out`` may have ``copies`` in it: of the inputs that the block writes into."""

    take: BlockTake
    tape: Tape | None
    written: Input | Weight | None  # what it was refused for
    out: Any
    copies: list[Tensor]


class Visit:
    """One forward of the model with its blocks on programs. Holds the model: valid for that forward only."""

    def __init__(self, call: Call, settings: Settings, first: bool) -> None:
        self.call, self.settings, self.first = call, settings, first
        self.ran = 0  # calls of blocks that ran on a program
        self.slower = 0  # of these, on one that was no faster than eager
        self.reasons: dict[str, None] = {}  # why others did not

    @property
    def size(self) -> str:
        """Of the forward, in image pixels."""
        return f"{self.call.width}x{self.call.height}"

    def stream_of(self, path: str, block: nn.Module) -> Stream | None:
        """A block's weights, where steps fetch them."""
        stream = self.call.taped.stream
        return None if stream is None else stream.of_block(path, block)

    def note(self, take: BlockTake) -> None:
        """Notes that a call of a block ran on the program of ``take``."""
        self.ran += 1
        self.slower += take.slower

    def told(self, whole: str) -> tuple[str, str, str]:
        """(The state, the reason, the note) of the forward. whole: why all of it could not be recorded."""
        if not self.ran:
            return "eager", whole, NO_GAIN if NO_GAIN in self.reasons else ""
        note = say("blocks", why=whole)
        if self.slower:
            note += f"; {self.slower} of {self.ran} are no faster at this size"
        reasons = [reason for reason in self.reasons if reason != NO_GAIN]
        if self.call.taped.stream is not None:
            reasons.append(self.call.taped.stream.why)
        return "tape", "; ".join(reasons), note


def record_block(
    visit: Visit, book: PatchBook, path: str, block: nn.Module, own: Callable[..., Any], given: Given,
    writes: tuple[int, ...],
) -> Recorded:  # fmt: skip
    """Runs the block and records it, on copies of the inputs ``writes``."""
    stream = visit.stream_of(path, block)
    recorder = Recorder(given.tensors, block, visit.call.key.device)
    reads = Reads(recorder.add_input)
    noted = NotedOptions(given.options, reads)
    visit.call.taped.prepare(noted, recorder)
    patches = Patches(noted, recorder, book, whole=False)
    prepared, copies = set(noted._own), []

    def forward() -> tuple[Any, list[Tensor]]:
        copies.extend(given.tensors[place].clone() for place in writes)
        swap = {id(given.tensors[place]): copy for place, copy in zip(writes, copies, strict=True)}
        layers = packs_layers(recorder, block) if visit.call.taped.foreign else nullcontext()
        with layers, nullcontext() if stream is None else stream.in_forward(recorder):
            return given.call(own, noted, swap), list(copies)

    (out, _), tape = record(forward, recorder)
    recorder.guarded(patches.finish)
    take = BlockTake(Guards(reads, visit.call.taped.named(patches.glance)), reason=recorder.refusal, writes=writes)
    take.played, take.streamed = recorder.played, stream is not None
    if patches.again:  # it has to be called in each forward, so it is no part of a block's program
        take.reason = take.reason or say("patch_again")
    if not patches.called:
        take.free = visit.call.taped.places(block, True)
    for key in noted._own - prepared:
        given.passed[key] = dict.get(noted, key)
        take.reason = take.reason or say("block_changes_options")
    if take.guards.changed(given.options):
        take.reason = take.reason or say("block_changes_options")
    if given.was_changed(type(block)):
        take.reason = take.reason or say("block_changes_list")
    if tape is not None:
        tape.streamed = stream is not None
        take.reason = take.reason or _odd(given, take, tape, out)
    return Recorded(take, tape, recorder.writes.into, out, copies)


def _odd(given: Given, take: BlockTake, tape: Tape, out: Any) -> str:
    """Why this tape may not be replayed for other calls; "" if it may."""
    if len(tape.inputs) != len(given.tensors) + len(take.guards.tensors):
        return say("block_same_tensor")
    memory = [tensor.untyped_storage().data_ptr() for tensor in given.tensors]
    if any(memory.count(memory[place]) > 1 for place in take.writes):
        return say("block_shared")
    if not is_plain(out) or any(isinstance(value.root.leaf, (Constant, Weight)) for value in tape.outputs):
        return say("block_result")
    return obstacle(tape)
