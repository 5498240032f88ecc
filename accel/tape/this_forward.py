"""The forward that this thread runs: what patches of other packs that are called in it get, give, and have read."""

import threading
from collections.abc import Iterator, Mapping
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

    silent: they give zeros, and are not called. log: the places of those that were called, and what they gave if
    ``keeps``: a forward that is broken off must not call them twice. drawn: if not ``keeps``, generators before it.
    levels: tensors of the options as patches get them, by the tensors' ids.
    """

    options: Mapping[Any, Any]
    playing: bool = False
    silent: bool = False
    log: list[tuple[tuple, Any]] = field(default_factory=list)
    keeps: bool = False
    drawn: Generators | None = None
    levels: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, holds: bool, device: torch.device) -> None:
        """A program runs in it. holds: its patches keep something, as their recording has shown."""
        self.log, self.keeps, self.drawn = [], holds, None if holds else Generators.now(device)


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
