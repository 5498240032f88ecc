"""How a family meets ComfyUI: keyed wrappers on a clone of the model's patcher, state per sampling run.

``compile_model`` returns a clone whose every forward goes through an engine; the shared model is not touched, so a
workflow without our node (or with ``mode: off``) gets exactly ComfyUI's own forward.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP
from torch import Tensor, nn

from ..engine import Call, Engine, Settings
from ..key import shape_key
from ..ops import FusedOps
from ..stats import STATS
from ..weights import ChannelsLastWeights, WeightWatch
from . import unet
from .layers import INTERRUPTS

KEY = "anyshape"
LATENT_TO_PIXELS = 8  # every model whose forward is ComfyUI's UNetModel
PATCH_KEYS = ("patches", "patches_replace")

_ENGINES: "weakref.WeakKeyDictionary[nn.Module, Engine]" = weakref.WeakKeyDictionary()


def engine_for(module: nn.Module, name: str, kind: str, **traits: bool) -> Engine:
    """The engine of ``module``: one for all clones of its patcher, gone when the module is. ``traits``: see Engine."""
    if module not in _ENGINES:
        _ENGINES[module] = Engine(STATS.model(name, kind), INTERRUPTS, **traits)
    return _ENGINES[module]


def compile_model(patcher: ModelPatcher, settings: Settings) -> tuple[ModelPatcher, str]:
    """(a clone that runs compiled, what the user should know or "").

    A model that cannot be compiled comes back as a plain clone with the reason; ``mode: off`` as a plain clone.
    """
    clone = patcher.clone()
    remove(clone)  # of two Compile Model nodes in a row, the last one decides
    if settings.mode == "off":
        return clone, ""
    obstacle = unet.unsupported(getattr(patcher.model, "diffusion_model", None))
    if obstacle:
        message = f"{obstacle}. It runs in eager, as without this node; Compile VAE works with any SD or Flux VAE"
        STATS.fallback(type(patcher.model).__name__, message)
        return clone, message
    session = _Session(settings, type(patcher.model).__name__)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, session.sampling)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, session.forward)
    clone.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _drop_graphs_on_unload)
    return clone, _graph_message(settings, patcher.load_device)


def remove(patcher: ModelPatcher) -> None:
    """Takes our wrappers and callbacks off ``patcher``."""
    for wrapper in (WrappersMP.OUTER_SAMPLE, WrappersMP.DIFFUSION_MODEL):
        patcher.remove_wrappers_with_key(wrapper, KEY)
    patcher.remove_callbacks_with_key(CallbacksMP.ON_DETACH, KEY)


def _graph_message(settings: Settings, device: torch.device) -> str:
    """What the user should know of graphs before the first run; "" where all is as it should be."""
    if device.type != "cuda" or settings.graph_budget_mb == 0:
        return ""
    card = torch.cuda.get_device_properties(device).total_memory
    if settings.graph_budget_bytes <= card:
        return ""
    return (
        f"graph_budget_mb is {settings.graph_budget_mb}, more than the {card >> 20} MB of this card: graphs are "
        f"captured until memory runs out, then sizes run without one. 2048 is enough for most workflows"
    )


def _drop_graphs_on_unload(patcher: ModelPatcher, unpatch_all: bool = True, *_: Any) -> None:
    engine = _ENGINES.get(getattr(patcher.model, "diffusion_model", None))
    if engine is not None and unpatch_all:
        engine.drop_graphs()


class _Run:
    """What is known of one UNet during one sampling run. Holds the model: dropped when the run ends."""

    def __init__(self, model: nn.Module, layout: ChannelsLastWeights | None) -> None:
        self.model = model
        self._layout = layout
        self._scan()

    def _scan(self) -> None:
        if self._layout is not None:
            self._layout.apply(self.model)
        self.plan = unet.Plan(self.model)
        self._watch = WeightWatch(self.model)
        self.weights = self._watch.fingerprint()

    def refresh(self) -> None:
        """Looks again if weights moved: ComfyUI may patch, unload or start to stream them in mid-run."""
        if self._watch.fingerprint() != self.weights:
            self._scan()

    def close(self) -> None:
        """Leaves the weights as ComfyUI had them."""
        if self._layout is not None:
            self._layout.restore()


class _Session:
    """The wrappers of one compiled patcher (and of its clones), and the runs in progress."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self._runs: dict[int, _Run] = {}  # by id of the diffusion model; several threads sample several models
        self._depth = 0
        self._lock = threading.RLock()

    def sampling(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """OUTER_SAMPLE: state begins here and ends in ``finally``."""
        with self._lock:
            self._depth += 1
        try:
            return executor(*args, **kwargs)
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    self._close_runs()

    def _close_runs(self) -> None:
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.close()

    def _run(self, model: nn.Module, device: torch.device) -> _Run:
        """The run's state; outside a sampling run a fresh one that leaves the weights alone."""
        with self._lock:
            if self._depth == 0:
                return _Run(model, None)
            if id(model) not in self._runs:
                wanted = engine_for(model, self.name, "unet").wants_channels_last(self.settings, device)
                self._runs[id(model)] = _Run(model, ChannelsLastWeights() if wanted else None)
            run = self._runs[id(model)]
            run.refresh()
            return run

    def forward(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Tensor:
        """DIFFUSION_MODEL: our forward takes the place of the innermost one; other packs' wrappers stay around it."""
        model, original = executor.class_obj, executor.original

        def ours(*inner: Any, **extra: Any) -> Tensor:
            return self._call(model, original, *inner, **extra)

        chain = WrapperExecutor.new_class_executor(ours, model, executor.wrappers, executor.idx + 1)
        return chain.execute(*args, **kwargs)

    def _call(
        self, model: nn.Module, original: Callable[..., Tensor], x: Tensor, timesteps: Tensor | None = None,
        context: Tensor | None = None, y: Tensor | None = None, control: unet.Control = None,
        transformer_options: dict[str, Any] | None = None, **extra: Any,
    ) -> Tensor:  # fmt: skip
        """UNetModel._forward's signature, through the engine."""
        options = {} if transformer_options is None else transformer_options

        def eager() -> Tensor:
            return original(x, timesteps, context, y, control, options, **extra)

        if torch.compiler.is_compiling():  # someone compiles the whole model: stay out of the way
            return eager()
        obstacle = _foreign_forward(model, original) or _obstacle(x, context, extra)
        run = None if obstacle else self._run(model, x.device)
        inputs = _flatten(x, timesteps, context, y, control)
        lengths = {name: len(residuals) for name, residuals in (control or {}).items()}
        call = Call(
            key=shape_key(inputs, lengths),
            inputs=inputs,
            forward=lambda ops, tensors: _fused(ops, model, run.plan, tensors, options, lengths),
            eager=eager,
            weights=run.weights if run else 0,
            constants=lambda: run.plan.text.table,
            width=x.shape[-1] * LATENT_TO_PIXELS,
            height=x.shape[-2] * LATENT_TO_PIXELS,
            batch=max(1, x.shape[0] // max(1, len(options.get("cond_or_uncond", (0,))))),
            obstacle=obstacle,
            graph_obstacle=_graph_obstacle(run, options) if run else "",
            eager_parts=run.plan.survey.eager_parts() if run else "",
        )
        return engine_for(model, self.name, "unet")(call, self.settings)


def _foreign_forward(model: nn.Module, original: Callable[..., Tensor]) -> str:
    """Why the model's forward is not the one that ``unet`` mirrors; "" if it is."""
    if getattr(original, "__func__", None) is type(model)._forward:
        return ""
    return "another node replaced the model's forward, so the model runs in eager"


def _obstacle(x: Tensor, context: Any, extra: dict[str, Any]) -> str:
    """Why only ComfyUI's own forward is right for this call; "" if ours is."""
    if torch.is_grad_enabled():
        return "gradients are on (training), so the model runs in eager"
    if not isinstance(context, Tensor):
        return "the model was called without a prompt's tensor, so it runs in eager"
    unknown = sorted(name for name, value in extra.items() if value is not None)
    if unknown:
        return f"the model was called with {', '.join(unknown)}, which only ComfyUI's own forward understands"
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{x.dtype} activations are not supported; load the model in fp16, bf16 or fp32"
    return ""


def _graph_obstacle(run: _Run, options: dict[str, Any]) -> str:
    """Why this forward may have Python side effects or no fixed weights, so that it must not be captured."""
    patches = sorted({name for key in PATCH_KEYS for name, value in options.get(key, {}).items() if value})
    if "optimized_attention_override" in options:
        patches.append("optimized_attention_override")
    if patches:
        return f"patches by another node ({', '.join(patches)}): patched blocks run in eager, without a graph"
    return run.plan.survey.graph_obstacle()


def _flatten(
    x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor | None, control: unet.Control
) -> dict[str, Tensor]:
    """The call's tensors by name; ControlNet residuals as ``control.<list>.<index>``."""
    inputs = {"x": x, "timesteps": timesteps, "context": context, "y": y}
    for name, residuals in (control or {}).items():
        inputs |= {f"control.{name}.{index}": residual for index, residual in enumerate(residuals)}
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def _unflatten_control(tensors: dict[str, Tensor], names: dict[str, int]) -> unet.Control:
    return {name: [tensors.get(f"control.{name}.{i}") for i in range(count)] for name, count in names.items()}


def _fused(
    ops: FusedOps, model: nn.Module, plan: unet.Plan, tensors: dict[str, Tensor], options: dict[str, Any],
    lengths: dict[str, int],
) -> Tensor:  # fmt: skip
    """The fused forward on flattened inputs. Lists are made anew: ComfyUI pops residuals from their ends."""
    forward = unet.UNetForward(ops, model, plan, options)
    control = _unflatten_control(tensors, lengths) if lengths else None
    return forward(tensors["x"], tensors["timesteps"], tensors["context"], tensors.get("y"), control)
