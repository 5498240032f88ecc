"""The one decision per call: replay | tape or kernels | eager.

A model's forward comes as a ``Call``. Most are recorded (``tape_tier``); UNets and VAEs on a GPU bring a forward of
their own on kernels. The engine runs a call in the fastest way that is safe, counts what it did, and turns
every failure of ours into ComfyUI's own forward. Eager is the last resort, and we never change it.
"""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import devices, graphs, kernels, verify
from .artifacts import KEEPER
from .attempt import attempt, named
from .clock import Clock
from .compilations import compilations
from .errors import AnyShapeError, CaptureFailed, Unavailable, is_out_of_memory
from .key import ShapeKey
from .ops import FusedOps
from .outputs import Output
from .preparing import preparing
from .reasons import say
from .stats import STATS, ModelStats, ShapeStats
from .tape_tier import TapeTier
from .tapes import Taped

log = logging.getLogger(__name__)

TAPE, KERNELS = "tape", "kernels"
MODES = ("auto", "exact", "off")
BUDGET_MB, MAX_BUDGET_MB = 2048, 1 << 20  # for graphs: unless the user says otherwise, and at most
MAX_TRIES = 3  # to compare a shape: eager may overflow, or have no memory, in one call and not in the next


@dataclass(frozen=True)
class Settings:
    """What the user chose on the node. Raises ValueError naming the input, the value and the accepted ones."""

    mode: str = "auto"
    graph_budget_mb: int = BUDGET_MB  # 0: no graphs
    verify: bool = True  # compare each new shape's first result with eager
    timed: bool = False  # only ComfyUI's own forwards run, and how long they take is noted

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; choose one of {', '.join(MODES)}")
        if not 0 <= self.graph_budget_mb <= MAX_BUDGET_MB:
            raise ValueError(
                f"graph_budget_mb is {self.graph_budget_mb}; give 0 (no graphs) to {MAX_BUDGET_MB}, in megabytes"
            )

    @property
    def graph_budget_bytes(self) -> int:
        """The budget in bytes."""
        return self.graph_budget_mb * graphs.MIB


@dataclass(frozen=True)
class Call:
    """One forward, as a family sees it. Valid for this call only: it holds the caller's tensors."""

    key: ShapeKey
    inputs: dict[str, Tensor]  # everything that may differ from call to call
    eager: Callable[[], Output]  # on ComfyUI's own layers
    weights: int  # weights.WeightWatch.fingerprint, now
    width: int  # image pixels
    height: int
    batch: int  # images per prompt
    frames: int = 1
    taped: Taped | None = None  # how to record it
    forward: Callable[[FusedOps, dict[str, Tensor]], Output] | None = None  # by hand, on kernels; pure, unless
    # graph_obstacle says otherwise
    constants: Callable[[], tuple[Tensor | None, ...]] = tuple  # device memory besides weights that the forward reads
    obstacle: str = ""  # why only eager is right; "" if fused forwards are
    graph_obstacle: str = ""  # why the forward may not be captured; "" if it may
    eager_parts: str = ""  # why some parts of the forward run in eager on any tier; "" if none does
    repeatable: bool = True  # False: it runs code of other packs, which may count its calls
    plain_eager: bool = False  # ``eager`` is what runs without the pack, and as fast: no weights lie in another order


@dataclass
class Engine:
    """The decisions for one model. Holds no reference to it, and none to a call's tensors.

    ``passthrough``: exceptions that are messages, not failures (the user's interrupt).
    ``uses_graphs``: False for models that a graph does not make faster (a VAE is bound by the GPU).
    """

    stats: ModelStats
    passthrough: tuple[type[BaseException], ...] = ()
    uses_graphs: bool = True
    _retired: dict[str, str] = field(default_factory=dict)  # tier -> why it is not used for this model any more
    _started: set[tuple[str, torch.dtype, bool, bool]] = field(default_factory=set)  # whose first call is over
    _verified: set[tuple[str, ShapeKey]] = field(default_factory=set)  # shapes that a tier gets right
    _tries: Counter[tuple[str, ShapeKey]] = field(default_factory=Counter)  # to compare others
    _details: dict[str, str] = field(default_factory=dict)  # of what failed in this call, by reason, for the log
    _told: set[str] = field(default_factory=set)  # reasons that were logged

    def __post_init__(self) -> None:
        self._tape = TapeTier(self.stats, id(self), self.passthrough, self.uses_graphs)

    def __call__(self, call: Call, settings: Settings) -> Output:
        """The model's output for ``call``, from the fastest tier that is safe."""
        with devices.current(call.key.device):  # another one may be: kernels and graphs start on the current one
            if settings.timed:
                with self.stats.eager_at(str(call.key)).measure(call.key.device):
                    return call.eager()
            return self._counted(call, settings)

    def _counted(self, call: Call, settings: Settings) -> Output:
        shape = self.stats.shape(str(call.key), call.width, call.height, call.batch, call.frames)
        shape.calls += 1
        STATS.prompts.called(shape)
        try:
            return self._timed(call, settings, shape)
        except self.passthrough:
            if shape.calls == 1:  # the next call is this size's first
                self.stats.shapes.pop(shape.key, None)
            raise

    def _timed(self, call: Call, settings: Settings, shape: ShapeStats) -> Output:
        if shape.calls > 1:
            with shape.times.measure(call.key.device) as timed:
                out = self._run(call, settings, shape)
                timed.fast = shape.state != "eager"
            return out
        started = time.perf_counter()
        out = self._run(call, settings, shape)
        if call.key.device.type == "cuda":
            torch.cuda.synchronize(call.key.device)  # once per shape: the first call's true cost
        shape.first_call_seconds = time.perf_counter() - started
        shape.times.first(shape.first_call_seconds, shape.state != "eager")
        return out

    def _run(self, call: Call, settings: Settings, shape: ShapeStats) -> Output:
        obstacle, retired, failures = call.obstacle, dict(self._retired), []
        if not obstacle:
            tiers = _tiers(settings, call)
            for tier in tiers:
                if tier in self._retired:
                    continue
                out, failure = self._attempt(tier, call, settings, shape)
                if not failure:
                    for reason in failures:
                        STATS.fallback(self.stats.name, reason)
                    self._tell(call)
                    return out
                failures.append(failure)
                if tier not in self._retired:  # memory was short
                    break  # no time to compile another tier: eager is there and needs no more memory
            missing = [self._retired[tier] for tier in tiers if tier in self._retired]  # of those that were asked for
            obstacle = "; ".join(dict.fromkeys([*missing, *failures]))
        self._note(shape, "eager", obstacle)
        try:
            out = call.eager()
        except BaseException:
            self._retired = retired  # the call itself is wrong (another node's patch, its input), not our tiers
            self._details.clear()
            raise
        self._tell(call)
        return out

    def _attempt(self, tier: str, call: Call, settings: Settings, shape: ShapeStats) -> tuple[Output, str]:
        """(the output, "") or (None, why the tier could not give it)."""
        return attempt(
            lambda: self._fast(tier, call, settings, shape),
            lambda error: self._step_down(tier, error),
            self.passthrough,
        )

    def _fast(self, tier: str, call: Call, settings: Settings, shape: ShapeStats) -> Output:
        if tier == TAPE:
            return self._tape.run(call, settings, shape)
        obstacle = self._graph_obstacle(call, settings)
        if not obstacle:
            out = graphs.cache(call.key.device).replay(self._graph(tier, call), call.weights, call.inputs)
            if out is not None:
                shape.state, shape.reason = "graph", ""
                shape.replays += 1
                return out
        ops = self._load(call.key.device)
        if obstacle:
            self._note(shape, tier, call.eager_parts if obstacle == _BY_DESIGN else obstacle)
            return self._forward(ops, call, settings, shape)
        with preparing(self.stats.name, shape.size):
            out = self._forward(ops, call, settings, shape)
            if settings.verify and not self._is_checked(ops, call):  # its graph would never be compared
                self._note(shape, ops.name, NOT_COMPARED)
            else:
                self._capture(ops, call, settings, shape, out)
        return out

    def _graph_obstacle(self, call: Call, settings: Settings) -> str:
        if call.key.device.type != "cuda" or not self.uses_graphs:
            return _BY_DESIGN
        if settings.graph_budget_mb == 0:
            return say("no_graphs")
        return call.graph_obstacle

    def _load(self, device: torch.device) -> FusedOps:
        if obstacle := devices.obstacle(device):
            raise Unavailable(obstacle)
        return kernels.load(device)

    def _forward(self, ops: FusedOps, call: Call, settings: Settings, shape: ShapeStats) -> Output:
        """Runs the fused forward; compilations in its first call are expected, later ones are recompiles."""
        # with patches, and with weights that are cast at each call, other operations run
        name = ops.name, call.key.inputs[0].dtype, call.repeatable, bool(call.graph_obstacle)
        first = name not in self._started
        with (
            preparing(self.stats.name, shape.size) if first else nullcontext(),
            compilations(ops, first) as compiled,
        ):
            once = call.graph_obstacle or call.eager_parts  # it may have effects that must happen once
            if first and not once:
                ops.compile_ahead(lambda: call.forward(ops, call.inputs))
            out = call.forward(ops, call.inputs)
        self.stats.compile_seconds += compiled.seconds
        self.stats.kernels += compiled.kernels
        self.stats.recompiles += 0 if first else compiled.kernels
        self._started.add(name)
        if first or compiled.seconds:
            KEEPER.save_soon()
        if settings.verify and not self._is_checked(ops, call):
            with preparing(self.stats.name, shape.size):
                self._verify(ops, call, out)
        return out

    def _is_checked(self, ops: FusedOps, call: Call) -> bool:
        """Whether a shape was compared, or cannot be."""
        return (ops.name, call.key) in self._verified or self._tries[ops.name, call.key] >= MAX_TRIES

    def _verify(self, ops: FusedOps, call: Call, out: Output) -> None:
        """Compares a shape's first result with eager, by one forward more. Raises ``WrongResult``."""
        what, name, compared = f"the {ops.name} tier at {call.width}x{call.height}", (ops.name, call.key), True
        if call.repeatable:
            clock = Clock(call.key.device)
            reference, _ = attempt(lambda: clock.run(call.eager), self._no_reference, self.passthrough)
            compared = reference is not None and verify.compare(what, out, reference)
            if compared and call.plain_eager:
                self.stats.eager_at(str(call.key)).note(clock.eager_ms(0))
        else:
            verify.check_finite(what, out)
        if compared:
            self._verified.add(name)
        else:
            self._tries[name] += 1

    def _no_reference(self, error: Exception) -> str | None:
        """Eager needs more memory than the tier: nothing to compare with. Other errors are the call's own."""
        if not is_out_of_memory(error):
            return None
        torch.cuda.empty_cache()
        return str(error)

    def _capture(self, ops: FusedOps, call: Call, settings: Settings, shape: ShapeStats, out: Output) -> None:
        """Captures the shape's graph right after its first fused forward; the next call replays it."""
        recording = graphs.Recording(
            lambda inputs: call.forward(ops, inputs), call.inputs, call.weights, call.constants(), out,
            settings.verify, self.stats.name,
        )  # fmt: skip
        try:
            shape.bytes = graphs.cache(call.key.device).capture(
                self._graph(ops.name, call), recording, settings.graph_budget_bytes
            )
            shape.state, shape.reason = "graph", ""
        except CaptureFailed as error:
            self._note(shape, ops.name, str(error))

    def _graph(self, tier: str, call: Call) -> graphs.Name:
        return graphs.Name(id(self), call.key, tier)

    def _step_down(self, tier: str, error: Exception) -> str:
        """Retires the tier, unless only memory was short, and returns the reason."""
        if is_out_of_memory(error):
            self.drop_graphs()
            torch.cuda.empty_cache()
            return say("tier_no_memory", tier=tier)
        ours = isinstance(error, AnyShapeError)  # whose text is made for the user
        reason = str(error) if ours else say("tier_failed", tier=tier, error=named(error))
        self._retired[tier] = reason
        self.drop_graphs()  # what it captured is no better than what it computes
        self._details[reason] = "" if isinstance(error, Unavailable) else _traceback(error)
        return reason

    def _tell(self, call: Call) -> None:
        """Logs what failed in this call, once, now that another way has given its result."""
        for reason in self._details.keys() - self._told:
            log.warning("AnyShape: %s (%s): %s%s", self.stats.name, call.key, reason, self._details[reason])
        self._told |= self._details.keys()
        self._details.clear()

    def _note(self, shape: ShapeStats, state: str, reason: str) -> None:
        """Counts how a shape runs, and why it is not faster."""
        shape.state, shape.reason = "eager" if state == "eager" else "tape", reason
        if reason and STATS.fallback(self.stats.name, reason) == 1:
            log.info("AnyShape: %s runs as %s: %s", self.stats.name, shape.state, reason)

    def wants_channels_last(self, settings: Settings, device: torch.device) -> bool:
        """Whether convolution weights should be in channels_last: for kernels, and for nothing slower."""
        usable = settings.mode == "auto" and not settings.timed and KERNELS not in self._retired
        return usable and kernels.available(device)

    def drop_graphs(self) -> None:
        """Gives the memory of this model's graphs back; the next call of a shape captures it again."""
        graphs.drop_owner(id(self))
        self._tape.release()

    def release(self) -> None:
        """Lets go of weights, and keeps what was recorded. For a model that has no graphs, after each of its calls."""
        self._tape.release()

    def __del__(self) -> None:
        graphs.abandon(id(self))


def _traceback(error: Exception) -> str:
    """As text: a log handler that keeps the error would keep its frames, and with them the model."""
    return "\n" + "".join(traceback.format_exception(error))


NOT_COMPARED = say("not_compared")
_BY_DESIGN = "graphs are not for this device or model"  # not a fallback: nothing is missed


def _tiers(settings: Settings, call: Call) -> tuple[str, ...]:
    """The tiers to try, fastest first. Without any it is ComfyUI's own forward."""
    if call.taped is not None:
        return (TAPE,)
    return (KERNELS,) if settings.mode == "auto" and call.forward is not None else ()
