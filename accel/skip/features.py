"""One sampling run with skipped steps: which features it may reuse, and when it must not.

Features stand for the output of the skipped blocks: one tensor of a UNet, one for each stream of a
transformer. They belong to the rows of one prompt (ComfyUI's cond uuid) under one set of patches, for one latent
shape, dtype and device. ComfyUI splits, joins and reorders prompts between steps, so features are stored by prompt and
joined again for each call. A call skips only if *every* prompt in it has features from the latest full step; anything
else runs in full, and if that was not planned, it is counted with its reason.

Nothing here reads a value from the GPU: the schedule and the axis are known before the run starts.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reasons import say
from ..stats import SkipStats
from .forecast import History
from .unrecorded import UnrecordedBlocks
from .unrecorded_stages import UnrecordedStages

RUN_KEY = "anyshape_skip_run"  # in ComfyUI's transformer_options, for as long as the run lasts
MAX_EVALUATIONS = 4  # of the model in one step of a sampler; more means that the sampler does not say where it is

PLANNED = ""
OWN_STEPS = say("own_steps")
FAILED = say("skip_failed")
UNRECORDED = say("unrecorded")
SILENT_SAMPLER = say("silent_sampler")
CALLED_TWICE = say("called_twice")
UNEVEN = say("uneven")
NEWCOMER = say("newcomer")


Features = tuple[Tensor, ...]


class Part(NamedTuple):
    """Rows of a call that features belong to."""

    prompt: Hashable
    shape: tuple[int, ...]  # of the rows of the latent
    dtype: torch.dtype
    device: torch.device


class Elsewhere(NamedTuple):
    """Features of other parts than those of the call: it turned out to be on no tape. prompts: theirs."""

    prompts: Sequence[Hashable]
    features: Features


@dataclass(frozen=True)
class Programs:
    """One call's two ways. ``full`` gives (output, features; why there never are any; or None if just not now)."""

    full: Callable[[], tuple[Tensor, Features | Elsewhere | str | None]]
    skipped: Callable[[Features], Tensor | None]  # given what it may write into; None where it cannot


@dataclass
class _Entry:
    histories: list[History]  # one for each of the features
    step: int = -1  # of the latest ones

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(history.shape for history in self.histories)

    evaluation: int = -1


@dataclass
class SkipRun:
    """See the module. Made when sampling starts, closed when it ends."""

    sigmas: Sequence[float]  # of every step
    full: frozenset[int]  # steps that run every block
    depth: int | None  # input blocks 0..depth, or as many blocks at either end, run on every step; None: as it fits
    history: Callable[[], History]  # makes what forecasts one feature
    stats: SkipStats
    hooks: Callable[[], Any] = lambda: None  # ComfyUI's HookGroup that is applied to the weights now, or None
    why_all_full: str = PLANNED  # where no step is skipped although the user asked for it
    step: int = 0
    _evaluation: int = 0
    _since_step: int = 0
    _entries: dict[Part, _Entry] = field(default_factory=dict)
    _called_twice: set[Part] = field(default_factory=set)
    _never: dict[Part, str] = field(default_factory=dict)  # why a full step gives no features for these rows
    refused: dict[int, str] = field(default_factory=dict)  # by id of a model: why its forward is on no tape
    unrecorded: dict[int, UnrecordedBlocks | UnrecordedStages] = field(default_factory=dict)  # and its blocks
    _kept_alive: dict[int, Any] = field(default_factory=dict)  # objects whose id is part of a prompt's key
    _started: float = field(default_factory=time.perf_counter)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SkipRun":
        """It lies in ``model_options``, which a pack may copy to the bottom: the copy's calls are of the same run."""
        return self

    @property
    def skips(self) -> bool:
        """Whether any step is planned to be skipped."""
        return len(self.full) < len(self.sigmas)

    def begin_step(self, step: int) -> None:
        """Notes that the sampler has done all steps before ``step``."""
        self.step, self._since_step = step, 0

    def begin_evaluation(self) -> None:
        """Notes that the sampler asks for one prediction. All calls until the next one belong to it."""
        self._evaluation += 1
        self._since_step += 1
        self.stats.begin_evaluation()

    def call(self, prompts: Sequence[Hashable], x: Tensor, programs: Programs) -> Tensor:
        """The model's output for one call; prompts: a key for each equal share of the rows of x [N, C, H, W]."""
        if not prompts or len(x) % len(prompts):
            self.in_full(UNEVEN)
            return programs.full()[0]
        shape = (len(x) // len(prompts), *x.shape[1:])
        parts = [Part(prompt, shape, x.dtype, x.device) for prompt in prompts]
        reason = self._why_full(parts)
        if reason is None:
            out = programs.skipped(self._forecast(parts))
            if out is not None:
                self.stats.count(skipped=True)
                return out
            reason = FAILED  # or a batch of another size: in full, and the next one can
        out, features = programs.full()
        self.stats.count(skipped=False, reason=reason)
        if isinstance(features, Elsewhere):
            parts = [Part(prompt, shape, x.dtype, x.device) for prompt in features.prompts]
            features = features.features
        if isinstance(features, str):
            self._never |= dict.fromkeys(parts, features)
        elif features is not None:
            self._store(parts, features)
        return out

    def in_full(self, reason: str) -> None:
        """Counts a call that must run in full: it is not recorded, no step is skipped anyway, or skipping failed."""
        self.stats.count(skipped=False, reason=reason)

    def identity(self, thing: Any) -> int:
        """A key for ``thing`` that no other object gets during this run, even if this one is forgotten elsewhere."""
        self._kept_alive[id(thing)] = thing
        return id(thing)

    def close(self) -> None:
        """Frees the features."""
        self._entries.clear()
        self._kept_alive.clear()
        self.unrecorded.clear()
        self.stats.seconds = time.perf_counter() - self._started

    def _why_full(self, parts: list[Part]) -> str | None:
        """Why this call runs every block: ``PLANNED``, or a reason that counts; None if it need not."""
        self._note_repeated(parts)
        if self._since_step > MAX_EVALUATIONS:
            return SILENT_SAMPLER
        if self.step in self.full or self.step >= len(self.sigmas):
            return PLANNED
        if never := next((self._never[part] for part in parts if part in self._never), ""):
            return never
        if any(part in self._called_twice for part in parts):
            return CALLED_TWICE
        entries = [self._entries.get(part) for part in parts]
        latest = max((step for step in self.full if step < self.step), default=0)
        if any(entry is None or entry.step < latest for entry in entries):
            return NEWCOMER
        return None if len({entry.shapes for entry in entries}) == 1 else NEWCOMER

    def _note_repeated(self, parts: list[Part]) -> None:
        """Finds parts that come twice in one evaluation, and forgets what is known of them."""
        for index, part in enumerate(parts):
            entry = self._entries.get(part)
            if part in parts[:index] or (entry and entry.evaluation == self._evaluation):
                self._called_twice.add(part)
                self._entries.pop(part, None)
            elif entry:
                entry.evaluation = self._evaluation

    def _sigma(self) -> float:
        return self.sigmas[min(self.step, len(self.sigmas) - 1)]

    def _forecast(self, parts: list[Part]) -> Features:
        """The features of the call's rows, as tensors of their own."""
        sigma, histories = self._sigma(), [self._entries[part].histories for part in parts]
        return tuple(torch.cat([history.at(sigma) for history in of_all]) for of_all in zip(*histories, strict=True))

    def _store(self, parts: list[Part], features: Features) -> None:
        chunks = [feature.chunk(len(parts)) for feature in features]
        for part, rows in zip(parts, zip(*chunks, strict=True), strict=True):
            if part not in self._called_twice:
                entry = self._entry(part, len(features))
                for history, feature in zip(entry.histories, rows, strict=True):
                    history.add(self._sigma(), feature)
                entry.step, entry.evaluation = self.step, self._evaluation
        held = sum(history.bytes for entry in self._entries.values() for history in entry.histories)
        self.stats.bytes = max(self.stats.bytes, held)

    def _entry(self, part: Part, count: int) -> _Entry:
        """The part's entry; a new one where the noise has risen again (a restart)."""
        entry = self._entries.get(part)
        if entry is None or self._has_risen(entry) or len(entry.histories) != count:
            entry = self._entries[part] = _Entry([self.history() for _ in range(count)])
        return entry

    def _has_risen(self, entry: _Entry) -> bool:
        return 0 <= entry.step < len(self.sigmas) and self._sigma() > self.sigmas[entry.step]
