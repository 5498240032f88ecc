"""The forward that this thread runs: what patches of other packs that are called in it get, give, and have read."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .noise_level import NoiseLevel
from .refusals import Generators

_HERE = threading.local()


@dataclass
class Forward:
    """One forward of the model. playing: patches give what they gave while it was recorded, and are not called.

    silent: they give zeros, and are not called. log: the places of those that were called, and what they gave since
    one of them ``keeps`` something: a forward that is broken off must not call them twice. look: at what a patch keeps
    now. drawn: where the recording did not show that any does, generators before the forward.
    levels: tensors of the options as patches get them, by the tensors' ids.
    """

    options: Mapping[Any, Any]
    playing: bool = False
    silent: bool = False
    log: list[tuple[tuple, Any]] = field(default_factory=list)
    keeps: bool = False
    drawn: Generators | None = None
    look: Callable[[Any], Any] = id
    levels: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, holds: bool, device: torch.device, look: Callable[[Any], Any]) -> None:
        """A program runs in it. holds: its patches keep something, as their recording has shown."""
        self.log, self.keeps, self.drawn = [], holds, None if holds else Generators.now(device)
        self.look = look

    def broken_off(self) -> list[tuple[tuple, Any]] | None:
        """What patches gave in it, where they must not be called twice; None if they may be.

        They may unless they keep something. Those that have begun to draw random numbers draw the same ones again.
        """
        if self.drawn is not None:
            self.drawn.restore()
        return self.log if self.keeps else None

    def call(self, place: tuple, patch: Any, perform: Callable[[], Any]) -> Any:
        """A program calls the patch there. What that gave."""
        before = None if self.keeps else self.look(patch)
        done = perform()
        if not self.keeps:
            after = self.look(patch)
            self.keeps = after is None or (after is not before and after != before)
        kept = done.apart() if self.keeps else None
        if kept is not None and self.drawn is not None:  # those before it may be called again, and draw again
            kept.drawn = Generators.now(self.drawn.device)
        self.log.append((place, kept))
        return done


def now() -> Forward | None:
    """The forward, if there is one."""
    return getattr(_HERE, "forward", None)


@contextmanager
def forward(options: Mapping[Any, Any]) -> Iterator[Forward]:
    """The body runs programs for a forward with these options."""
    before, _HERE.forward = now(), Forward(options)
    try:
        yield _HERE.forward
    finally:
        _HERE.forward = before


@contextmanager
def silence() -> Iterator[None]:
    """The body runs programs, or captures them, for what that does on the GPU: nothing reads the results."""
    this = now()
    if this is None:  # a forward that calls no patch
        with forward({}), silence():
            yield
        return
    before, this.silent = this.silent, True
    try:
        yield
    finally:
        this.silent = before


def level_of(tensor: Tensor) -> Tensor:
    """A tensor of the forward's options whose numbers are read once in it."""
    this = now()
    if this is None:
        return NoiseLevel.of(tensor)
    if id(tensor) not in this.levels:  # the options hold it as long as the forward takes
        this.levels[id(tensor)] = NoiseLevel.of(tensor)
    return this.levels[id(tensor)]


def numbers_of(tensor: Tensor) -> Tensor:
    """The numbers of such a tensor, on the CPU."""
    level = level_of(tensor)
    return level.on_host() if isinstance(level, NoiseLevel) else level.cpu()
