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
from ..stats import STATS
from ..weights import ChannelsLastWeights, WeightWatch
from . import flux, unet
from .family import Arguments, Family
from .layers import INTERRUPTS, is_foreign

KEY = "anyshape"
FAMILIES: tuple[Family, ...] = (unet, flux)
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
    family, obstacle = family_of(getattr(patcher.model, "diffusion_model", None))
    if obstacle:
        message = f"{obstacle}. It runs in eager, as without this node; Compile VAE works with any SD or Flux VAE"
        STATS.fallback(type(patcher.model).__name__, message)
        return clone, message
    session = _Session(family, settings, type(patcher.model).__name__)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, session.sampling)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, session.forward)
    clone.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _drop_graphs_on_unload)
    return clone, _graph_message(settings, patcher.load_device)


def family_of(model: nn.Module) -> tuple[Family | None, str]:
    """(the family whose forward this diffusion model has, why it cannot be compiled or "")."""
    family = next((family for family in FAMILIES if type(model) is family.MODEL), None)
    if family is None:
        return None, f"{type(model).__name__} is not a model that AnyShape knows (it knows SD's UNets and Flux.1)"
    return family, family.unsupported(model)


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
    """What is known of one model during one sampling run. Holds the model: dropped when the run ends."""

    def __init__(self, family: Family, model: nn.Module, layout: ChannelsLastWeights | None) -> None:
        self.model = model
        self._family, self._layout = family, layout
        self._scan()

    def _scan(self) -> None:
        if self._layout is not None:
            self._layout.apply(self.model)
        self.plan = self._family.Plan(self.model)
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

    def __init__(self, family: Family, settings: Settings, name: str) -> None:
        self.family = family
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

    def _engine(self, model: nn.Module) -> Engine:
        return engine_for(model, self.name, self.family.KIND)

    def _run(self, model: nn.Module, device: torch.device) -> _Run:
        """The run's state; outside a sampling run a fresh one that leaves the weights alone."""
        with self._lock:
            if self._depth == 0:
                return _Run(self.family, model, None)
            if id(model) not in self._runs:
                wanted = self._engine(model).wants_channels_last(self.settings, device)
                self._runs[id(model)] = _Run(self.family, model, ChannelsLastWeights() if wanted else None)
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

    def _call(self, model: nn.Module, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The ``_forward`` of the model's family, through the engine."""
        family, given = self.family, self.family.arguments(*args, **kwargs)

        def eager() -> Tensor:
            return original(*given.original, **given.known, **given.extra)

        if torch.compiler.is_compiling():  # someone compiles the whole model: stay out of the way
            return eager()
        x, inputs = given.tensors["x"], given.flat()
        obstacle = _foreign_forward(family, model, original) or _obstacle(given) or family.obstacle(given)
        run = None if obstacle else self._run(model, x.device)
        call = Call(
            key=shape_key(inputs, given.structure()),
            inputs=inputs,
            forward=lambda ops, tensors: family.forward(ops, model, run.plan, given, tensors),
            eager=eager,
            weights=run.weights if run else 0,
            constants=lambda: run.plan.constants(),
            width=x.shape[-1] * family.LATENT_TO_PIXELS,
            height=x.shape[-2] * family.LATENT_TO_PIXELS,
            batch=max(1, x.shape[0] // max(1, len(given.options.get("cond_or_uncond", (0,))))),
            obstacle=obstacle,
            graph_obstacle=_graph_obstacle(run, given.options) if run else "",
            eager_parts=run.plan.survey.eager_parts() if run else "",
        )
        return self._engine(model)(call, self.settings)


def _foreign_forward(family: Family, model: nn.Module, original: Callable[..., Tensor]) -> str:
    """Why the model's forward is not the one that the family mirrors; "" if it is."""
    own = getattr(original, "__func__", None) is type(model)._forward
    if own and not any(name in model.__dict__ and is_foreign(model, name) for name in family.MIRRORED):
        return ""
    return "another node replaced the model's forward, so the model runs in eager"


def _obstacle(given: Arguments) -> str:
    """Why only ComfyUI's own forward is right for this call; "" if ours is."""
    if torch.is_grad_enabled():
        return "gradients are on (training), so the model runs in eager"
    if not isinstance(given.tensors["context"], Tensor):
        return "the model was called without a prompt's tensor, so it runs in eager"
    unknown = sorted(name for name, value in given.extra.items() if value is not None)
    if unknown:
        return f"the model was called with {', '.join(unknown)}, which only ComfyUI's own forward understands"
    dtype = given.tensors["x"].dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{dtype} activations are not supported; load the model in fp16, bf16 or fp32"
    return ""


def _graph_obstacle(run: _Run, options: dict[str, Any]) -> str:
    """Why this forward may have Python side effects or no fixed weights, so that it must not be captured."""
    patches = sorted({name for key in PATCH_KEYS for name, value in options.get(key, {}).items() if value})
    if "optimized_attention_override" in options:
        patches.append("optimized_attention_override")
    if patches:
        return f"patches by another node ({', '.join(patches)}): patched blocks run in eager, without a graph"
    return run.plan.survey.graph_obstacle()
