"""Counters and events, which the info node, the web panel and the tests read.

``snapshot()`` gives the contract's dict. Nothing here holds a model, a graph or a tensor alive.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from . import fleet, gain, preparing, reasons, wording
from .bounded import bounded
from .prompt_calls import Prompts
from .skip_stats import SkipStats
from .times import CallTimes, Eager
from .totals import Totals

log = logging.getLogger(__name__)

VERSION = 2
STATES = ("graph", "tape", "eager")  # of a shape, fastest first
MAX_MODELS = 32  # oldest forgotten first; a session that loads more wants the recent ones
MAX_SHAPES = 256  # of one model
MAX_RUNS = 32  # sampling runs with skipped blocks
MAX_NODES = 256
MAX_REJECTED = 256
MAX_FALLBACKS = 256  # places and reasons; the one that was new longest ago is forgotten first
MAX_WORKFLOWS = 8  # that used one size; the one that used it longest ago is forgotten first

T = TypeVar("T")


@dataclass
class ShapeStats:
    """One size and batch of one model: image pixels, images or videos per prompt, and the frames of a video."""

    key: str
    width: int
    height: int
    batch: int
    frames: int = 1
    step: str = ""  # "full" | "skipped", of a run with Skip Blocks
    state: str = "eager"  # of STATES; "tape" is any fused forward without a graph
    calls: int = 0
    asked: int = 0  # of these, not made by a warm-up
    replays: int = 0
    first_call_seconds: float = 0.0
    bytes: int = 0
    reason: str = ""  # why it does not run faster, where something is missed
    note: str = ""  # why it runs as it does, where nothing is missed: a graph would not help, say
    prompt: int = 0  # of the latest call: the latest prompt has the highest number; 0 outside of prompts
    prompts: dict[str, int] = field(default_factory=dict)  # workflow -> the latest that called it; "": scripts
    times: CallTimes = field(default_factory=CallTimes, repr=False)
    eager: Eager = field(default_factory=Eager, repr=False)  # of the forward that ComfyUI makes in its place

    @property
    def size(self) -> str:
        """In words."""
        return wording.size(self.width, self.height, self.frames)

    @property
    def workflows(self) -> list[str]:
        """The browser's ids of those whose prompts used it."""
        return [workflow for workflow in list(self.prompts) if workflow]

    def used_by(self, prompt: int, workflow: str) -> None:
        """Notes the prompt of a call, and the workflow it came from: the browser's id of it, or ""."""
        self.prompt = prompt
        if self.prompts.get(workflow) != prompt:
            others = [item for item in self.prompts.items() if item[0] != workflow]
            self.prompts = dict([*others, (workflow, prompt)][-MAX_WORKFLOWS:])

    def as_dict(self) -> dict[str, Any]:
        """The contract's entry."""
        names = (
            "key", "width", "height", "batch", "frames", "step", "state", "calls", "replays", "bytes", "reason", "note",
            "prompt",
        )  # fmt: skip
        entry = {name: getattr(self, name) for name in names}
        median, eager = self.times.median_ms(), self.eager.ms
        factor = gain.factor(self.state, eager, median, bool(self.step))
        return entry | {
            "reason": bounded(self.reason),
            "note": bounded(self.note),
            "first_call_seconds": round(self.first_call_seconds, 4),
            "median_ms": round(median, 3),
            "eager_ms": None if eager is None else round(eager, 3),
            "factor": factor,
            "saved_seconds": None if factor is None else round(self.times.saved_seconds(eager), 3),
            "workflows": self.workflows,
            "prompts": dict(self.prompts),
        }


def _kept(entries: dict[str, T], key: str, make: Callable[[], T]) -> T:
    """The entry for ``key``, made when new; the one that was made first is forgotten beyond ``MAX_SHAPES``."""
    entry = entries.get(key)  # one look: the browser's thread may clear the entries at any moment
    if entry is None:
        for oldest in list(entries)[: max(0, len(entries) + 1 - MAX_SHAPES)]:
            entries.pop(oldest, None)
        entry = entries.setdefault(key, make())
    return entry


@dataclass
class ModelStats:
    """One model (or VAE, or ControlNet); kept for the report after the model is gone."""

    name: str
    kind: str  # "model" | "vae" | "controlnet"
    kernels: int = 0  # generated and compiled for it
    recompiles: int = 0  # of these, after its first forward at its first size in that dtype
    compile_seconds: float = 0.0
    inexact: list[str] = field(default_factory=list)  # what is in use that rounds more than eager, and by how much
    shapes: dict[str, ShapeStats] = field(default_factory=dict)
    eager: dict[str, Eager] = field(default_factory=dict)  # by shape; they stay when the shapes are forgotten

    def eager_at(self, key: str) -> Eager:
        """What is known of ComfyUI's own forward at ``key``."""
        return _kept(self.eager, key, Eager)

    def shape(
        self, key: str, width: int, height: int, batch: int, frames: int = 1, step: str = "", own: str = ""
    ) -> ShapeStats:  # fmt: skip
        """The entry for ``key``, made when new. own: the key of ComfyUI's own forward, where that is another one."""
        eager = self.eager_at(own or key)
        return _kept(self.shapes, key, lambda: ShapeStats(key, width, height, batch, frames, step, eager=eager))

    def note(self, shape: ShapeStats, state: str, reason: str) -> None:
        """Notes how a size runs, and counts the reason, if there is one."""
        shape.state, shape.reason = state, reason
        if reason and STATS.fallback(self.name, reason) == 1:
            log.info("AnyShape: %s runs as %s: %s", self.name, state, reason)

    def as_dict(self) -> dict[str, Any]:
        """The contract's entry."""
        return {
            "name": self.name,
            "kind": self.kind,
            "kernels": self.kernels,
            "recompiles": self.recompiles,
            "compile_seconds": round(self.compile_seconds, 3),
            "inexact": list(self.inexact),
            "shapes": [shape.as_dict() for shape in list(self.shapes.values())],
        }


@dataclass
class GraphStats:
    """The memory of captured CUDA graphs on all devices together."""

    budget_bytes: int = 0
    used_bytes: int = 0
    evictions: int = 0


@dataclass
class ArtifactStats:
    """What was put into the compilers' caches from the store on disk, and copied to it; why not, where it was not."""

    dir: str = ""
    loaded: int = 0
    saved: int = 0
    rejected: list[dict[str, str]] = field(default_factory=list)

    def reject(self, file: str, reason: str) -> bool:
        """Notes why an artefact is not used. Returns False if that is known already, or if there are too many."""
        entry = {"file": file, "reason": reason}
        if entry in self.rejected or len(self.rejected) >= MAX_REJECTED:
            return False
        self.rejected.append(entry)
        return True

    def as_dict(self) -> dict[str, Any]:
        """The contract's entry."""
        return vars(self) | {"rejected": [dict(entry) for entry in list(self.rejected)]}


@dataclass
class NodeStats:
    """What a node of a workflow gave when it last ran, so that the browser finds the entries of its model."""

    id: str  # in its workflow; "5:2" in a subgraph
    workflow: str  # the browser's id of it; "" if it came without one, from a script
    type: str  # the node's class, as ComfyUI knows it
    state: str  # "off": passes through | "eager": its model cannot be compiled | "ready": what the entries say
    message: str  # what the user should know; "" if nothing
    names: Callable[[], list[str]]  # of entries of ``models``, known from the first forward on; holds no model
    settings: dict[str, Any] = field(default_factory=dict)  # its inputs that are no links; for reports alone
    file: str = ""  # of the model that the node got, by its name; "" where no loader of its workflow names one
    sizes: dict[str, int] = field(default_factory=dict)  # of Warm Up: how many are "listed", "ready", and entries "bad"
    prompt: str = ""  # the id of the one that it ran in
    ended: str = ""  # "cancelled" | "failed": how its latest prompt was broken off
    instead: Callable[[], str] = str  # why its latest run went past it, if it did; holds no model
    _known: list[str] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.message = bounded(self.message)
        self.settings = {n: bounded(value) if isinstance(value, str) else value for n, value in self.settings.items()}

    def clear(self) -> None:
        """Forgets what was said of its run, but not why a model cannot be compiled at all."""
        self.ended = ""
        if self.state != "eager":
            self.message = ""

    def as_dict(self) -> dict[str, Any]:
        """The contract's entry. Keeps the names when the model is gone, as its entries stay too."""
        self._known = self.names() or self._known
        names = ("id", "workflow", "type", "state", "message")
        more = {
            "prompt": self.prompt,
            "file": self.file,
            "sizes": self.sizes,
            "instead": self.instead(),
            "ended": self.ended,
        }
        given = {name: value for name, value in more.items() if value}
        return {name: getattr(self, name) for name in names} | {"models": list(self._known)} | given


class Stats:
    """Everything that has been counted since the start or the last ``clear``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: deque[ModelStats] = deque(maxlen=MAX_MODELS)
        self._named: Counter[str] = Counter()  # models made so far, by name
        self._fallbacks: Counter[tuple[str, str]] = Counter()
        self._skip: deque[SkipStats] = deque(maxlen=MAX_RUNS)
        self._nodes: dict[tuple[str, str], NodeStats] = {}
        self.prompts = Prompts(lambda: sum(model.kernels for model in list(self._models)))
        self.totals = Totals()
        self.graphs = GraphStats()
        self.artifacts = ArtifactStats()

    def model(self, name: str, kind: str) -> ModelStats:
        """Returns a new entry; a second model of the same name gets a number."""
        with self._lock:
            self._named[name] += 1
            number = self._named[name]
            entry = ModelStats(f"{name} #{number}" if number > 1 else name, kind)
            self._models.append(entry)
            return entry

    def models(self) -> list[ModelStats]:
        """Returns the entries, the oldest first."""
        with self._lock:
            return list(self._models)

    def skip_run(self, model: str, depth: int) -> SkipStats:
        """A new entry for a sampling run with skipped blocks, in the prompt that runs in this thread."""
        prompt = self.prompts.current()
        with self._lock:
            entry = SkipStats(model, depth)
            if prompt is not None:
                entry.prompt, entry.workflow = prompt.number, prompt.workflow
            self._skip.append(entry)
            return entry

    def node(self, entry: NodeStats) -> None:
        """Notes what a node gave; of more than ``MAX_NODES`` the one that ran longest ago is forgotten."""
        with self._lock:
            self._nodes.pop((entry.workflow, entry.id), None)
            self._nodes[entry.workflow, entry.id] = entry
            for oldest in list(self._nodes)[:-MAX_NODES]:
                del self._nodes[oldest]

    def ended(self, workflow: str, ids: Collection[str], how: str) -> None:
        """Notes on the nodes of a prompt how it was interrupted; "" if it was not."""
        with self._lock:
            for node in self._nodes.values():
                if node.workflow == workflow and node.id in ids:
                    node.ended = how

    def nodes(self) -> list[NodeStats]:
        """Those that ran, the latest last."""
        with self._lock:
            return list(self._nodes.values())

    def fallback(self, where: str, reason: str) -> int:
        """Counts a fallback to something slower. Returns how often it has happened."""
        key = where, bounded(reason)
        self.totals.fell_back(key[1])
        with self._lock:
            self._fallbacks[key] += 1
            for oldest in list(self._fallbacks)[:-MAX_FALLBACKS]:
                del self._fallbacks[oldest]
            return self._fallbacks[key]

    def clear(self) -> None:
        """Forgets calls, shapes, fallbacks and the nodes' messages; compiled code, captured graphs and totals stay."""
        fleet.forget()
        with self._lock:
            self._fallbacks.clear()
            self._skip.clear()
            self.graphs.evictions = 0
            for model in self._models:
                model.shapes.clear()
            for node in self._nodes.values():
                node.clear()

    def snapshot(self) -> dict[str, Any]:
        """The contract's dict (``docs/scripts.md``), JSON-ready."""
        with self._lock:
            models = [model.as_dict() for model in self._models]
            fallbacks = [{"where": w, "reason": r, "count": n} for (w, r), n in self._fallbacks.items()]
            skip = [run.as_dict() for run in self._skip]
            nodes = [node.as_dict() for node in self._nodes.values()]
        shared = fleet.snapshot()
        everything = [shape for model in models for shape in model["shapes"]]
        found = {
            "version": VERSION,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "models": models,
            "gain": gain.total(everything),
            "preparing": preparing.snapshot(),
            "graphs": vars(self.graphs).copy(),
            "fallbacks": fallbacks + fleet.fallbacks(shared),
            "skip": skip,
            "nodes": nodes,
            "artifacts": self.artifacts.as_dict(),
            "fleet": shared,
        }
        return found | {"reasons": reasons.told_in(found)}


STATS = Stats()


def snapshot() -> dict[str, Any]:
    """Returns what has been counted so far, by the contract."""
    return STATS.snapshot()
