"""The repeated blocks of one model, and our ``forward`` in place of theirs while the model's own forward runs."""

import functools
import threading
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .parts_seen import is_restored
from .tape import blocks

# What runs in place of a block's own forward: (path, block, its own forward, arguments, keyword arguments) -> result
Ours = Callable[[str, nn.Module, Callable[..., Any], tuple, dict[str, Any]], Any]

_INSTALLING = threading.Lock()


class _Installed(functools.partial):
    """A forward of ours on a block."""

    thread: int  # that it answers in
    before: "_Installed | None"  # what it took the place of


class Blocks:
    """The blocks of one model by path, and which of them are alike. Holds no module. stages: see ``blocks.find``."""

    def __init__(self, stages: bool = False) -> None:
        self._stages = stages
        self._structure: int | None = None  # of the model that all of the following is about
        self.paths: list[str] = []
        self._alike: dict[str, int | None] = {}
        self._kinds: dict[Hashable, int] = {}  # likenesses are long, and compared at each call

    def look(self, model: nn.Module, structure: int) -> bool:
        """Finds the blocks of ``model``. Returns whether its code has changed since the last look."""
        if self._structure == structure:
            return False
        self._alike.clear()
        self._kinds.clear()
        self.paths, self._structure = blocks.find(model, self._stages), structure
        return True

    def forget(self) -> None:
        """Makes the next look find everything again, because the form of a weight changed, for example."""
        self._structure = None

    def likeness(self, path: str, block: nn.Module) -> int | None:
        """Returns the same value for blocks that are alike, and None for a block that must be left alone."""
        if path not in self._alike:
            found = blocks.likeness(block)
            self._alike[path] = None if found is None else self._kinds.setdefault(found, len(self._kinds))
        return self._alike[path]

    @contextmanager
    def ours(self, model: nn.Module, forward: Ours, but: Container[str] = ()) -> Iterator[None]:
        """While the body runs, ``forward`` runs in place of each block's own, in this thread. but: paths of others.

        Within one another, the inner body's is called first, and the outer's is what it takes for the block's own.
        """
        installed: list[tuple[nn.Module, _Installed]] = []
        thread = threading.get_ident()

        def run(path: str, block: nn.Module, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return own(*args, **kwargs)
            return forward(path, block, own, args, kwargs)

        try:
            with _INSTALLING:
                for path in [path for path in self.paths if path not in but]:
                    block = model.get_submodule(path)
                    before = block.__dict__.get("forward")
                    mine = before is None or getattr(before, "thread", None) == thread
                    if mine or is_restored(block, "forward"):  # else it is somebody else's
                        ours = _Installed(run, path, block, block.forward)
                        ours.thread, ours.before = thread, before
                        installed.append((block, ours))
                        block.__dict__["forward"] = ours
            yield
        finally:
            with _INSTALLING:
                for block, ours in installed:
                    if block.__dict__.get("forward") is ours:
                        del block.__dict__["forward"]
                        if ours.before is not None:
                            block.__dict__["forward"] = ours.before
