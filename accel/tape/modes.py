"""What sees each operation of torch's while a forward runs."""

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
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
        self._depth = 0  # it may be within itself

    def __enter__(self) -> "Operations":
        if not self._depth:
            _AS_WRITTEN.__enter__()
        self._depth += 1
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._depth -= 1
            if not self._depth:
                _AS_WRITTEN.__exit__()

    @contextmanager
    def left(self) -> Iterator[None]:
        """The body runs as without the mode: what others gave to ``torch.compile`` is compiled, too."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


class _AsWritten:
    """Within it, what ``torch.compile`` made of some code runs that code: from the first thread's on to the last's."""

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0
        self._stance: AbstractContextManager | None = None

    def __enter__(self) -> None:
        with self._lock, suppress(RuntimeError):  # raised where somebody compiled what called this forward
            self._threads += 1
            if self._stance is None and "torch._dynamo" in sys.modules:  # else nobody has compiled anything
                self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *error: object) -> None:
        with self._lock, suppress(RuntimeError):
            self._threads -= 1
            if self._stance is not None and not self._threads:
                self._stance.__exit__(None, None, None)
                self._stance = None


_AS_WRITTEN = _AsWritten()
