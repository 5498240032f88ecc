"""Samples a compiled model: keeps the state of each sampling run, and turns every forward into a ``Call``.

A sampling run may skip blocks (``skip.run``): then a forward is one of two programs, with a graph for each.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from comfy.patcher_extension import WrapperExecutor, WrappersMP, add_wrapper, get_all_wrappers
from torch import Tensor, nn

from ..attempt import Fallback, attempt, failed
from ..call import Call, Settings
from ..engine import Engine
from ..frames import together
from ..reasons import say
from ..skip.features import RUN_KEY, UNRECORDED, Elsewhere, Features, Programs, SkipRun
from ..skip.unrecorded import NotLeftOut, UnrecordedBlocks
from ..skip.unrecorded_stages import UnrecordedStages
from ..stats import STATS
from ..take import FullStep
from ..tape import blocks
from ..weights import ChannelsLastWeights
from . import conds, known_code, patch_networks, sampling_state, taping
from .compat import outside_memory_plan, without_memory_plans
from .surroundings import INTERRUPTS, through

PASSED_BY = say("passed_by")


class Session:
    """The wrappers of one compiled patcher (and of its clones), and the runs in progress.

    ahead: conds are copied to the model's device before the first step. bypassed: what is said of a run none of whose
    calls comes through here.
    """

    def __init__(
        self, settings: Settings, name: str, engine: Callable[[nn.Module], Engine], size: taping.SizeOf | None = None,
        ahead: bool = True, bypassed: str = PASSED_BY,
    ) -> None:  # fmt: skip
        self.name = name
        self.settings = settings
        self._ahead, self._bypassed = ahead, bypassed
        self._size = size or taping.pixels
        self._engine = engine
        # by id of the diffusion model; several threads sample several models
        self._runs: dict[int, sampling_state.SamplingState] = {}
        self._depth = 0
        self.passed_by = ""  # why nothing of the latest sampling run came through here
        self._calls = 0  # that came through here; code that someone else compiled does not
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Session":
        """A pack that copies ``model_options`` to the bottom copies our wrappers too: they stay of this session."""
        return self

    def sampling(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """OUTER_SAMPLE: state begins here and ends in ``finally``."""
        with self._lock:
            self._depth += 1
        calls = self._calls
        try:
            attempt(lambda: self._before_steps(executor.class_obj), failed(self.name, "the run's start"), INTERRUPTS)
            with without_memory_plans():
                out = together(lambda: executor(*args, **kwargs))
            if len(_sigmas(args, kwargs)) > 1:
                passed = self._calls == calls and not self._is_inside(executor.class_obj)
                self.passed_by = self._bypassed if passed else ""
                if self.passed_by:
                    STATS.fallback(self.name, self.passed_by)
            return out
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    attempt(self._close_runs, failed(self.name, "the run's end"), INTERRUPTS)

    def _is_inside(self, guider: Any) -> bool:
        """Whether other packs' wrappers are around ours: they may give what they forecast or kept, and call nobody."""
        options = getattr(guider, "model_options", None)
        found = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options, True) if isinstance(options, dict) else ()
        for each in found:
            wrapper = getattr(each, "__wrapped__", each)
            if wrapper == self.forward:
                return False
            if not isinstance(getattr(wrapper, "__self__", None), Session):
                return True
        return bool(found)

    def _before_steps(self, guider: Any) -> None:
        """Has ``sampler`` called in this run, unless another pack has a wrapper there: some run only by themselves."""
        options = getattr(guider, "model_options", None)  # ComfyUI's copy for this run
        alone = isinstance(options, dict) and not get_all_wrappers(WrappersMP.SAMPLER_SAMPLE, options, True)
        if self._ahead and alone:
            add_wrapper(WrappersMP.SAMPLER_SAMPLE, self.sampler, options, True)

    def sampler(self, executor: WrapperExecutor, guider: Any, *args: Any, **kwargs: Any) -> Tensor:
        """SAMPLER_SAMPLE: copies the guider's conds to the model's device before the first step asks for them."""
        tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
        if self.settings.mode != "off" and not self.settings.timed and tensors:
            judge = failed(self.name, "copying the prompts to the GPU")
            attempt(lambda: conds.to_device(guider.conds, tensors[0].device), judge, INTERRUPTS)
        return executor(guider, *args, **kwargs)

    def _close_runs(self) -> None:
        runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            run.close()
            if run.has_companions:  # these may go while the model stays
                self._engine(run.model).loosen()

    def forward(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Tensor:
        """DIFFUSION_MODEL: replaces the innermost forward with ours; other packs' wrappers stay around it."""
        model, original = executor.class_obj, executor.original

        ours = self._ours(model, original)
        chain = WrapperExecutor.new_class_executor(ours, model, executor.wrappers, executor.idx + 1)
        with outside_memory_plan():
            return chain.execute(*args, **kwargs)

    def whole_forward(self, model: nn.Module, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A ``forward`` for a model whose own calls no wrappers; ``original`` is its own."""

        ours = self._ours(model, original)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            with outside_memory_plan():
                return ours(*args, **kwargs)

        return forward

    def _ours(self, model: nn.Module, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The model's forward, through the engine; ComfyUI's own if anything of ours fails."""
        ours = partial(self._through_engine, model, original)
        return lambda *args, **kwargs: through(ours, original, args, kwargs, self.name, "a forward")

    def _through_engine(
        self, model: nn.Module, original: Callable[..., Tensor], fallback: Fallback, args: tuple, kwargs: dict[str, Any]
    ) -> Tensor:
        self._calls += 1
        given = taping.take(original, args, kwargs)
        fallback.run = lambda: given.call(original)
        if why := _at_rest(model, given):
            call = taping.call_of(model, original, given, None, fallback, self._size, why=why)
            return self._engine(model)(call, self.settings)
        skip = given.options.get(RUN_KEY)
        skips = skip is not None and skip.skips
        run = self._run(model, skips, given)
        try:
            call = taping.call_of(model, original, given, run, fallback, self._size, may_fetch=True)
            if skip is not None and not skip.stats.entry:
                skip.stats.entry = self._engine(model).stats.name
            in_blocks, _ = run.in_blocks
            skips = skips and not in_blocks
            if skips and (why := _why_apart(model, call, skip, given, run)):
                return self._apart(model, original, call, skip, given, run, why)
            if not skips or call.taped is None:
                if skip is not None:
                    skip.in_full(call.obstacle or in_blocks or skip.why_all_full)
                return self._engine(model)(call, self.settings)
            return self._skipping(model, original, call, skip, given, run)
        finally:
            run.let_go()
            if not self._depth:  # no sampling run will end this one
                run.close()

    def _skipping(
        self, model: nn.Module, original: Callable[..., Tensor], call: Call, skip: SkipRun, given: taping.Given,
        run: sampling_state.SamplingState,
    ) -> Tensor:  # fmt: skip
        """A call of a run that skips blocks. Where it turns out to be on no tape, later ones are ``_apart``."""
        engine, first = self._engine(model), next(iter(call.inputs.values()))
        may_leave_out, found = _may_leave_out(model, given), list[_Watched]()
        looked_at = partial(taping.call_of, model, original, given, run, call.eager, self._size, may_fetch=True)

        def full() -> tuple[Tensor, Features | Elsewhere | str | None]:
            watched = _watched(model, skip, call, run, found) if may_leave_out else None
            out = engine(taping.in_full(call, skip.depth, watched, looked_at), self.settings)
            if not isinstance(out, FullStep):
                return out, UNRECORDED
            if out.apart:
                if not may_leave_out:
                    return out.out, UNRECORDED
                skip.refused[id(model)] = out.apart
                features = found[-1].of(run) if found else ""
                if isinstance(features, str):
                    return out.out, None
                return out.out, Elsewhere(_prompts(skip, given.options, call, "apart"), features)
            skip.stats.depth, skip.stats.share = max((skip.stats.depth, skip.stats.share), (out.depth, out.share))
            return out.out, out.features

        def skipped(features: Features) -> Tensor | None:
            return engine(taping.skipped(call, skip.depth, features), self.settings)

        return skip.call(_prompts(skip, given.options, call), first, Programs(full, skipped))

    def _apart(
        self, model: nn.Module, original: Callable[..., Tensor], call: Call, skip: SkipRun, given: taping.Given,
        run: sampling_state.SamplingState, why: str,
    ) -> Tensor:  # fmt: skip
        """As ``_skipping``, where the forward is on no tape: ComfyUI's own, with blocks left out. why: it is not."""
        engine, first = self._engine(model), next(iter(call.inputs.values()))
        row, found = _row(model, skip), list[_Watched]()
        whole = _watched(model, skip, call, run, found)

        def full() -> tuple[Tensor, Features | str | None]:
            out = engine(taping.apart(call, skip.depth, why, whole), self.settings)
            skip.stats.depth, skip.stats.share = max((skip.stats.depth, skip.stats.share), (row.depth, row.share))
            return out, found[-1].of(run)

        def skipped(features: Features) -> Tensor | None:
            def rest() -> Tensor | None:
                run.let_go()
                options = taping.without_prefetch(given.theirs)
                try:
                    return row.skipped(model, lambda: given.call(original, options), features)
                except NotLeftOut:
                    return None

            return engine(taping.apart(call, skip.depth, why, rest, features), self.settings)

        return skip.call(_prompts(skip, given.options, call, "apart"), first, Programs(full, skipped))

    def _run(self, model: nn.Module, skips: bool, given: taping.Given) -> sampling_state.SamplingState:
        """What is known of the model in this run; outside a sampling run, for this call. skips: steps, in this run."""
        with self._lock:
            found = self._runs.get(id(model))
            if found is None:
                layout, first = ChannelsLastWeights() if self._depth else None, given.first
                beside = patch_networks.networks(given.options, model, first.device) if first is not None else ()
                known = known_code.fingerprints(model)
                found = sampling_state.SamplingState(model, known, layout, skips, beside)
                if self._depth:
                    self._runs[id(model)] = found
            return found


def _sigmas(args: tuple, kwargs: dict[str, Any]) -> Sequence:
    """The noise levels among CFGGuider.outer_sample's arguments; none if they are not where they were."""
    return kwargs.get("sigmas", args[3] if len(args) > 3 and isinstance(args[3], Tensor) else ())


def _at_rest(model: nn.Module, given: taping.Given) -> str:
    """Why this call gains nothing, where that is known without a look at the model. Blocks may be left out of it."""
    known = known_code.fingerprints(model)
    return known.resting(taping.key_of(given)) if known.has_resting and RUN_KEY not in given.options else ""


def _why_apart(
    model: nn.Module, call: Call, skip: SkipRun, given: taping.Given, run: sampling_state.SamplingState
) -> str:
    """Why this forward is on no tape, where its blocks may be left out all the same; else ""."""
    why = call.obstacle if call.taped is None and run.is_streaming else skip.refused.get(id(model), "")
    return why if why and _may_leave_out(model, given) else ""


def _row(model: nn.Module, skip: SkipRun) -> UnrecordedBlocks | UnrecordedStages:
    """The blocks that may be left out of the model's own forward, in this run."""
    row = skip.unrecorded.get(id(model))
    if row is None:
        kind = UnrecordedStages if blocks.stages(model) else UnrecordedBlocks
        row = skip.unrecorded[id(model)] = kind(model, skip.depth, INTERRUPTS)
    return row


class _Watched(NamedTuple):
    """What a watched forward gave besides its result. states: of other packs' code in the model, before it."""

    features: Features | str
    states: tuple

    def of(self, run: sampling_state.SamplingState) -> Features | str:
        """The features, or why there are none. Asked behind the forward, when no block has a forward of ours."""
        return run.kept(self.states) or self.features


def _watched(
    model: nn.Module, skip: SkipRun, call: Call, run: sampling_state.SamplingState, found: list[_Watched]
) -> Callable[[], Any]:
    """The call's own forward. What was seen of it comes into ``found``."""

    def whole() -> Any:
        rows, states = len(next(iter(call.inputs.values()))), run.foreign_states()
        out, features = _row(model, skip).full(model, call.eager, rows)
        found.append(_Watched(features, states))
        return out

    return whole


def _may_leave_out(model: nn.Module, given: taping.Given) -> bool:
    """Whether blocks may be left out of the model's own forward: no patch counts its calls, and no residual is added
    to what the deep stages of a network give that is shaped like a U.
    """
    residuals = blocks.stages(model) and any(name.startswith("control.") for name in given.tensors)
    return not (residuals or taping.calls_patches(given.options))


def _prompts(skip: SkipRun, options: Mapping[str, Any], call: Call, how: str = "taped") -> list[tuple]:
    """A key for each prompt's rows: its uuid and side, and everything else that the deep blocks depend on.

    how: features of different cuts are different things.

    The side, because for an area of the positive prompt ComfyUI makes a negative one with the same uuid.
    """
    # prompts of one length may be joined to others of another one: their streams are longer then
    forms = {spec.name: f"{spec.shape[1:]} {spec.dtype}" for spec in call.key.inputs}
    structure = dict(call.key.structure) | forms | {"how": how}
    patches = tuple((*where, skip.identity(patch)) for where, patch in _patches(options))
    hooks = getattr(skip.hooks(), "hooks", ())
    shared = (patches, tuple(structure.items()), tuple((hook.hook_ref, hook.strength) for hook in hooks))
    sides, uuids = options.get("cond_or_uncond", ()), options.get("uuids", ())
    if len(sides) != len(uuids):  # not ComfyUI's own sampling: nobody says what belongs to whom
        return []
    return [(uuid, side, *shared) for uuid, side in zip(uuids, sides, strict=True)]


def _patches(options: Mapping[str, Any]) -> Iterator[tuple[tuple, Any]]:
    """((kind, place), patch) for every patch of other packs."""
    for name, patches in options.get("patches", {}).items():
        yield from (((name, index), patch) for index, patch in enumerate(patches))
    for name, places in options.get("patches_replace", {}).items():
        yield from (((name, place), patch) for place, patch in places.items())
    if "optimized_attention_override" in options:
        yield ("optimized_attention_override",), options["optimized_attention_override"]
