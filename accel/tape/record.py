"""The recorder: writes down what one forward does, while it runs as it is.

It refuses, and says why, whatever a later replay could not repeat: a value that came back to the host, random numbers,
writes into inputs or weights, memory that nothing on the tape has written, tensors from nowhere. After a refusal the
forward goes on as if nobody had listened. One operation costs about 10 µs.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import aliasing
from .memo import is_memoised
from .traits import Traits, is_random, traits
from .values import Constant, Input, Operation, Tape, Value, Weight
from .weights import NamedTensors

aten = torch.ops.aten
PLAIN = (Tensor, nn.Parameter)
# Of our own mode that changes nothing that a tape could hold.
IGNORED = frozenset(("detach_", "requires_grad_", "lift_fresh_copy"))
REPLACED_MEMORY = frozenset(("set_", "resize_", "resize_as_", "as_strided_"))
OURS = str(Path(__file__).resolve().parent.parent)
LIBRARIES = (OURS, str(Path(torch.__file__).parent), "comfy/ops.py", "comfy/patcher_extension.py")


class Recorder(TorchDispatchMode):
    """Records between ``__enter__`` and ``__exit__``. ``refusal``: why there is no tape, or ""."""

    def __init__(self, inputs: Sequence[Tensor], module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.refusal = ""
        self.operations: list[Operation] = []
        self.device, self._count, self._paused = device, 0, False
        self._weights = NamedTensors(module)
        self._token = object()
        self._known: dict[int, tuple[Value, Tensor]] = {}  # leaves by the tensor's id, which keeping it makes safe
        self._unwritten: set[Value] = set()
        self._kept: set[Value] = set()  # constants that outlive the forward
        self._constant_views: dict[Value, list[Value]] = {}  # by root
        self._read_constants: set[Value] = set()  # roots of constants that a recorded operation reads
        self._stream = _stream(device)
        self.inputs = [self._leaf(tensor, Input(index)) for index, tensor in enumerate(inputs)]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from importing ``torch._dynamo`` at a mode's first use, which takes seconds."""
        return False

    def add_input(self, tensor: Tensor) -> None:
        """One more input: a tensor that the forward took from its options."""
        if id(tensor) not in self._known:
            self.inputs.append(self._leaf(tensor, Input(len(self.inputs))))

    def refuse(self, reason: str) -> None:
        """Gives up; the first reason counts."""
        self.refusal = self.refusal or f"{reason} ({_place()})"

    def call(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls ``function`` and records it as one operation, whatever it does inside."""
        inputs: list[Value] = []
        lifted = self._lift(args, inputs), self._lift(kwargs, inputs)
        self._paused, paused = True, self._paused
        try:
            out = function(*args, **kwargs)
        finally:
            self._paused = paused
        if not (paused or self.refusal):
            operation = Operation(function, *lifted, inputs, opaque=True)
            self._append(operation, out if isinstance(out, (tuple, list)) else [out])
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
        inputs: list[Value] = []
        if known.name == "lift_fresh":  # torch.tensor(numbers)
            out = func(*args, **kwargs)
            self._constant(out, None, None)
            return out
        lifted = self._lift(args, inputs), self._lift(kwargs, inputs)
        if self.refusal:
            return func(*args, **kwargs)
        if known.writes >= 0:
            return self._write(func, known, args, kwargs, lifted, inputs)
        out = func(*args, **kwargs)
        fixed = known.of_shapes or all(value.is_constant for value in inputs)
        if reason := self._obstacle(func, known, args, kwargs, inputs, out, fixed):
            self.refuse(reason)
            return out
        results = out if isinstance(out, (tuple, list)) else [out]
        operation = Operation(func, *lifted, inputs)
        if fixed:
            for result in results:
                if isinstance(result, Tensor):
                    value = self._constant(result, operation, self._base(known, args, inputs, result))
                    if known.unwritten:
                        self._unwritten.add(value)
            return out
        source = inputs[0] if inputs else None
        if known.maybe_view and results[0] is args[0]:
            return out
        bases = [
            self._base(known, args, [source, *inputs], result) if isinstance(result, Tensor) else None
            for result in results
        ]
        self._append(operation, results, bases)
        return out

    def _obstacle(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], inputs: list[Value], out: Any, fixed: bool
    ) -> str:
        if is_random(func, args, kwargs):
            return "it draws random numbers"
        if not known.of_shapes and self._unwritten and any(value.root in self._unwritten for value in inputs):
            if not (known.view or known.maybe_view):
                return "an operation went past torch's dispatcher: memory was read that nothing recorded has written"
        if fixed:
            return ""
        if _stream(self.device) != self._stream:
            return "it works on several CUDA streams"
        if known.of_values or (known.name == "index" and any(v.dtype in (torch.bool, torch.uint8) for v in inputs[1:])):
            return "the size of a result depends on values"
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, Tensor):
            return "a value came back from the GPU to the host"
        if first.device != self.device and first.device.type == "cpu":
            return "a tensor came back from the GPU to the host"
        return ""

    def _base(self, known: Traits, args: tuple, inputs: list[Value], result: Tensor) -> Value | None:
        """The value whose memory ``result`` shares, or None."""
        if known.view and inputs and isinstance(args[0], Tensor):
            return inputs[0].root
        if known.maybe_view and inputs and isinstance(args[0], Tensor) and args[0].device == result.device:
            if result.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
                return inputs[0].root
        return None

    def _write(
        self, func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple, inputs: list[Value]
    ) -> Any:
        argument = func._schema.arguments[known.writes].name
        in_args = known.writes < len(args)
        tensor = args[known.writes] if in_args else kwargs.get(argument)
        target = lifted[0][known.writes] if in_args else lifted[1].get(argument)
        if not isinstance(target, Value) or known.name in REPLACED_MEMORY:
            self.refuse(f"{known.name} changes where a tensor lies")
            return func(*args, **kwargs)
        root = target.root
        if isinstance(root.leaf, (Input, Weight)) or root in self._kept:
            self.refuse("it writes into an input or a weight")
            return func(*args, **kwargs)
        if is_random(func, args, kwargs):
            self.refuse("it draws random numbers")
            return func(*args, **kwargs)
        if root.is_constant and (root in self._read_constants or not all(value.is_constant for value in inputs)):
            self._promote(root)
        out = func(*args, **kwargs)
        self._unwritten.discard(root)
        if root.is_constant:
            return out
        operation = Operation(func, *lifted, inputs, writes=target)
        self._append(operation, [tensor])
        return out

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
        self.operations.append(operation)
        for view in self._constant_views.pop(root, ()):
            view.leaf = None
            if view is view.origin.outputs[0]:
                self.operations.append(view.origin)

    # Tensors and values -------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _append(self, operation: Operation, results: Sequence[Any], bases: Sequence[Value | None] = ()) -> None:
        for value in operation.inputs:
            if value.is_constant:
                self._read_constants.add(value.root)
        for index, result in enumerate(results):
            if not isinstance(result, Tensor):
                operation.outputs.append(None)
                continue
            value = Value(result, self._next(), base=bases[index] if bases else None)
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
        if isinstance(item, Tensor):
            value = self._value(item)
            found.append(value)
            return value
        kind = type(item)
        if kind is tuple:
            return tuple([self._lift(each, found) for each in item])
        if kind is list:
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
        if is_memoised(tensor):
            value = self._constant(tensor, None, None)
            self._kept.add(value)
            return value
        self.refuse(
            f"it reads a tensor {list(tensor.shape)} that is no input, no weight and not made of sizes (a cache of the "
            f"model's own, or another node's)"
        )
        return self._leaf(tensor, Weight("", ""))

    def read_back(self, tensor: Tensor) -> None:
        """Somebody takes this tensor's values to Python."""
        if not (self._paused or self.refusal or self._value(tensor).is_constant):
            self.refuse("a value came back to the host")

    def finish(self, output: Any) -> Tape | None:
        """The tape of a forward that gave ``output``; None, with a ``refusal``, where there is none."""
        found: list[Value] = []
        lifted = self._lift(output, found)
        if not found:
            self.refuse("its result is no tensor")
        if self.refusal:
            return None
        aliasing.settle(self.operations, found)
        for value, _ in self._known.values():
            if value.is_constant:
                value.origin = None  # or each constant would keep what it was made of
        return Tape(aliasing.needed(self.operations, found), self.inputs, lifted, self.device)


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
    with torch.inference_mode(), ExitStack() as stack:
        if recorder.device.type == "cpu":
            stack.enter_context(HostReads(recorder))
        with recorder:
            out = forward()
        return out, recorder.finish(out)


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
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
