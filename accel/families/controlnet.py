"""Compile ControlNet: how a ControlNet meets the engine, and ComfyUI's sampling.

The shared ControlNet is never touched. A copy of ComfyUI's control object gets a shallow copy of its network, with the
same layers and weights but another ``forward``; ComfyUI's memory management still loads the original. What is known of
the network during a sampling run begins with the control's ``pre_run`` and ends with the run, however that ends.
"""

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.controlnet
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from torch import Tensor, nn

from .. import devices
from ..attempt import Theirs, attempt, failed
from ..engine import Call, Engine, Settings
from ..key import ShapeKey, shape_key
from ..ops import FusedOps
from ..outputs import Output
from ..reasons import say
from ..stats import STATS
from ..tape.values import replaced
from ..weights import ChannelsLastWeights
from . import controlnet_forward as family
from . import taping
from .attach import KEY, drop_graphs, engine_for, settings_of
from .compat import outside_memory_plan
from .family import Arguments
from .layers import INTERRUPTS
from .run_state import Run

MAX_FORMS = 256  # more than there are recordings
RUN_KEY = "anyshape.control"  # of the callback that ends a run
NAME = "ControlNet"  # in the stats
Residuals = dict[str, list[Tensor]]


def compile_controlnet(
    control: comfy.controlnet.ControlBase, verify: bool = True
) -> tuple[comfy.controlnet.ControlBase, str]:
    """(a control that runs compiled, what the user should know or ""); ``control`` stays as it is.

    verify: compare each new size's first result with eager.

    One that cannot be compiled comes back as it is, with the reason; one that is compiled already, as it is.
    """
    name = type(control).__name__
    outcome, failure = attempt(lambda: _compiled(control, name, verify), failed(name, "Compile ControlNet"), INTERRUPTS)
    return (control, failure) if failure else outcome


def _compiled(
    control: comfy.controlnet.ControlBase, name: str, verify: bool
) -> tuple[comfy.controlnet.ControlBase, str]:
    if isinstance(control, CompiledControlNet):
        return control, ""
    obstacle = unsupported(control) or devices.obstacle(control.load_device)
    if obstacle:
        message = f"{obstacle}. It runs as without this node"
        STATS.fallback(name, message)
        return control, message
    compiled = control.copy().set_previous_controlnet(control.previous_controlnet)
    compiled.__class__ = CompiledControlNet
    compiled.control_model = _shadow_of(control.control_model, verify)
    compiled.control_model_wrapped = control.control_model_wrapped.clone()  # ComfyUI takes it for the same model
    compiled.control_model_wrapped.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _drop_graphs_on_unload)
    return compiled, ""


def unsupported(control: comfy.controlnet.ControlBase) -> str:
    """Why this control cannot be compiled; "" if it can."""
    if isinstance(control, comfy.controlnet.T2IAdapter):
        return say("t2i_adapter")
    if isinstance(control, comfy.controlnet.ControlLora):
        return say("control_lora")
    if type(control) is not comfy.controlnet.ControlNet:
        return say("unknown_control", name=type(control).__name__)
    return family.unsupported(control.control_model) if _is_by_hand(control.control_model) else ""


def _is_by_hand(model: nn.Module) -> bool:
    """Whether there is a forward by hand for this network, on kernels; all others are recorded."""
    return type(model) is family.MODEL


def _shadow_of(model: nn.Module, verify: bool) -> nn.Module:
    """A shallow copy of the network, whose forward goes through the engine."""
    shadow = copy.copy(model)
    shadow._forward_hooks, shadow._forward_pre_hooks = OrderedDict(), OrderedDict()  # or the model's own run twice
    shadow.forward = (_Forward if _is_by_hand(model) else _Recorded)(model, verify)
    return shadow


def _drop_graphs_on_unload(patcher: ModelPatcher, unpatch_all: bool = True, *_: Any) -> None:
    if unpatch_all:
        drop_graphs(patcher.model)


class CompiledControlNet(comfy.controlnet.ControlNet):
    """ComfyUI's control object over a shadow of its network. Nodes copy it for each prompt that it is applied to."""

    def copy(self) -> "CompiledControlNet":  # noqa: D102
        c = super().copy()
        c.__class__ = type(self)
        return c

    def get_control(  # noqa: D102
        self, x_noisy: Tensor, t: Tensor, cond: Any, batched_number: int, *args: Any, **kwargs: Any
    ) -> Any:
        self._sampling.prompts = batched_number
        return super().get_control(x_noisy, t, cond, batched_number, *args, **kwargs)

    def pre_run(self, model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        super().pre_run(model, *args, **kwargs)
        patcher = getattr(model, "current_patcher", None)
        attempt(lambda: self._sampling.begin(self, patcher), failed(NAME, "a run's beginning"), INTERRUPTS)

    def cleanup(self) -> None:  # noqa: D102
        self._sampling.end(self)
        super().cleanup()

    @property
    def _sampling(self) -> "_Sampling":
        return self.control_model.forward.sampling


class _Sampling:
    """The sampling runs that one network takes part in, and what is known of it until the last of them ends."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.prompts = 1  # that the rows of a call belong to
        # of a recorded network's results: their containers, with places for tensors. Found again like recordings
        self.forms: OrderedDict[ShapeKey, Any] = OrderedDict()
        self._users: weakref.WeakSet[CompiledControlNet] = weakref.WeakSet()
        self._run: Run | taping.TapeRun | None = None
        self._lock = threading.RLock()

    def begin(self, control: CompiledControlNet, patcher: ModelPatcher | None) -> None:
        """A run of ``patcher`` begins for ``control``. ComfyUI says so once for each prompt that has it."""
        with self._lock:
            if control in self._users:
                return
            self._users.add(control)
            self.settings = Settings(graph_budget_mb=settings_of(patcher).graph_budget_mb)
        if patcher is not None:  # a run that breaks off is cleaned up on its model's side alone
            patcher.add_callback_with_key(CallbacksMP.ON_CLEANUP, RUN_KEY, _Ending(self, control))

    def end(self, control: CompiledControlNet) -> None:
        """``control``'s run is over. Leaves the weights as ComfyUI had them, once the last one is."""
        with self._lock:
            self._users.discard(control)
            if self._users:
                return
            run, self._run, self.prompts, self.settings = self._run, None, 1, Settings()
            if run is not None:
                attempt(run.close, failed(NAME, "the run's end"), INTERRUPTS)

    def run(self, model: nn.Module, engine: Engine, device: torch.device) -> Run:
        """The run's state; outside a sampling run a fresh one that leaves the weights alone."""
        with self._lock:
            if not self._users:
                return Run(family, model, None)
            if self._run is None:
                wanted = engine.wants_channels_last(self.settings, device)
                self._run = Run(family, model, ChannelsLastWeights() if wanted else None)
            self._run.refresh()
            return self._run

    @contextmanager
    def tape_run(self, model: nn.Module) -> Iterator[taping.TapeRun]:
        """As ``run``, of a network that is recorded, for one forward."""
        with self._lock:
            lasting = self._run
            if lasting is None:
                layout = ChannelsLastWeights() if self._users else None
                lasting = taping.TapeRun(model, taping.fingerprints(model), layout)
                self._run = lasting if self._users else None
        try:
            yield lasting
        finally:
            if lasting is not self._run:  # no sampling run will end it
                lasting.close()


class _Ending:
    """The callback that ends a run with its model's, and takes itself off the model."""

    def __init__(self, sampling: _Sampling, control: CompiledControlNet) -> None:
        self._sampling, self._control = sampling, control

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Ending":
        """It lies in ``model_options`` while the model is sampled, which a pack may copy to the bottom."""
        return self

    def __call__(self, patcher: ModelPatcher, *_: Any) -> None:
        patcher.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, RUN_KEY)
        if not patcher.callbacks.get(CallbacksMP.ON_CLEANUP, True):  # as it was: ComfyUI makes the entry when needed
            del patcher.callbacks[CallbacksMP.ON_CLEANUP]
        self._sampling.end(self._control)


_SAMPLING: "weakref.WeakKeyDictionary[nn.Module, _Sampling]" = weakref.WeakKeyDictionary()


class _Forward:
    """The forward of one ControlNet through its engine."""

    def __init__(self, model: nn.Module, verify: bool) -> None:
        self._model, self._verify = model, verify
        self._engine = engine_for(model, NAME, family.KIND)
        self.sampling = _SAMPLING.setdefault(model, _Sampling())

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Forward":
        """A pack that copies prompts to the bottom gets a network of its own, as it does without us."""
        return type(self)(copy.deepcopy(self._model, memo), self._verify)

    def __call__(self, *args: Any, **kwargs: Any) -> Residuals:
        """ControlNet.forward; ComfyUI's own if anything of ours fails."""
        theirs = Theirs(lambda: self._model(*args, **kwargs))
        if torch.compiler.is_compiling():  # someone compiles the whole model: stay out of the way
            return theirs()
        ours = partial(self._through_engine, theirs, args, kwargs)
        return theirs.rescue(ours, failed(self._engine.stats.name, "a forward"), INTERRUPTS)

    def _through_engine(self, theirs: Theirs, args: tuple, kwargs: dict[str, Any]) -> Residuals:
        settings = replace(self.sampling.settings, verify=self._verify)
        with outside_memory_plan():
            *output, middle = self._engine(self._call(family.arguments(*args, **kwargs), theirs), settings)
        return {"middle": [middle], "output": output}

    def _call(self, given: Arguments, theirs: Theirs) -> Call:
        model, x, obstacle = self._model, given.tensors["x"], family.obstacle(self._model, given)
        run = None if obstacle else self.sampling.run(model, self._engine, x.device)
        plan = run.plan if run else None
        obstacle = obstacle or (plan.survey.obstacle() if plan else "")

        def forward(ops: FusedOps, tensors: dict[str, Tensor]) -> Output:
            return family.forward(ops, model, plan, given, tensors)

        return Call(
            key=shape_key(given.flat(), given.structure()),
            inputs=given.flat(),
            forward=forward,
            eager=lambda: _flat(theirs()),
            weights=run.fingerprint() if run else 0,
            constants=lambda: plan.constants(),
            width=x.shape[-1] * family.LATENT_TO_PIXELS,
            height=x.shape[-2] * family.LATENT_TO_PIXELS,
            batch=max(1, len(x) // self.sampling.prompts),
            obstacle=obstacle,
            graph_obstacle=family.graph_obstacle(model, plan, x) if plan else "",
            eager_parts=plan.survey.eager_parts() if plan else "",
            repeatable=not (plan and plan.survey.altered),
        )


def _flat(residuals: Residuals) -> tuple[Tensor, ...]:
    """ComfyUI's residuals in the order of ``family.forward``."""
    (middle,) = residuals["middle"]
    return *residuals["output"], middle


class _Recorded(_Forward):
    """The forward of a network that is recorded: one of Flux, SD3 or Qwen-Image, say."""

    def _through_engine(self, theirs: Theirs, args: tuple, kwargs: dict[str, Any]) -> Any:
        settings, model, forms = replace(self.sampling.settings, verify=self._verify), self._model, []

        def flat(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            return taken_apart(model(*args, **kwargs))

        def taken_apart(out: Any) -> tuple[Tensor, ...]:
            tensors: list[Tensor] = []
            forms.append(replaced(out, Tensor, lambda tensor: tensors.append(tensor) or _Place(len(tensors) - 1)))
            return tuple(tensors)

        given = taping.take(model.forward, args, kwargs)
        theirs.run = lambda: given.call(model)
        first = next(iter(given.tensors.values()), None)
        size = taping.pixels(tuple(first.shape)) if first is not None else (0, 0, 1)
        with self.sampling.tape_run(model) as run, outside_memory_plan():
            call = taping.call_of(model, flat, given, run, lambda: taken_apart(theirs()), size)
            if not call.obstacle and first is not None:
                call = replace(call, batch=max(1, len(first) // self.sampling.prompts))
            out = self._engine(call, settings)
        known = self.sampling.forms
        if forms:
            known[call.key] = forms[-1]
        known.move_to_end(call.key)
        while len(known) > MAX_FORMS:
            known.popitem(last=False)
        return replaced(known[call.key], _Place, lambda place: out[place.number])


class _Place:
    """Where a tensor lies in the flat result of a network."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number
