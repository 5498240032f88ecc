"""One sampling run with skipped steps: the features it may reuse, and when it must not.

A feature belongs to the rows of one prompt (ComfyUI's cond uuid) under one set of patches. ComfyUI splits, joins and
reorders prompts between steps, so features are stored row by row and joined again for each call. A call skips only if
*every* prompt in it has a feature from the latest full step, of the same latent shape, dtype and device; anything else
runs in full, and if that was not planned, it is counted with its reason.

Nothing here reads a value from the GPU: the schedule and the axis are known before the run starts.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..stats import SkipStats
from .forecast import DAMPING, History

RUN_KEY = "anyshape_skip_run"  # in ComfyUI's transformer_options, for as long as the run lasts
AXES: dict[str, Callable[[int, float], float]] = {
    "step": lambda index, sigma: float(index),
    "sigma": lambda index, sigma: sigma,
    "log_sigma": lambda index, sigma: math.log(max(sigma, 1e-3)),
}
AXIS = "sigma"  # measured, see docs/performance.md
MAX_EVALUATIONS = 4  # of the model in one step of a sampler; more means that the sampler does not say where it is

PLANNED = ""
SILENT_SAMPLER = "this sampler does not report its steps, so every step is full; use euler, dpmpp_2m or another one"
CALLED_TWICE = (
    "a prompt is evaluated twice a step on the same patches (SAG, context windows): which feature belongs to which "
    "call cannot be told, so that prompt is never skipped"
)
NEWCOMER = "a prompt or a patch was not there at the last full step"
OTHER_LATENT = "the latent's size, dtype or device changed in mid-run"


class Latent(NamedTuple):
    """What a feature must agree in with the call that reuses it."""

    shape: tuple[int, ...]  # of one prompt's rows
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Programs:
    """One call's two ways. ``full`` gives (output, deep feature, or None where it cannot be had)."""

    full: Callable[[], tuple[Tensor, Tensor | None]]
    skipped: Callable[[Tensor], Tensor]  # takes the deep feature, which it may write into


@dataclass
class _Entry:
    latent: Latent
    history: History
    step: int = -1  # of the latest feature
    evaluation: int = -1


@dataclass
class SkipRun:
    """See the module. Made when sampling starts, closed when it ends."""

    sigmas: Sequence[float]  # of every step
    full: frozenset[int]  # steps that run every block
    depth: int  # input blocks 0..depth and as many output blocks run on every step
    order: int
    stats: SkipStats
    hooks: Callable[[], Any] = lambda: None  # ComfyUI's HookGroup that is applied to the weights now, or None
    axis: str = AXIS
    damping: float = DAMPING
    step: int = 0
    _evaluation: int = 0
    _since_step: int = 0
    _entries: dict[Hashable, _Entry] = field(default_factory=dict)
    _called_twice: set[Hashable] = field(default_factory=set)
    _kept_alive: dict[int, Any] = field(default_factory=dict)  # objects whose id is part of a prompt's key
    _started: float = field(default_factory=time.perf_counter)

    @property
    def skips(self) -> bool:
        """Whether any step is meant to be skipped."""
        return len(self.full) < len(self.sigmas)

    def begin_step(self, step: int) -> None:
        """The sampler has done all steps before ``step``."""
        self.step, self._since_step = step, 0

    def begin_evaluation(self) -> None:
        """The sampler asks for one prediction: all calls until the next one belong to it."""
        self._evaluation += 1
        self._since_step += 1
        self.stats.begin_evaluation()

    def call(self, prompts: Sequence[Hashable], x: Tensor, programs: Programs) -> Tensor:
        """The model's output for one call; prompts: a key for each equal share of the rows of x [N, C, H, W]."""
        latent = Latent((len(x) // len(prompts), *x.shape[1:]), x.dtype, x.device)
        reason = self._why_full(prompts, latent)
        if reason is None:
            self.stats.count(skipped=True)
            return programs.skipped(self._forecast(prompts))
        self.stats.count(skipped=False, reason=reason)
        out, deep = programs.full()
        self._store(prompts, latent, deep)
        return out

    def in_full(self, reason: str = PLANNED) -> None:
        """Counts a call that is not cut in pieces: it cannot be, or no step is skipped anyway."""
        self.stats.count(skipped=False, reason=reason)

    def identity(self, thing: Any) -> int:
        """A key for ``thing`` that no other object gets during this run, even if this one is forgotten elsewhere."""
        self._kept_alive[id(thing)] = thing
        return id(thing)

    def close(self) -> None:
        """Gives the features back to the allocator."""
        self._entries.clear()
        self._kept_alive.clear()
        self.stats.seconds = time.perf_counter() - self._started

    def _why_full(self, prompts: Sequence[Hashable], latent: Latent) -> str | None:
        """Why this call runs every block: ``PLANNED``, or a reason that counts; None if it need not."""
        self._note_repeated(prompts)
        if self._since_step > MAX_EVALUATIONS:
            return SILENT_SAMPLER
        if self.step in self.full or self.step >= len(self.sigmas):
            return PLANNED
        if any(prompt in self._called_twice for prompt in prompts):
            return CALLED_TWICE
        entries = [self._entries.get(prompt) for prompt in prompts]
        latest = max((step for step in self.full if step < self.step), default=0)
        if any(entry is None or entry.step < latest for entry in entries):
            return NEWCOMER
        return OTHER_LATENT if any(entry.latent != latent for entry in entries) else None

    def _note_repeated(self, prompts: Sequence[Hashable]) -> None:
        """Finds prompts that come twice in one evaluation, and forgets what is known of them."""
        for index, prompt in enumerate(prompts):
            entry = self._entries.get(prompt)
            if prompt in prompts[:index] or (entry and entry.evaluation == self._evaluation):
                self._called_twice.add(prompt)
                self._entries.pop(prompt, None)
            elif entry:
                entry.evaluation = self._evaluation

    def _position(self) -> float:
        step = min(self.step, len(self.sigmas) - 1)
        return AXES[self.axis](step, self.sigmas[step])

    def _forecast(self, prompts: Sequence[Hashable]) -> Tensor:
        """The deep feature of the call's rows, as a tensor of its own."""
        return torch.cat([self._entries[prompt].history.at(self._position()) for prompt in prompts])

    def _store(self, prompts: Sequence[Hashable], latent: Latent, deep: Tensor | None) -> None:
        if deep is None:
            return
        for prompt, rows in zip(prompts, deep.chunk(len(prompts)), strict=True):
            if prompt not in self._called_twice:
                entry = self._entry(prompt, latent)
                entry.history.add(self._position(), rows)
                entry.step, entry.evaluation = self.step, self._evaluation
        self.stats.bytes = max(self.stats.bytes, sum(entry.history.bytes for entry in self._entries.values()))

    def _entry(self, prompt: Hashable, latent: Latent) -> _Entry:
        """The prompt's entry; a new one where the latent is another, or the noise has risen again (a restart)."""
        entry = self._entries.get(prompt)
        if entry is None or entry.latent != latent or self._has_risen(entry):
            entry = self._entries[prompt] = _Entry(latent, History(self.order, self.damping))
        return entry

    def _has_risen(self, entry: _Entry) -> bool:
        step = min(self.step, len(self.sigmas) - 1)
        return 0 <= entry.step < len(self.sigmas) and self.sigmas[step] > self.sigmas[entry.step]
