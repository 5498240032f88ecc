"""Blocks, where the whole is not recordable: a value comes back to the host at every step, say.

The model's forward is ComfyUI's own. While it runs, its repeated blocks have a ``forward`` of ours, for that call and
that thread only. The first call of a block records it; the program fits every block that is alike, on that block's
weights. It is compared with the recorded result, and timed beside eager: the faster one is kept.

A block that writes into its inputs is recorded on copies of them, and what became of the copies is copied back.
"""

import functools
import inspect
import logging
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import verify
from .attempt import attempt, named
from .errors import AnyShapeError, WrongResult, is_out_of_memory
from .stats import STATS, ModelStats
from .tape import blocks, diagnose
from .tape.options import Guards, NotedOptions, Reads
from .tape.program import Bound, NotBound, Program
from .tape.record import Recorder, record
from .tape.values import Constant, Input, Tape, Weight
from .tapes import Taped, obstacle

if TYPE_CHECKING:
    from .engine import Call, Settings

log = logging.getLogger(__name__)

OPTIONS = "transformer_options"
MAX_KEYS = 96  # of block calls, per model; the least recently used goes
MAX_TAKES = 6  # of one key: a block that reads its own number of the options would make one each
ROUNDS = 3
LONG_MS = 30.0  # a block that takes longer is timed once
NO_GAIN = "its blocks run no faster fused"

_INSTALLING = threading.Lock()


class NotUsed(AnyShapeError):
    """A block runs in eager; says why."""


@dataclass
class Given:
    """The arguments of one call of a block, taken apart."""

    args: tuple
    kwargs: dict[str, Any]
    passed: Mapping[Any, Any] | None = None  # its options as they were passed, and
    options: Mapping[Any, Any] = field(default_factory=dict)  # as they are without the whole forward's recorder
    tensors: list[Tensor] = field(default_factory=list)  # each once
    key: list[Hashable] = field(default_factory=list)  # all the rest, and the tensors' forms

    def call(
        self, own: Callable[..., Any], options: Mapping[Any, Any] | None = None, swap: Mapping[int, Any] | None = None
    ) -> Any:
        """``own`` with other options, and other objects in place of those whose ids are in ``swap``."""
        swap = dict(swap or {})
        if self.passed is not None and options is not None:
            swap[id(self.passed)] = options
        return own(*_swapped(self.args, swap), **_swapped(self.kwargs, swap))


@dataclass(eq=False)
class BlockTake:
    """One recording of one block's call, for all blocks that are alike."""

    guards: Guards
    program: Program | None = None
    reason: str = ""  # why there is none
    writes: tuple[int, ...] = ()  # the inputs that it writes into
    bound: dict[str, Bound] = field(default_factory=dict)  # the weights of each block, by its path

    def inputs(self, given: Given) -> list[Tensor]:
        """The program's."""
        return given.tensors + [given.options[key] for key in self.guards.tensors]


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

    def __init__(self, call: "Call", settings: "Settings", first: bool) -> None:
        self.call, self.settings, self.first = call, settings, first
        self.thread = threading.get_ident()
        self.recorder: Recorder | None = None  # of the whole forward, if that is being recorded
        self.prepared: frozenset[Any] = frozenset()  # options that were put there for that recorder
        self.ran = 0  # calls of blocks that ran on a program
        self.reasons: dict[str, None] = {}  # why others did not

    @property
    def taped(self) -> Taped:
        """The call as ``Tapes.record`` takes it; from then on the visit knows the recorder."""
        return replace(self.call.taped, prepare=self._prepare)

    def _prepare(self, options: NotedOptions, recorder: Recorder) -> None:
        self.call.taped.prepare(options, recorder)
        self.recorder, self.prepared = recorder, frozenset(options._own)

    def active(self) -> bool:
        """Whether blocks are ours now: not for another thread, nor while the whole is still recorded."""
        return threading.get_ident() == self.thread and (self.recorder is None or self.recorder.came_back)

    def options(self, options: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """A block's options as they would be without the whole forward's recorder."""
        if not isinstance(options, NotedOptions):
            return options
        plain, given = dict(dict.items(options)), self.call.taped.options
        for key in self.prepared:
            plain.pop(key, None)
        return plain | {key: given[key] for key in self.prepared if key in given}


class BlockTier:
    """The programs of one model's blocks.

    make: a fused program of a tape. count: notes what a program compiled, in a first forward or a later one.
    """

    def __init__(
        self, stats: ModelStats, passthrough: tuple[type[BaseException], ...],
        make: Callable[[Tape, "Call"], Program], count: Callable[[Program, bool, torch.dtype], None],
    ) -> None:  # fmt: skip
        self.stats, self._passthrough, self._make, self._count = stats, passthrough, make, count
        self._structure: int | None = None  # of the model that all of the following is about
        self._paths: list[str] = []
        self._alike: dict[str, Hashable] = {}  # by path; None: leave it alone
        self._takes: OrderedDict[tuple, list[BlockTake]] = OrderedDict()
        self._writes: dict[Hashable, set[int]] = {}  # the inputs that blocks of a likeness write into
        self._idle: set[Hashable] = set()  # calls of the model in which no block gains
        self._weights: int | None = None  # fingerprint of those in the takes' ``bound``

    @contextmanager
    def visit(self, call: "Call", settings: "Settings", first: bool) -> Iterator[Visit]:
        """The body is one forward of the model; its blocks are ours meanwhile."""
        visit, installed = Visit(call, settings, first), []
        try:
            if torch.is_inference_mode_enabled() and call.key not in self._idle:
                self._install(visit, installed)
            yield visit
        finally:
            with _INSTALLING:
                for block, ours in installed:
                    if block.__dict__.get("forward") is ours:
                        del block.__dict__["forward"]
        if visit.reasons and not visit.ran:
            self._idle.add(call.key)

    def release(self) -> None:
        """Lets go of the weights: the model is unloaded."""
        self._weights = None
        for take in [take for takes in list(self._takes.values()) for take in takes]:
            take.bound.clear()

    # The blocks' forwards -----------------------------------------------------------------------------------------

    def _install(self, visit: Visit, installed: list[tuple[nn.Module, Any]]) -> None:
        call, model = visit.call, visit.call.taped.module
        with _INSTALLING:
            if self._structure != call.taped.structure:  # the model's code changed
                self._forget()
                self._paths, self._structure = blocks.find(model), call.taped.structure
            if self._weights != call.weights:
                self.release()
                self._weights = call.weights
            for path in self._paths:
                block = model.get_submodule(path)
                if "forward" not in block.__dict__:  # else it is somebody's, or ours for another thread
                    ours = functools.partial(self._forward, visit, path, block, block.forward)
                    installed.append((block, ours))
                    block.__dict__["forward"] = ours

    def _forget(self) -> None:
        self._structure = None
        for known in (self._takes, self._alike, self._writes, self._idle):
            known.clear()

    def _forward(
        self, visit: Visit, path: str, block: nn.Module, own: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """What runs in place of a block's own forward."""
        if not visit.active():
            return own(*args, **kwargs)
        with _disable_current_modes() if visit.recorder is not None else nullcontext():
            done, reason = attempt(
                lambda: self._fast(visit, path, block, args, kwargs), lambda error: _reason(error), self._passthrough
            )
            if done is None:
                visit.reasons[reason] = None
                return own(*args, **kwargs)
            if isinstance(done, Given):
                return self._first(visit, path, block, own, done)
            visit.ran += 1
            return done[0]

    def _fast(
        self, visit: Visit, path: str, block: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any] | Given:
        """The result of the block's program; its arguments if it has not been recorded. Raises why it runs in eager."""
        if path not in self._alike:
            self._alike[path] = blocks.likeness(block)
        if self._alike[path] is None:
            raise NotUsed(
                "another node replaced or hooked a block, or its weights change at each call: it runs in eager"
            )
        given = _given(visit, block, args, kwargs)
        take = self._find(path, given)
        if take is None:
            return given
        if take.program is None:
            raise NotUsed(take.reason)
        try:
            return (self._replay(take, path, block, given),)
        except Exception as error:
            if not isinstance(error, self._passthrough):
                self._failed(take, error)
            raise

    def _find(self, path: str, given: Given) -> BlockTake | None:
        takes = self._takes.get((self._alike[path], *given.key), ())
        return next((take for take in takes if not take.guards.differs(given.options)), None)

    def _replay(self, take: BlockTake, path: str, block: nn.Module, given: Given) -> Any:
        bound = take.bound.get(path)
        if bound is None:
            bound = take.bound[path] = take.program.bound_to(block)
        return _written_back(*take.program.run(take.inputs(given), bound), take, given)

    # The first call of a structure --------------------------------------------------------------------------------

    def _first(self, visit: Visit, path: str, block: nn.Module, own: Callable[..., Any], given: Given) -> Any:
        """The block's result, recorded; later calls find a take. The block's own errors are raised as they are."""
        alike = self._alike[path]
        key = (alike, *given.key)
        takes = self._takes.setdefault(key, [])
        self._takes.move_to_end(key)
        while len(self._takes) > MAX_KEYS:
            self._takes.popitem(last=False)
        if len(takes) >= MAX_TAKES:
            visit.reasons["blocks read options that differ from block to block: those run in eager"] = None
            return given.call(own)
        before, writes = [tensor.clone() for tensor in given.tensors], self._writes.setdefault(alike, set())
        while True:
            recorded, reason = attempt(
                lambda: _recorded(visit, block, own, given, tuple(sorted(writes))), _reason, self._passthrough
            )
            new = getattr(recorded, "written", None)
            again = isinstance(new, Input) and new.index < len(before) and new.index not in writes
            if reason or again:
                for tensor, old in zip(given.tensors, before, strict=True):
                    tensor.copy_(old)
            if reason:
                visit.reasons[reason] = None
                return given.call(own)
            if not again:
                break
            writes.add(new.index)
        take, done = recorded.take, None
        takes.append(take)
        if not take.reason:
            done, _ = attempt(
                lambda: self._programmed(visit, path, block, own, given, before, recorded),
                lambda error: self._failed(take, error),
                self._passthrough,
            )
        if done is None:
            visit.reasons[take.reason] = None
            return _written_back(recorded.out, recorded.copies, take, given)
        visit.ran += 1
        return _written_back(*done, take, given)

    def _programmed(
        self, visit: Visit, path: str, block: nn.Module, own: Callable[..., Any], given: Given, before: list[Tensor],
        recorded: Recorded,
    ) -> tuple[Any, list[Tensor]]:  # fmt: skip
        """What the new program gives, checked. Raises ``NotUsed`` if it is no gain."""
        take = recorded.take
        program = self._make(recorded.tape, visit.call)
        self._count(program, visit.first, visit.call.key.inputs[0].dtype)
        if not program.report.kernels:
            raise NotUsed(NO_GAIN)
        inputs = take.inputs(given)
        program.bind(block)
        out = program.run(inputs)
        if visit.settings.verify:
            program, out = self._checked(recorded, program, inputs, out, block)
        take.bound[path] = program.bound_to(block)
        program.unbind()
        take.program = program
        swap = {id(tensor): old for tensor, old in zip(given.tensors, before, strict=True)}
        if not self._pays(visit, path, block, own, _swapped(given.args, swap), _swapped(given.kwargs, swap)):
            raise NotUsed(NO_GAIN)
        return out

    def _checked(
        self, recorded: Recorded, program: Program, inputs: list[Tensor], out: Any, block: nn.Module
    ) -> tuple[Program, Any]:
        """The program, without kernels that are wrong, and its result."""
        what, wanted = f"the tape of a block ({type(block).__name__})", _tensors((recorded.out, recorded.copies))
        try:
            verify.compare(what, _tensors(out), wanted)
            return program, out
        except WrongResult as error:
            STATS.fallback(self.stats.name, str(error))
        wrong = diagnose.wrong_kernels(recorded.tape, program, inputs, block)
        program = Program(recorded.tape, fuse=True, wrong=wrong)
        program.bind(block)
        out = program.run(inputs)
        verify.compare(what, _tensors(out), wanted)
        return program, out

    def _pays(
        self, visit: Visit, path: str, block: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> bool:
        """Whether the program is faster than eager, with all that finding it takes on the host."""
        device = visit.call.key.device
        if device.type != "cuda":  # nothing is fused there, unless a test wants it
            return True
        best = {"eager": float("inf"), "program": float("inf")}
        given = _given(visit, block, args, kwargs)
        ways = {
            "eager": lambda: given.call(own, given.options),
            "program": lambda: self._fast(visit, path, block, args, kwargs),
        }
        for _ in range(ROUNDS):
            for name, way in ways.items():
                best[name] = min(best[name], _milliseconds(way, device))
            if best["eager"] > LONG_MS:
                break
        return best["program"] < best["eager"]

    def _failed(self, take: BlockTake, error: Exception) -> str:
        """A block whose program fails runs in eager from then on."""
        take.program, take.reason = None, _reason(error)
        take.bound.clear()
        if is_out_of_memory(error):
            torch.cuda.empty_cache()
        elif not isinstance(error, (AnyShapeError, NotBound)):
            text = "".join(traceback.format_exception(error))
            log.warning("AnyShape: %s: %s\n%s", self.stats.name, take.reason, text)
        if isinstance(error, NotBound):  # a weight has another form now: other blocks are alike
            self._forget()
        return take.reason


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, AnyShapeError) else f"a block's program failed: {named(error)}"


def _recorded(
    visit: Visit, block: nn.Module, own: Callable[..., Any], given: Given, writes: tuple[int, ...]
) -> Recorded:
    """Runs the block and records it, on copies of the inputs ``writes``."""
    recorder = Recorder(given.tensors, block, visit.call.key.device)
    reads = Reads(recorder.add_input)
    noted = NotedOptions(given.options, reads)
    visit.call.taped.prepare(noted, recorder)
    prepared, copies = set(noted._own), []

    def forward() -> tuple[Any, list[Tensor]]:
        copies.extend(given.tensors[place].clone() for place in writes)
        swap = {id(given.tensors[place]): copy for place, copy in zip(writes, copies, strict=True)}
        return given.call(own, noted, swap), list(copies)

    (out, _), tape = record(forward, recorder)
    take = BlockTake(Guards(reads), reason=recorder.refusal, writes=writes)
    for key in noted._own - prepared:
        given.passed[key] = dict.get(noted, key)
        take.reason = take.reason or "a block changes the options that it is given"
    after = _given(visit, block, given.args, given.kwargs)
    if after.key != given.key or list(map(id, after.tensors)) != list(map(id, given.tensors)):
        take.reason = take.reason or "a block changes a list or dict that it is given"
    if tape is not None:
        take.reason = take.reason or _odd(given, take, tape, out)
    return Recorded(take, tape, recorder.written, out, copies)


def _odd(given: Given, take: BlockTake, tape: Tape, out: Any) -> str:
    """Why this tape may not be replayed for other calls; "" if it may."""
    if len(tape.inputs) != len(given.tensors) + len(take.guards.tensors):
        return "a block takes the same tensor as an argument and from its options"
    memory = [tensor.untyped_storage().data_ptr() for tensor in given.tensors]
    if any(memory.count(memory[place]) > 1 for place in take.writes):
        return "a block writes into an input that shares its memory with another one"
    if not _is_plain(out) or any(isinstance(value.root.leaf, (Constant, Weight)) for value in tape.outputs):
        return "a block's result is not made of tensors of its own"
    return obstacle(tape)


def _given(visit: Visit, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Given:
    """The arguments of a call, taken apart. Raises ``NotUsed`` if one is of a kind that has no key."""
    given, place = Given(args, kwargs), _place_of_options(type(block).forward)
    if OPTIONS in kwargs or 0 <= place < len(args):
        passed = kwargs[OPTIONS] if OPTIONS in kwargs else args[place]
        if isinstance(passed, dict):
            given.passed, given.options = passed, visit.options(passed)
    places: dict[int, int] = {}
    given.key.append(len(args))
    for item in args:
        _walk(item, given, places)
    for name, item in kwargs.items():
        given.key.append(name)
        _walk(item, given, places)
    return given


@functools.lru_cache(maxsize=256)
def _place_of_options(forward: Callable[..., Any]) -> int:
    """The position of the options among a call's arguments, or -1."""
    names = list(inspect.signature(forward).parameters)[1:]
    return names.index(OPTIONS) if OPTIONS in names else -1


def _walk(item: Any, given: Given, places: dict[int, int]) -> None:
    kind, key = type(item), given.key
    if kind is Tensor or kind is nn.Parameter:
        place = places.setdefault(id(item), len(given.tensors))
        if place == len(given.tensors):
            given.tensors.append(item)
        key.append((place, item.shape, item.stride(), item.dtype, item.device))
    elif item is given.passed and item is not None:
        key.append(OPTIONS)
    elif isinstance(item, blocks.NUMBERS):
        key.append((kind, item))
    elif kind is list or kind is tuple:
        key.append((kind, len(item)))
        for each in item:
            _walk(each, given, places)
    elif kind is dict:
        key.append((kind, tuple(item)))
        for each in item.values():
            _walk(each, given, places)
    else:
        raise NotUsed(f"a block was called with a {kind.__name__}, which AnyShape does not know: it runs in eager")


def _swapped(item: Any, swap: Mapping[int, Any]) -> Any:
    """``item`` with other objects in place of those whose ids are in ``swap``; what has none of them stays itself."""
    if id(item) in swap:
        return swap[id(item)]
    kind = type(item)
    if kind is list or kind is tuple:
        new = [_swapped(each, swap) for each in item]
        return item if all(a is b for a, b in zip(new, item, strict=True)) else kind(new)
    if kind is dict:
        new = {name: _swapped(each, swap) for name, each in item.items()}
        return item if all(new[name] is item[name] for name in item) else new
    return item


def _written_back(out: Any, written: Sequence[Tensor], take: BlockTake, given: Given) -> Any:
    """``out``, after the block's inputs got what it wrote into them."""
    swap = {}
    for place, new in zip(take.writes, written, strict=True):
        given.tensors[place].copy_(new)
        swap[id(new)] = given.tensors[place]
    return _swapped(out, swap) if swap else out


def _tensors(out: Any) -> tuple[Tensor, ...]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(out, Tensor):
        return (out,)
    items = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else ()
    return tuple(tensor for item in items for tensor in _tensors(item))


def _is_plain(out: Any) -> bool:
    if type(out) in (list, tuple):
        return all(map(_is_plain, out))
    if type(out) is dict:
        return all(map(_is_plain, out.values()))
    return isinstance(out, (Tensor, *blocks.NUMBERS))


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Until the GPU is done, or until the host is where that takes longer."""
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1e3
