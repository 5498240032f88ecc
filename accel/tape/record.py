"""The recorder: writes down what one forward does, while it runs as it is.

It refuses, and says why, whatever a later replay could not repeat: a value that came back to the host, random numbers,
writes into inputs or weights, memory that nothing on the tape has written, tensors from nowhere, tensors that the model
keeps for its next call. After a refusal, and after a fault of the recorder's own, the forward goes on as if nobody had
listened. One operation costs about 15 µs, most of them torch's for calling a mode.
"""

import gc
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..attempt import named
from . import aliasing
from .kept import kept_tensor, tensors_in
from .memo import is_memoised
from .traits import Traits, draws, traits
from .values import Constant, Input, Operation, Tape, Value, Weight
from .weights import NamedTensors

aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
PLAIN = (Tensor, nn.Parameter)
# Of our own mode that changes nothing that a tape could hold.
IGNORED = frozenset(("detach_", "requires_grad_", "lift_fresh_copy", "_has_compatible_shallow_copy_type"))
NUMBERS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
# References to a tensor that torch made below Python for this call, of a literal: the 7 of ``x[0] = 7``, ``x[[1, 2]]``.
HELD_BY_THE_CALL = 6
RANDOM = "it draws random numbers"
UNWRITTEN = "an operation went past torch's dispatcher: memory was read that nothing recorded has written"
CAME_BACK = (
    "the size of a result depends on values",
    "a value came back from the GPU to the host",
    "a tensor came back from the GPU to the host",
)
OURS = str(Path(__file__).resolve().parent.parent)
LIBRARIES = (OURS, str(Path(torch.__file__).parent), "comfy/ops.py", "comfy/patcher_extension.py")


# Constants of earlier recordings of a module by id, as long as somebody else keeps them: a table that it made once.
_CONSTANTS: "weakref.WeakKeyDictionary[nn.Module, dict[int, weakref.ref[Tensor]]]" = weakref.WeakKeyDictionary()


class Recorder(TorchDispatchMode):
    """Records between ``__enter__`` and ``__exit__``. ``refusal``: why there is no tape, or ""."""

    def __init__(self, inputs: Sequence[Tensor], module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.refusal = ""
        self.came_back = False  # it is refused because a value came back to the host: its blocks may be recordable
        self.written: Input | Weight | None = None  # it is refused because this was written into
        self.operations: list[Operation] = []
        self.device, self._count, self._paused = device, 0, False
        self._weights = NamedTensors(module)
        self._token = object()
        self._known: dict[int, tuple[Value, Tensor]] = {}  # leaves by the tensor's id, which keeping it makes safe
        self._unwritten: set[Value] = set()
        self._memoised: set[Value] = set()  # constants that outlive the forward
        self._constant_views: dict[Value, list[Value]] = {}  # by root
        self._read_constants: set[Value] = set()  # roots of constants that a recorded operation reads
        self._filled: dict[Value, tuple[Tensor, Any]] = {}  # constants full of one number, until they are written
        self._module = module
        self._random = _random_state()
        self._earlier = _CONSTANTS.setdefault(module, {})
        self.calls_packs = False  # whether an operation is another pack's function, which may count its calls
        self._stream = _stream(device)
        self.inputs = [self._leaf(tensor, Input(index)) for index, tensor in enumerate(inputs)]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from importing ``torch._dynamo`` at a mode's first use, which takes seconds."""
        return False

    def add_input(self, tensor: Tensor) -> None:
        """One more input: a tensor that the forward took from its options."""
        if id(tensor) in self._known:  # which of the two does the forward mean? They may differ in the next call
            self.refuse("an option is a tensor that the model has by another way too")
        self.inputs.append(self._leaf(tensor, Input(len(self.inputs))))

    def refuse(self, reason: str) -> None:
        """Gives up; the first reason counts."""
        self.refusal = self.refusal or f"{reason} ({_place()})"

    def call(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], own: Callable[[], Any]) -> Any:
        """What ``own`` gives, recorded as one call of ``function`` with these arguments, whatever that does inside."""
        self._paused, paused = True, self._paused
        try:
            out = own()
        finally:
            self._paused = paused
        if not (paused or self.refusal):
            try:
                inputs: list[Value] = []
                operation = Operation(
                    function, self._lift(args, inputs), self._lift(kwargs, inputs), inputs, opaque=True
                )
                if self._unwritten and any(value.root in self._unwritten for value in inputs):
                    self.refuse(UNWRITTEN)
                self._append(operation, out if isinstance(out, (tuple, list)) else [out])
            except Exception as error:  # noqa: BLE001
                self._failed(error)
        return out

    # One operation ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.refusal or self._paused:
            return func(*args, **kwargs)
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented  # a subclass (quantised weights) takes itself apart; its operations come here
        known = traits(func)
        if known.name in IGNORED:
            return func(*args, **kwargs)
        if known.backends:  # the one that runs is recorded: which one that is may be switched around the call alone
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        inputs: list[Value] = []
        try:
            if known.name == "lift_fresh":  # its argument is a literal that has just been made
                lifted: tuple = (), {}
            else:
                lifted = self._lift(args, inputs), self._lift(kwargs, inputs) if kwargs else {}
            if known.writes >= 0 and not self.refusal:
                self._before_write(func, known, args, kwargs, lifted, inputs)
        except Exception as error:  # noqa: BLE001  ours costs the tape, never the forward
            self._failed(error)
        out = func(*args, **kwargs)
        if not self.refusal:
            try:
                self._note(func, known, args, kwargs, lifted, inputs, out)
            except Exception as error:  # noqa: BLE001
                self._failed(error)
        return out

    def _failed(self, error: Exception) -> None:
        self.refuse(f"recording failed, {named(error)}; please report it")

    def _note(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple, inputs: list[Value],
        out: Any,
    ) -> None:  # fmt: skip
        """Writes down an operation that has run."""
        if known.name == "lift_fresh":  # torch.tensor(numbers)
            self._constant(out, None, None)
            return
        if known.writes >= 0:
            self._after_write(func, known, args, kwargs, lifted, inputs)
            return
        fixed = known.of_shapes or all([type(value.leaf) is Constant for value in inputs])
        if reason := self._obstacle(func, known, args, kwargs, inputs, out, fixed):
            self.came_back = reason in CAME_BACK
            self.refuse(reason)
            return
        results = out if type(out) in (tuple, list) else (out,)
        if fixed:
            self._fixed(func, known, args, kwargs, lifted, inputs, results)
            return
        if not (known.view or known.maybe_view):
            self._append(Operation(func, *lifted, inputs), results)
            return
        if results[0] is args[0]:
            return
        bases = [self._base(known, args, inputs, result) for result in results]
        self._append(Operation(func, *lifted, inputs), results, bases)

    def _fixed(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple, inputs: list[Value],
        results: Sequence[Any],
    ) -> None:  # fmt: skip
        """What is the same at each replay is no operation but a constant."""
        operation = Operation(func, *lifted, inputs)
        for result in results:
            if not isinstance(result, Tensor) or (result is args[0] if args else False):
                continue
            value = self._constant(result, operation, self._base(known, args, inputs, result))
            if known.unwritten:
                self._unwritten.add(value)
            elif known.fills is not None:
                number = known.fill(args, kwargs)
                if number is not None:
                    self._filled[value] = result, number

    def _obstacle(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], inputs: list[Value], out: Any, fixed: bool
    ) -> str:
        if known.may_draw and draws(known, args, kwargs):
            return RANDOM
        if self._unwritten and not known.of_shapes and any(value.root in self._unwritten for value in inputs):
            if not (known.view or known.maybe_view):
                return UNWRITTEN
        if fixed:
            return ""
        if self._stream is not None and _stream(self.device) != self._stream:
            return "it works on several CUDA streams"
        if known.may_size and known.sized_by_values(args, kwargs, inputs):
            return CAME_BACK[0]
        first = out[0] if type(out) in (tuple, list) and out else out
        if not isinstance(first, Tensor):
            return CAME_BACK[1]
        if first.device != self.device and first.device.type == "cpu":
            return CAME_BACK[2]
        return ""

    def _base(self, known: Traits, args: tuple, inputs: list[Value], result: Tensor) -> Value | None:
        """The value whose memory ``result`` shares, or None."""
        if known.view and inputs and isinstance(args[0], Tensor):
            return inputs[0].root
        if known.maybe_view and inputs and isinstance(args[0], Tensor) and args[0].device == result.device:
            if torch._C._is_alias_of(result, args[0]):
                return inputs[0].root
        return None

    def _before_write(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple, inputs: list[Value]
    ) -> None:
        """Looks at an operation in place before it runs: a constant that is about to be written must be kept."""
        target = known.written(lifted[0], lifted[1])
        if not isinstance(target, Value) or (known.writes_several and not _writes_one_memory(func, lifted)):
            self.refuse(f"{known.name} writes into several tensors")
        elif known.moves:
            self.refuse(f"{known.name} changes where a tensor lies")
        elif type(target.root.leaf) is not Constant and target.root.leaf is not None:
            self.written = target.root.leaf
            self.refuse("it writes into an input or a weight")
        elif target.root in self._memoised:
            self.refuse("it writes into a tensor that it keeps")
        elif known.may_draw and draws(known, args, kwargs):
            self.refuse(RANDOM)
        elif known.turns is None and target.root.is_constant:
            root = target.root
            if root in self._read_constants or not all(value.is_constant for value in inputs):
                self._promote(root)

    def _after_write(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple, inputs: list[Value]
    ) -> None:
        tensor, target = known.written(args, kwargs), known.written(lifted[0], lifted[1])
        root = target.root
        if known.turns is not None:  # its memory is as it was, the tensor is a view of it now
            operation = Operation(known.turns, *lifted, inputs)
            if root.is_constant:
                self._constant(tensor, operation, root)
            else:
                self._append(operation, [tensor], [root])
            return
        if tensor.shape != target.shape:
            self.refuse(f"{known.name} changes where a tensor lies")
            return
        self._unwritten.discard(root)
        self._filled.pop(root, None)
        if not root.is_constant:
            self._append(Operation(func, *lifted, inputs, writes=target), [tensor])

    def _promote(self, root: Value) -> None:
        """A constant is about to be written with something that is not: from here on it is made at each replay."""
        tensor = root.leaf.tensor
        if root in self._unwritten:
            operation = root.origin
        else:
            snapshot = Value(tensor.clone(), self._next(), Constant(tensor.clone()))
            operation = Operation(aten.clone.default, (snapshot,), {}, [snapshot], [root])
        root.leaf, root.origin = None, operation
        operation.outputs = [root]
        made = [operation]
        for view in self._constant_views.pop(root, ()):
            view.leaf = None
            if view is view.origin.outputs[0]:
                made.append(view.origin)
        self.operations[:0] = made  # before everything that has read it; nobody has written to it since

    # Tensors and values -------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _append(self, operation: Operation, results: Sequence[Any], bases: Sequence[Value | None] = ()) -> None:
        for value in operation.inputs:
            if type(value.leaf) is Constant:
                self._read_constants.add(value.root)
        for index, result in enumerate(results):
            if type(result) is not Tensor and not isinstance(result, Tensor):
                operation.outputs.append(None)
                continue
            self._count += 1
            value = Value(result, self._count, None, bases[index] if bases else None)
            value.origin = operation
            result._anyshape = self._token, value
            operation.outputs.append(value)
        self.operations.append(operation)

    def _constant(self, tensor: Tensor, operation: Operation | None, base: Value | None) -> Value:
        value = Value(tensor, self._next(), Constant(tensor), base)
        value.origin = operation  # dropped by ``finish``
        if operation is not None:
            operation.outputs.append(value)
        if base is not None:
            self._constant_views.setdefault(base, []).append(value)
        tensor._anyshape = self._token, value
        self._known[id(tensor)] = value, tensor
        return value

    def _leaf(self, tensor: Tensor, leaf: Input | Weight) -> Value:
        value = Value(tensor, self._next(), leaf)
        self._known[id(tensor)] = value, tensor
        return value

    def _lift(self, item: Any, found: list[Value]) -> Any:
        """``item`` with values in place of tensors; they are added to ``found``."""
        kind = type(item)
        if kind in NUMBERS:
            return item
        if kind in PLAIN or isinstance(item, Tensor):
            value = self._value(item)
            found.append(value)
            return value
        if kind is tuple:
            return tuple([self._lift(each, found) for each in item])
        if kind is list:
            if item and type(item[0]) is int:  # sizes
                return list(item)
            return [self._lift(each, found) for each in item]
        if kind is dict:
            return {name: self._lift(each, found) for name, each in item.items()}
        return item

    def _value(self, tensor: Tensor) -> Value:
        known = self._known.get(id(tensor))
        if known is not None:
            return known[0]
        mark = getattr(tensor, "_anyshape", None)
        if mark is not None and mark[0] is self._token:  # another recording may have marked a tensor that lived on
            return mark[1]
        if weight := self._weights.find(tensor):
            return self._leaf(tensor, weight)
        earlier = self._earlier.get(id(tensor))
        if earlier is not None and earlier() is tensor:
            return self._constant(tensor, None, None)
        literal = (not tensor.shape and tensor.device.type == "cpu") or (
            tensor.ndim == 1 and tensor.dtype == torch.int64
        )
        if literal and sys.getrefcount(tensor) <= HELD_BY_THE_CALL:
            return self._constant(tensor, None, None)
        if is_memoised(tensor):
            value = self._constant(tensor, None, None)
            self._memoised.add(value)
            return value
        self.refuse(
            f"it reads a tensor {list(tensor.shape)} that is no input, no weight and not made of sizes (a cache of the "
            f"model's own, or another node's)"
        )
        return self._leaf(tensor, Weight("", ""))

    def read(self, tensor: Tensor) -> None:
        """Somebody outside of the tape reads this tensor: it must be one that we know."""
        self._value(tensor)

    def read_back(self, tensor: Tensor) -> None:
        """Somebody takes this tensor's values to Python."""
        if not (self._paused or self.refusal or self._value(tensor).is_constant):
            self.came_back = True
            self.refuse("a value came back to the host")

    def finish(self, output: Any) -> Tape | None:
        """The tape of a forward that gave ``output``; None, with a ``refusal``, where there is none."""
        found: list[Value] = []
        lifted = self._lift(output, found)
        if not found:
            self.refuse("its result is no tensor")
        elif any(value.root.is_constant for value in found):
            self.refuse("its result does not depend on what it is given")
        if self._random != _random_state():
            self.refuse(RANDOM)
        if kept := kept_tensor(self._module, self._depends):
            self.refuse(f"the model keeps a tensor for its next call ({kept})")
        if self._filled and not self.refusal and self._was_filled():
            self.refuse(UNWRITTEN)
        if self.refusal:
            return None
        aliasing.settle(self.operations, found)
        for value, _ in self._known.values():
            if value.is_constant:
                value.origin = None  # or each constant would keep what it was made of
        return Tape(aliasing.needed(self.operations, found), self.inputs, lifted, self.device)

    def close(self, output: Any) -> None:
        """Takes our marks off what lives on, and lets go of every tensor and of the model."""
        for value, tensor in self._known.values():
            tensor.__dict__.pop("_anyshape", None)
            if value.is_constant and not self.refusal:
                self._earlier[id(tensor)] = weakref.ref(tensor)
        for name in [name for name, tensor in self._earlier.items() if tensor() is None]:
            del self._earlier[name]
        for tensor in tensors_in(output):
            tensor.__dict__.pop("_anyshape", None)
        self._known.clear()
        self._filled.clear()
        self.operations = []
        self._weights = self._module = None

    def _was_filled(self) -> bool:
        """Whether somebody wrote into a tensor of zeros, say, past the dispatcher."""
        return bool(torch.stack([(tensor != number).any() for tensor, number in self._filled.values()]).any())

    def _depends(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        mark = getattr(tensor, "_anyshape", None)
        if known is not None:
            return type(known[0].leaf) is Input
        return mark is not None and mark[0] is self._token


def _writes_one_memory(func: Any, lifted: tuple) -> bool:
    """Whether all that an operation writes into are views of one tensor of the tape's: queries and keys, say."""
    written = [
        lifted[0][place] if place < len(lifted[0]) else lifted[1].get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return all(isinstance(value, Value) for value in written) and len({value.root for value in written}) == 1


class HostReads(TorchFunctionMode):
    """On a CPU a tensor's values can be read without an operation. This notices the calls that do so."""

    READS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.READS:
            self._recorder.read_back(args[0])
        return func(*args, **(kwargs or {}))


def record(forward: Callable[[], Any], recorder: Recorder) -> tuple[Any, Tape | None]:
    """(``forward``'s result, its tape or None). Without a tape ``recorder.refusal`` says why."""
    collecting = gc.isenabled()
    with torch.inference_mode(), ExitStack() as stack:
        if recorder.device.type == "cpu":
            stack.enter_context(HostReads(recorder))
        gc.disable()  # a tape is many small objects, which it would go through again and again
        try:
            with recorder:
                out = forward()
        finally:
            if collecting:
                gc.enable()
        tape = None
        try:
            tape = recorder.finish(out)
        except Exception as error:  # noqa: BLE001  ours costs the tape, never the forward
            recorder._failed(error)
        recorder.close(out)
        return out, tape


def _random_state() -> tuple:
    """Of the generators that a forward may draw from past torch's dispatcher."""
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state(legacy=False)["state"] if numpy is not None else {}
    return random.getstate(), of_numpy.get("pos"), bytes(of_numpy.get("key", b""))


def _stream(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch._C._cuda_getCurrentRawStream(device.index or 0)


def _place() -> str:
    """The file and line of the code that is running, torch's and ours left out."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in LIBRARIES):
            return f"{'/'.join(Path(file).parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "at an unknown place"
