"""Compile ControlNet: connects a ControlNet to the engine and to ComfyUI's sampling.

The shared ControlNet is never touched. A copy of ComfyUI's control object gets a shallow copy of its network, with the
same layers and weights but another ``forward``; ComfyUI's memory management still loads the original. A Control-LoRA
has a network in a run only, and gets such a copy of it then.
"""

from typing import Any

import comfy.controlnet
import comfy.model_management
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from .. import devices
from ..attempt import attempt, failed
from ..engine import Engine
from ..parts_seen import original
from ..reasons import say
from ..stats import STATS
from .attach import KEY, let_go_on_detach
from .control_lora import file_of
from .controlnet_run import NAME, Forward, Sampling, shadow_of
from .surroundings import INTERRUPTS


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
    if isinstance(control, Compiled):
        return control, ""
    obstacle = unsupported(control) or devices.obstacle(_device(control))
    if obstacle:
        message = f"{obstacle}. It runs as without this node"
        STATS.fallback(name, message)
        return control, message
    compiled = control.copy().set_previous_controlnet(control.previous_controlnet)
    compiled.__class__ = KINDS[type(control)]
    compiled.take_over(control, verify)
    return compiled, ""


def unsupported(control: comfy.controlnet.ControlBase) -> str:
    """Says why this control cannot be compiled; "" if it can."""
    if isinstance(control, comfy.controlnet.T2IAdapter):
        return say("t2i_adapter")
    return "" if type(control) in KINDS else say("unknown_control", name=type(control).__name__)


def _device(control: comfy.controlnet.ControlNet) -> Any:
    """Where the network runs. A Control-LoRA does not say: it is built where ComfyUI computes."""
    return getattr(control, "load_device", None) or comfy.model_management.get_torch_device()


class StandIn(type):
    """The class of our classes, each of which equals the one of ComfyUI's that it stands in for.

    Another pack may take on a control if ``type(control) == ControlNet``, and leave any other alone, so that what the
    user asked of the pack is lost. What it makes of ours runs on the network that goes through the engine.
    """

    own: type | None = None  # ComfyUI's class

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls.own is not None and other is cls.own)

    def __hash__(cls) -> int:
        return type.__hash__(cls.own or cls)


class Compiled(metaclass=StandIn):
    """Our part of a control of ComfyUI's. Nodes copy it for each prompt that it is applied to."""

    def copy(self) -> "Compiled":  # noqa: D102
        c = super().copy()
        c.__class__ = type(self)
        return c

    def get_control(  # noqa: D102
        self, x_noisy: Any, t: Any, cond: Any, batched_number: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.sampling.prompts = batched_number
        return super().get_control(x_noisy, t, cond, batched_number, *args, **kwargs)

    def pre_run(self, model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        super().pre_run(model, *args, **kwargs)
        attempt(lambda: self.begin(model), failed(NAME, "a run's beginning"), INTERRUPTS)

    def begin(self, model: Any) -> bool:
        """A sampling run of ``model`` begins; False if it has begun. ComfyUI says so once for each prompt."""
        return self.sampling.begin(self, getattr(model, "current_patcher", None))

    @property
    def engine(self) -> Engine:
        """Which runs its network."""
        return self.sampling.engine


class CompiledControlNet(Compiled, comfy.controlnet.ControlNet):
    """ComfyUI's control object over a shadow of its network."""

    own = comfy.controlnet.ControlNet

    def take_over(self, control: comfy.controlnet.ControlNet, verify: bool) -> None:
        """The network of ``control`` is this one's, too."""
        self.control_model = shadow_of(control.control_model, verify)
        self._forward: Forward = self.control_model.forward  # another node may put something around the network
        self._load_by(control.control_model_wrapped.clone())  # ComfyUI takes it for the same model

    def begin(self, model: Any) -> bool:  # noqa: D102
        begins = super().begin(model)
        if begins and self.control_model.__dict__.get("forward") is not self._forward:
            STATS.fallback(NAME, say("control_passed_by"))
        return begins

    def _load_by(self, patcher: ModelPatcher) -> None:
        """The network's weights are loaded and unloaded by ``patcher``."""
        patcher.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, let_go_on_detach)
        self.control_model_wrapped = patcher

    def copy(self) -> "CompiledControlNet":  # noqa: D102
        c = super().copy()
        c._forward = self._forward
        return c

    def deepclone_multigpu(self, *args: Any, **kwargs: Any) -> "CompiledControlNet":  # noqa: D102
        c = super().deepclone_multigpu(*args, **kwargs)  # whose patcher is of the copy's shadow
        forward = original(c.control_model).__dict__.get("forward")
        if isinstance(forward, Forward):
            made, c._forward = c.control_model_wrapped, forward
            c._load_by(type(made)(forward.network, made.load_device, made.offload_device))
        return c

    def cleanup(self) -> None:  # noqa: D102
        self.sampling.end(self)
        super().cleanup()

    @property
    def sampling(self) -> Sampling:
        """What is known of the network while it is sampled."""
        return self._forward.sampling


class CompiledControlNetSD35(CompiledControlNet, comfy.controlnet.ControlNetSD35):
    """The same of SD3.5 Large, whose network gets an embedding of the model's when a run begins."""

    own = comfy.controlnet.ControlNetSD35


class CompiledControlLora(Compiled, comfy.controlnet.ControlLora):
    """ComfyUI's control object, over a shadow of the network that it builds for each run."""

    own = comfy.controlnet.ControlLora

    def take_over(self, control: comfy.controlnet.ControlLora, verify: bool) -> None:
        """The weights of ``control`` are this one's, too."""
        self._file, self._verify = file_of(control), verify

    def copy(self) -> "CompiledControlLora":  # noqa: D102
        c = super().copy()
        c._file, c._verify = self._file, self._verify
        return c

    def begin(self, model: Any) -> bool:  # noqa: D102
        self._file.built(self, model.diffusion_model, self._verify)
        return super().begin(model)

    def cleanup(self) -> None:  # noqa: D102
        self._file.over(self)
        super().cleanup()

    @property
    def sampling(self) -> Sampling:
        """What is known of its networks while they are sampled."""
        return self._file.sampling


KINDS = {kind.own: kind for kind in (CompiledControlNet, CompiledControlNetSD35, CompiledControlLora)}
