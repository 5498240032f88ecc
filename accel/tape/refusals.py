"""Why a forward is not recordable, as its user reads it, and what shows that: random numbers, streams, values on the
host.
"""

import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..reasons import say
from .traits import Traits, draws
from .values import Value

RANDOM = say("draws")
UNWRITTEN = say("unwritten")
STREAMS = say("streams")
CAME_BACK = say("size_of_values"), say("value_came_back"), say("tensor_came_back")
NO_ORIGIN = say("no_origin", shape="[").partition("[")[0]
APART = UNWRITTEN, NO_ORIGIN  # what code that computes apart from torch looks like
# Refused forwards that may run once more: they have changed nothing.
FETCHED = (STREAMS, NO_ORIGIN)  # what weights look like that do not lie on the GPU
BACK = (*CAME_BACK, say("read_back"))
HARMLESS = (*BACK, *FETCHED)
# Refused for what the model's code does, whatever the size and wherever weights lie.
OF_THE_CODE = (*BACK, NO_ORIGIN, say("changes_itself", change=""))
OURS = str(Path(__file__).resolve().parent.parent)
LIBRARIES = (OURS, str(Path(torch.__file__).parent), "comfy/ops.py", "comfy/patcher_extension.py")


class BrokenOff(BaseException):
    """Ends a forward that is to run once more. The model's code must not catch it as an error."""


class Refusal:
    """Why there is no tape, with the place in the code, or ""; the first reason counts.

    breaks_off: asked where a value came back to the host; if it says so, the forward ends there, by ``BrokenOff``.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.breaks_off: Callable[[], bool] = bool

    def __call__(self, reason: str) -> None:
        is_first = not self.reason
        self.reason = self.reason or f"{reason} ({_place()})"
        if is_first and reason in BACK and self.breaks_off():
            raise BrokenOff


class World:
    """What a forward must not touch or change: the generators past torch's dispatcher, and the stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._random, self._stream = device, random_state(), _stream(device)

    def was_drawn_from(self) -> bool:
        """Whether somebody drew a random number."""
        return self._random != random_state()

    def obstacle(self, known: Traits, args: tuple, kwargs: dict[str, Any], inputs: list[Value], out: Any) -> str:
        """Why an operation that has run, and depends on the call, cannot be repeated; "" if it can."""
        if self._stream is not None and _stream(self._device) != self._stream:
            return STREAMS
        if known.may_size and known.sized_by_values(args, kwargs, inputs):
            return CAME_BACK[0]
        first = out[0] if type(out) in (tuple, list) and out else out
        if not isinstance(first, Tensor):
            return CAME_BACK[1]
        if first.device != self._device and first.device.type == "cpu":
            return CAME_BACK[2]
        return ""


def obstacle_to_writing(func: Any, known: Traits, args: tuple, kwargs: dict[str, Any], lifted: tuple) -> str:
    """Why an operation in place cannot be repeated, whatever it writes into; "" if it can."""
    target = known.written(lifted[0], lifted[1])
    if not isinstance(target, Value) or (known.writes_several and not _writes_one_memory(func, lifted)):
        return say("writes_several", name=known.name)
    if known.moves:
        return say("moves", name=known.name)
    return RANDOM if known.may_draw and draws(known, args, kwargs) else ""


class HostReads(TorchFunctionMode):
    """On a CPU a tensor's values can be read without an operation. This tells ``told`` of the tensors."""

    READS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))

    def __init__(self, told: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(
        self, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.READS:
            self._told(args[0])
        return func(*args, **(kwargs or {}))


def _writes_one_memory(func: Any, lifted: tuple) -> bool:
    """Whether all that an operation writes into are views of one tensor of the tape's: queries and keys, say."""
    written = [
        lifted[0][place] if place < len(lifted[0]) else lifted[1].get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return all(isinstance(value, Value) for value in written) and len({value.root for value in written}) == 1


def random_state() -> tuple:
    """Of the generators that a forward may draw from past torch's dispatcher."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), pickle.dumps(numpy.random.get_state(legacy=False)) if numpy is not None else b""


@dataclass(frozen=True)
class Generators:
    """The states of all generators that another pack's patch may draw from."""

    device: torch.device
    states: tuple

    @classmethod
    def now(cls, device: torch.device) -> "Generators":
        own = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return cls(device, (*random_state(), bytes(torch.get_rng_state().numpy()), bytes(own.numpy())))

    def restore(self) -> None:
        """What draws from them draws the same numbers again."""
        of_python, of_numpy, of_torch, own = self.states
        random.setstate(of_python)
        if of_numpy:
            sys.modules["numpy"].random.set_state(pickle.loads(of_numpy))
        torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(own), dtype=torch.uint8), self.device)


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
