"""The calls of repeated blocks while a forward is recorded: which operations each made, what it was given and gave."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .block_forwards import Ours
from .tape.middle import BlockCall
from .tape.options import NotedOptions
from .tape.record import Recorder
from .tape.values import Operation, Value, tensors_in


class BlockCalls:
    """The calls, in order, that ``recorder`` heard."""

    def __init__(self, recorder: Recorder) -> None:
        self.calls: list[BlockCall] = []
        self._recorder, self._inside = recorder, False
        recorder.apart = True

    def noting(self, forward: Ours) -> Ours:
        """``forward``, which runs in place of each block's own, with its calls noted; not what a block calls itself."""

        def run(path: str, block: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            recorder = self._recorder
            if self._inside:
                return forward(path, block, own, args, kwargs)
            given = None if recorder.is_deaf else recorder.guarded(lambda: self._given([*args, *kwargs.values()]))
            before = recorder.operations[-1] if recorder.operations else None
            self._inside = True
            try:
                out = forward(path, block, own, args, kwargs)
            finally:
                self._inside = False
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
