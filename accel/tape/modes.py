"""What sees each operation of torch's while a forward runs."""

import sys
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """A mode within which code that other nodes gave to ``torch.compile`` runs as it was written.

    Under any mode dynamo compiles none of it, and remembers that: such code would not be compiled for the rest of the
    process, whoever runs it. It would compile the Python that watches the operations instead.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from importing ``torch._dynamo`` at a mode's first operation, which takes seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self._entered: list[AbstractContextManager] = []  # it may be within itself

    def __enter__(self) -> "Operations":
        entered = nullcontext() if self._entered else _as_written()
        entered.__enter__()
        self._entered.append(entered)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._entered.pop().__exit__(kind, error, trace)


def _as_written() -> AbstractContextManager:
    """Within it, what ``torch.compile`` made of some code runs that code. It holds for all threads."""
    if "torch._dynamo" not in sys.modules:  # then nobody has compiled anything
        return nullcontext()
    try:
        return torch.compiler.set_stance("force_eager")
    except RuntimeError:  # somebody compiled what called this forward
        return nullcontext()
