"""Which operations each repeated block made, what it was given and what it gave: where a tape may be cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..block_forwards import Ours
from .kept import tensors_in
from .options import NotedOptions
from .record import Recorder
from .values import Operation, Value


@dataclass(eq=False)
class BlockCall:
    """One call of a block, in values of the tape. given, out: the tensors among its arguments and in its result."""

    path: str
    operations: list[Operation]
    given: list[Value]
    out: list[Value]

    @property
    def list_path(self) -> str:
        """Of the list that the block is in."""
        return self.path.rpartition(".")[0]


class BlockCalls:
    """The calls of blocks, in order, while ``recorder`` listens."""

    def __init__(self, recorder: Recorder) -> None:
        self.calls: list[BlockCall] = []
        self._recorder = recorder
        recorder.apart = True

    def noting(self, forward: Ours) -> Ours:
        """``forward``, which runs in place of each block's own, with its calls noted."""

        def run(path: str, block: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            recorder = self._recorder
            given = None if recorder.is_deaf else recorder.guarded(lambda: self._given([*args, *kwargs.values()]))
            before = recorder.operations[-1] if recorder.operations else None
            out = forward(path, block, own, args, kwargs)
            if given is not None and not recorder.is_deaf:
                recorder.guarded(lambda: self._note(path, given, before, out))
            return out

        return run

    def _given(self, arguments: list[Any]) -> list[Value]:
        """Streams lie in plain containers; nothing is asked of the options, which note who reads them."""
        plain = [item for item in arguments if not isinstance(item, NotedOptions)]
        return [self._recorder.value(tensor) for tensor in tensors_in(plain)]

    def _note(self, path: str, given: list[Value], before: Operation | None, out: Any) -> None:
        made: list[Operation] = []
        for operation in reversed(self._recorder.operations):
            if operation is before:
                break
            made.append(operation)
        values = [self._recorder.value(tensor) for tensor in tensors_in(out)]
        self.calls.append(BlockCall(path, made[::-1], given, values))
