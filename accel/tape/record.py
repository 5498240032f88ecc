"""The recorder: notes what one forward does, while the forward runs unchanged.

It refuses, and says why, whatever a later replay could not repeat: a value that came back to the host, random numbers,
writes into inputs or weights, memory that nothing on the tape has written, tensors from nowhere, tensors that the model
keeps for its next call. After a refusal that does not end it (``Refusal``), and after a fault of the recorder's own,
the forward goes on as if nobody had listened. One operation costs about 15 µs, most of them torch's for calling a mode.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..attempt import named
from ..reasons import say
from . import aliasing, library_calls
from .blanks import blank
from .called_patches import Played
from .kept import kept_tensor
from .modes import Operations
from .named_tensors import PLAIN, Memories, is_dressed
from .refusals import RANDOM, UNWRITTEN, BrokenOff, HostReads, Refusal, World
from .tensors import Tensors
from .traits import DROPOUTS, Traits, draws, read_by, traits
from .unplanned import ATTENTION, CONVOLUTION, format_of, heard, instead, void
from .untouched import UNTOUCHED
from .values import Constant, Input, Operation, Tape, Value, Weight
from .wrapped import Wrapped
from .writes import Writes

aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# Of our own mode that changes nothing that a tape could hold.
IGNORED = frozenset(("detach_", "requires_grad_", "lift_fresh_copy", "_has_compatible_shallow_copy_type"))


class _Place(NamedTuple):
    """How far a recording has come: how much there is of everything, and the number of the next value."""

    operations: int
    leaves: int
    promoted: int
    number: int
    reason: str


class Recorder(Operations):
    """Records between ``__enter__`` and ``__exit__``. ``refuse`` gives up.

    turned: weights of convolutions that lie channels last, for programs that read them so. On the tape they, and what
    the convolutions give, lie as ComfyUI has them: the tapes of all sizes are alike. With any, libraries plan as little
    as they can for this one forward, whose time says nothing.
    """

    def __init__(
        self, inputs: Sequence[Tensor], module: nn.Module, device: torch.device, turned: frozenset[Weight] = frozenset()
    ) -> None:
        super().__init__()
        self.refuse = Refusal()
        self.operations: list[Operation] = []
        self.device, self._paused = device, False
        self._tensors = Tensors(module, self.refuse)
        self.turned = self._tensors.turned = turned
        self.short = False  # what its forward gives is void, and how such forwards treat their model is known
        self.value, self.known, self.mark = self._tensors.value, self._tensors.known, self._tensors.mark
        self.number, self.hold, self.has_a_name = self._tensors.next, self._tensors.hold, self._tensors.has_a_name
        self.fetched, self.renamed = self._tensors.fetched, self._tensors.renamed
        self.writes = Writes(self._tensors, self.refuse, self.operations)
        self.module: nn.Module | None = module  # None after the end
        self._world = World(device)
        self.in_wrapped = False  # within an operation that a wrapping tensor's class takes apart
        self.keeps = False  # whether the forward left a tensor in its model
        self.apart = False  # whether its blocks may be left out: see ``aliasing.settle``
        self.calls_packs = False  # whether an operation is another pack's function, or may read what a patch keeps
        self.played: list[Played] = []  # those functions
        self.within: AbstractContextManager = nullcontext()  # what the forward runs in
        self.lean = False  # memory counts for more than time: see ``Tape.lean``
        self._blanks, self._wrapped = self.writes.blanks, Wrapped(self)
        self.inputs = [self._tensors.leaf(tensor, Input(index)) for index, tensor in enumerate(inputs)]

    def add_input(self, tensor: Tensor) -> None:
        """One more input: a tensor that the forward took from its options."""
        if tensor in self._tensors:  # which of the two does the forward mean? They may differ in the next call
            self.refuse(say("twice"))
        self.inputs.append(self._tensors.leaf(tensor, Input(len(self.inputs))))

    @property
    def refusal(self) -> str:
        """Why there is no tape, or ""."""
        return self.refuse.reason

    @property
    def is_deaf(self) -> bool:
        """Whether operations are not written down, now."""
        return self._paused or bool(self.refuse.reason)

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """The body's operations cost nothing and are not written down: the caller does that."""
        self._paused, paused = True, self._paused
        try:
            with self.left() if _get_current_dispatch_mode() is self else nullcontext():
                yield
        finally:
            self._paused = paused

    def guarded(self, ours: Callable[[], Any]) -> Any:
        """What ``ours`` gives; None where it fails, which costs the tape, never the forward."""
        try:
            return ours()
        except Exception as error:  # noqa: BLE001
            self._failed(error)
            return None

    def call(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], own: Callable[[], Any]) -> Any:
        """What ``own`` gives, recorded as one call of ``function`` with these arguments, whatever that does inside."""
        with self.not_listening():
            out = own()
        if not self.is_deaf:
            self.guarded(lambda: self.step(function, args, out if isinstance(out, (tuple, list)) else [out], kwargs))
        return out

    def step(
        self, function: Callable[..., Any], args: tuple, results: Sequence[Any], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Writes down a call of ``function``, which was made without being listened to."""
        inputs: list[Value] = []
        lift = self._tensors.lift
        operation = Operation(function, lift(args, inputs), lift(kwargs or {}, inputs), inputs, opaque=True)
        if self.writes.are_missing(inputs):
            self.refuse(UNWRITTEN)
        with self.not_listening():
            self._blanks.read(inputs)
        self._append(operation, results)

    def place(self) -> _Place:
        """How far the recording has come."""
        return _Place(
            len(self.operations), self._tensors.count, len(self.writes.promoted), self._tensors.next(),
            self.refuse.reason,
        )  # fmt: skip

    def back_to(self, place: _Place) -> bool:
        """Forgets what was written down since ``place``; False if memory from before was written into since."""
        operations, leaves, promoted, number, reason = place
        if any(root < number for root in self.writes.promoted[promoted:]):
            return False
        self.writes.promoted = self.writes.promoted[:promoted]
        del self.operations[operations:]
        self._tensors.forget_since(leaves)
        self.refuse.reason = reason
        return True

    # One operation ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A subclass's own result is made where torch was called, as without a recorder: not by what is called here.
        with nullcontext() if types else DisableTorchFunctionSubclass():
            return self._heard(func, types, args, kwargs or {})

    def _heard(self, func: Any, types: tuple[type, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.refuse.reason or self._paused:
            return func(*args, **kwargs)
        for kind in types:
            if kind not in PLAIN:
                if not is_dressed(kind):
                    return self._wrapped.run(func, types, args, kwargs)
                self._tensors.memories = self._tensors.memories or Memories()
        known = traits(func)
        if known.name in IGNORED or (known.writes >= 0 and known.name in DROPOUTS and not draws(known, args, kwargs)):
            return func(*args, **kwargs)
        if known.backends:  # the one that runs is recorded: which one that is may be switched around the call alone
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        inputs: list[Value] = []
        try:
            if known.name == "lift_fresh":  # its argument is a literal that has just been made
                lifted: tuple = (), {}
            else:
                lifted = self._tensors.lift(args, inputs), self._tensors.lift(kwargs, inputs) if kwargs else {}
            if known.writes >= 0 and not self.refuse.reason:
                self.writes.before(func, known, args, kwargs, lifted, inputs)
        except Exception as error:  # noqa: BLE001  ours costs the tape, never the forward
            self._failed(error)
        out = None
        if self.short and func is ATTENTION:
            out = self.guarded(partial(void, args, kwargs))
        elif self.turned and (func is CONVOLUTION or func is ATTENTION):
            out = self.guarded(partial(instead, func, args, kwargs))
        if out is None:
            out = func(*args, **kwargs)
            if func is ATTENTION:
                self.guarded(partial(heard, args, kwargs, out))
        if not self.refuse.reason:
            try:
                if self.turned and func is CONVOLUTION and lifted[0][1].leaf in self.turned:
                    out = out.contiguous(memory_format=format_of(args[0]))
                self._note(func, known, args, kwargs, lifted, inputs, out)
            except Exception as error:  # noqa: BLE001
                self._failed(error)
        return out

    def _failed(self, error: Exception) -> None:
        self.refuse(say("recording_failed", error=named(error)))

    def _note(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple, inputs: list[Value],
        out: Any,
    ) -> None:  # fmt: skip
        """Writes down an operation that has run."""
        if known.name == "lift_fresh":  # torch.tensor(numbers)
            self._tensors.constant(out, None, None)
            return
        if known.writes >= 0:
            written = self.writes.after(func, known, args, kwargs, lifted, inputs)
            if written is not None:
                self._append(*written)
            return
        fixed = known.of_shapes or all([type(value.leaf) is Constant for value in inputs])
        if reason := self._obstacle(func, known, args, kwargs, inputs, out, fixed):
            self.refuse(reason)
            return
        results = out if type(out) in (tuple, list) else (out,)
        if fixed:
            self._fixed(func, known, args, kwargs, lifted, inputs, results)
            return
        operation = Operation(func, lifted[0], known.with_size(*lifted, results[0]), inputs)
        if not (known.view or known.maybe_view):
            self._append(operation, results)
            return
        if results[0] is args[0]:
            return
        self._append(operation, results, [self._base(known, args, inputs, result) for result in results])

    def _fixed(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple, inputs: list[Value],
        results: Sequence[Any],
    ) -> None:  # fmt: skip
        """What is the same at each replay is no operation but a constant."""
        if self.lean and known.fills is not None and (number := known.fill(args, kwargs)) is not None:
            operation = blank(results[0], number)
            self._append(operation, results)
            self._blanks.made(operation.outputs[0], results[0], number)
            return
        operation = Operation(func, *lifted, inputs)
        for result in results:
            if not isinstance(result, Tensor) or (result is args[0] if args else False):
                continue
            value = self._tensors.constant(result, operation, self._base(known, args, inputs, result))
            if known.unwritten:
                self.writes.left_out(value)
            elif known.fills is not None:
                if (number := known.fill(args, kwargs)) is not None:
                    self._blanks.kept(value, result, number)

    def _obstacle(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], inputs: list[Value], out: Any, fixed: bool
    ) -> str:
        if known.may_draw and draws(known, args, kwargs):
            return RANDOM
        if not (known.of_shapes or known.view):
            read = read_by(known, kwargs, inputs)
            if self.writes.are_missing(read) and not (known.maybe_view and _is_view(args, out)):
                return UNWRITTEN
            if not known.maybe_view:
                self._blanks.read(read)
        return "" if fixed else self._world.obstacle(known, args, kwargs, inputs, out)

    def _base(self, known: Traits, args: tuple, inputs: list[Value], result: Tensor) -> Value | None:
        """The value whose memory ``result`` shares, or None."""
        if not (inputs and isinstance(args[0], Tensor)):
            return None
        return inputs[0].root if known.view or (known.maybe_view and _is_view(args, result)) else None

    def _append(self, operation: Operation, results: Sequence[Any], bases: Sequence[Value | None] = ()) -> None:
        self.writes.read(operation.inputs)
        for index, result in enumerate(results):
            if type(result) is not Tensor and not isinstance(result, Tensor):
                operation.outputs.append(None)
                continue
            operation.outputs.append(self._tensors.result(result, operation, bases[index] if bases else None))
        self.operations.append(operation)

    # The end, and what is read without an operation --------------------------------------------------------------

    def read_back(self, tensor: Tensor) -> None:
        """Somebody takes this tensor's values to Python."""
        if not (self._paused or self.refuse.reason or self._tensors.value(tensor).is_constant):
            self.refuse(say("read_back"))

    def finish(self, output: Any) -> Tape | None:
        """The tape of a forward that gave ``output``; None, with a ``refusal``, where there is none."""
        found: list[Value] = []
        lifted = self._tensors.lift(output, found)
        if not found:
            self.refuse(say("no_result"))
        elif any(value.root.is_constant for value in found):
            self.refuse(say("constant"))
        if self._world.was_drawn_from():
            self.refuse(RANDOM)
        kept = "" if self.short else kept_tensor(self.module, self._tensors.depends)
        self.keeps = bool(kept) or self._tensors.strangers_in(self.module)
        if kept:
            self.refuse(say("keeps", tensor=kept))
        if not self.refuse.reason and self._blanks.were_filled():
            self.refuse(UNWRITTEN)
        if self.refuse.reason:
            return None
        self._blanks.note()
        aliasing.settle(self.operations, found, self.apart)
        for value in self._tensors.constants():
            value.origin = None  # or each constant would keep what it was made of
        return Tape(aliasing.needed(self.operations, found), self.inputs, lifted, self.device, lean=self.lean)

    def close(self, output: Any) -> None:
        """Takes our marks off what lives on, and lets go of every tensor and of the model."""
        self._tensors.close(output, keep=not self.refuse.reason)
        self._blanks.clear()
        self.operations, self.module = [], None


def _is_view(args: tuple, result: Tensor) -> bool:
    return args[0].device == result.device and torch._C._is_alias_of(result, args[0])


def record(forward: Callable[[], Any], recorder: Recorder) -> tuple[Any, Tape | None]:
    """Returns (``forward``'s result, its tape or None). Without a tape ``recorder.refusal`` says why.

    There is no result, either, where that broke the forward off: see ``Refusal``.
    """
    reads = HostReads(recorder.read_back) if recorder.device.type == "cpu" else nullcontext()
    untouched = UNTOUCHED.watched(lambda place: recorder.refuse(say("changes_itself", change=place)))
    out = None
    with torch.inference_mode(), reads, untouched:
        with suppress(BrokenOff), library_calls.noted(recorder), recorder.within, recorder:
            out = forward()
        tape = recorder.guarded(lambda: recorder.finish(out))
        recorder.close(out)
        return out, tape
