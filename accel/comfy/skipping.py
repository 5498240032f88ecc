"""Skip Blocks: begins and ends a run with skipped steps in ComfyUI.

The run's state is made when sampling starts and travels in ``transformer_options``; the node, the model and its patcher
hold none of it. The sampler's callback tells which step it is at, so that nothing is read back from the GPU.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from comfy.model_patcher import ModelPatcher, create_model_options_clone
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP
from torch import Tensor, nn

from ..attempt import attempt, failed
from ..call import Settings
from ..reasons import say
from ..skip.features import OWN_STEPS, PLANNED, RUN_KEY, SkipRun
from ..skip.schedule import FEW_STEPS
from ..skip.settings import AUTO, FEW, SkipSettings
from ..stats import STATS, SkipStats
from ..tape import blocks
from . import attach
from .session import Session
from .surroundings import INTERRUPTS

KEY = "anyshape.skip"
STATE = "anyshape.skip.state"  # what is known of the model during one run
PASSED_BY = say("skip_passed_by")
SELF_PACED = ("dpm_fast_function", "dpm_adaptive_function")  # KSAMPLER's names of samplers that ignore the sigmas

Tell = Callable[[str], None]


def skip_blocks(patcher: ModelPatcher, settings: SkipSettings, tell: Tell) -> tuple[ModelPatcher, str]:
    """(a clone that skips blocks on most steps, what the user should know or "").

    tell: shows a line to the user, after each run. A model that skips nothing comes back as a plain clone.
    """
    name = type(patcher.model).__name__
    made, failure = attempt(lambda: _made(patcher, name, settings, tell), failed(name, "Skip Blocks"), INTERRUPTS)
    return (without_skipping(patcher), failure) if failure else made


def _made(patcher: ModelPatcher, name: str, settings: SkipSettings, tell: Tell) -> tuple[ModelPatcher, str]:
    model = patcher.model.diffusion_model
    deepest = blocks.deepest(model)
    if deepest is None:
        message = say("no_blocks", why=f"{type(model).__name__} has no repeated blocks")
        STATS.fallback(name, message)
        return without_skipping(patcher), message
    clone = without_skipping(patcher)  # of two Skip Blocks nodes in a row, the last one decides
    # without Compile Model the steps are ComfyUI's own operations, recorded
    own = Settings(mode="exact", graph_budget_mb=0, has_budget=False)
    session = Session(own, name, attach.engine_of(clone), attach.size_of(clone), ahead=False, bypassed=PASSED_BY)
    skipping = _Skipping(settings, name, tell, session)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, skipping.sampling)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, STATE, _unless_compiled(session.sampling))
    clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, skipping.predicting)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, _unless_compiled(session.forward))
    clone.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, attach.let_go_on_detach)
    if attach.session_of(clone) is None:
        attach.put_around(clone, KEY, functools.partial(_around, session))
    return clone, _depth_message(settings, deepest)


def remove(patcher: ModelPatcher) -> ModelPatcher:
    """Removes our wrappers from ``patcher``, and returns it."""
    for wrapper in (WrappersMP.OUTER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.DIFFUSION_MODEL):
        patcher.remove_wrappers_with_key(wrapper, KEY)
    patcher.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, STATE)
    patcher.remove_callbacks_with_key(CallbacksMP.ON_DETACH, KEY)
    attach.remove_forward(patcher, KEY)
    return patcher


def without_skipping(patcher: ModelPatcher) -> ModelPatcher:
    """Returns a clone whose steps are all full."""
    return remove(patcher.clone())


def skips(patcher: ModelPatcher) -> bool:
    """Whether a run of many steps on ``patcher`` skips blocks on some of them."""
    wrappers = patcher.get_wrappers(WrappersMP.OUTER_SAMPLE, KEY)
    return any(wrapper.__self__.settings.interval > 1 for wrapper in wrappers)


def _depth_message(settings: SkipSettings, deepest: int) -> str:
    if settings.depth == AUTO or _has_depth(settings, deepest):
        return ""
    return say("no_such_depth", depth=settings.depth, deepest=deepest)


def _unless_compiled(ours: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that is ``ours``, of a ``Session``, unless Compile Model's does the same anyway."""

    @functools.wraps(ours)
    def wrapper(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        compiled = any(isinstance(getattr(each, "__self__", None), Session) for each in executor.wrappers)
        return executor(*args, **kwargs) if compiled else ours(executor, *args, **kwargs)

    return wrapper


def _around(session: Session, model: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward for a model whose own calls no wrappers: ours in runs that skip blocks."""
    ours = session.whole_forward(model, original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        skips = any(isinstance(item, dict) and RUN_KEY in item for item in (*args, *kwargs.values()))
        return (ours if skips else original)(*args, **kwargs)

    return forward


class _Skipping:
    """The wrappers of one Skip Blocks node: its settings, and nothing of any run. session: without Compile Model."""

    def __init__(self, settings: SkipSettings, name: str, tell: Tell, session: Session) -> None:
        self.settings, self.name, self.tell, self._session = settings, name, tell, session

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Skipping":
        """As ``Session``: a copy of ``model_options`` is of the same node."""
        return self

    def sampling(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Tensor:
        """OUTER_SAMPLE: a run begins here and ends in ``finally``. If it cannot begin, nothing is skipped."""
        judge = failed(self.name, "the start of Skip Blocks")
        begun, _ = attempt(lambda: self._begin(executor, args, kwargs), judge, INTERRUPTS)
        if begun is None:
            return executor(*args, **kwargs)
        guider, options, (run, call) = executor.class_obj, executor.class_obj.model_options, begun
        guider.model_options = create_model_options_clone(options)
        guider.model_options.setdefault("transformer_options", {})[RUN_KEY] = run
        try:
            return executor(*call.args, **call.kwargs)
        finally:
            guider.model_options = options
            attempt(lambda: self._end(run), failed(self.name, "the end of Skip Blocks"), INTERRUPTS)

    def _begin(self, executor: WrapperExecutor, args: tuple, kwargs: dict) -> tuple[SkipRun, inspect.BoundArguments]:
        """(the run, the call of the sampler with a callback that moves it on)."""
        call = inspect.signature(executor.original).bind(*args, **kwargs)
        run = self._run(executor.class_obj, *(call.arguments[name] for name in ("noise", "sampler", "sigmas")))
        call.arguments["callback"] = _stepping(run, call.arguments.get("callback"))
        return run, call

    def _end(self, run: SkipRun) -> None:
        run.close()
        met = run.stats.full + run.stats.skipped
        self.tell((not met and self._session.passed_by) or summary(run.stats))

    def predicting(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Tensor:
        """PREDICT_NOISE: the calls of the model until the next one are one evaluation."""
        run = executor.class_obj.model_options.get("transformer_options", {}).get(RUN_KEY)
        if run is not None:
            run.begin_evaluation()
        return executor(*args, **kwargs)

    def _run(self, guider: Any, noise: Tensor, sampler: Any, sigmas: Tensor) -> SkipRun:
        settings, patcher = self.settings, guider.model_patcher
        levels = sigmas.tolist()[:-1]
        percent_to_sigma = patcher.get_model_object("model_sampling").percent_to_sigma
        window = percent_to_sigma(settings.start_percent), percent_to_sigma(settings.end_percent)
        model = patcher.model.diffusion_model
        depth, row = _depth(settings, model), not blocks.stages(model)
        full, why = settings.full_steps(levels, *window, row), self._why_all_full(sampler, len(levels))
        return SkipRun(
            levels, frozenset(range(len(levels))) if why else full, depth, settings.history(levels),
            STATS.skip_run(self.name, depth or 0), lambda: patcher.current_hooks, why,
        )  # fmt: skip

    def _why_all_full(self, sampler: Any, steps: int) -> str:
        """Why no step of this run is skipped, if the user wants some to be; "" if there is no such reason."""
        if self.settings.interval == 1:
            return PLANNED
        function = getattr(getattr(sampler, "sampler_function", None), "__name__", "")
        return FEW if steps <= FEW_STEPS else OWN_STEPS if function in SELF_PACED else PLANNED


def _depth(settings: SkipSettings, model: nn.Module) -> int | None:
    """The user's; None where the recording of the first step decides it."""
    return int(settings.depth) if _has_depth(settings, blocks.deepest(model) or 0) else None


def _has_depth(settings: SkipSettings, deepest: int) -> bool:
    return settings.depth != AUTO and int(settings.depth) <= deepest


def summary(stats: SkipStats) -> str:
    """Describes a run in one line."""
    resets = "; ".join(f"{count} calls in full: {reason}" for reason, count in stats.resets.items())
    line = (
        f"Skip Blocks, {stats.model}: {stats.full} full and {stats.skipped} skipped evaluations at depth "
        f"{stats.depth} in {stats.seconds:.1f} s, {stats.bytes / (1 << 20):.0f} MB of features"
    )
    return f"{line}; {resets}" if resets else line


def _stepping(run: SkipRun, callback: Callable[..., None] | None) -> Callable[..., None]:
    """The sampler's callback, which also moves the run on."""

    def stepped(step: int, *args: Any, **kwargs: Any) -> None:
        run.begin_step(step + 1)
        if callback is not None:
            callback(step, *args, **kwargs)

    return stepped
