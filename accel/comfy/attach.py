"""Attaches the engine to a MODEL, by keyed wrappers on a clone of its patcher. State belongs to a sampling run.

``compile_model`` returns a clone whose every forward goes through an engine; the shared model is not touched, so a
workflow without our node (or with ``mode: off``) gets exactly ComfyUI's own forward.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP
from torch import nn

from .. import devices
from ..attempt import attempt, failed
from ..call import Settings
from ..engine import Engine
from ..reasons import say
from ..stats import STATS
from ..tape.named_tensors import parts_of
from . import small_weights
from .dynamic import is_mapped
from .latents import latents_of
from .session import Session
from .surroundings import INTERRUPTS

KEY = "anyshape"
Forward = Callable[..., Any]
MakesForward = Callable[[nn.Module, Forward], Forward]

_LOCK = threading.Lock()  # two first calls at once must get one engine
_ENGINES: "weakref.WeakKeyDictionary[nn.Module, dict[str, Engine]]" = weakref.WeakKeyDictionary()  # and by name


def engine_for(module: nn.Module, name: str, kind: str, **traits: bool) -> Engine:
    """The engine of ``module``: one for all clones of its patcher, gone when the module is.

    name: of its entry in the stats; a VAE has two. traits: see ``Engine``.
    """
    with _LOCK:
        engines = _ENGINES.setdefault(module, {})
        if name not in engines:
            engines[name] = Engine(STATS.model(name, kind), INTERRUPTS, **traits)
        return engines[name]


def engines_of(module: nn.Module | None) -> list[Engine]:
    """Those that ``module`` has; none before its first forward."""
    return [] if module is None else list(_ENGINES.get(module, {}).values())


def entry_names(module: nn.Module | None) -> list[str]:
    """Returns the names of ``module``'s entries in the stats; none before its first forward."""
    return [engine.stats.name for engine in engines_of(module)]


def compile_model(patcher: ModelPatcher, settings: Settings) -> tuple[ModelPatcher, str]:
    """(a clone that runs compiled, what the user should know or "").

    A model that cannot be compiled comes back as a plain clone with the reason; ``mode: off`` as a plain clone.
    """
    if settings.mode == "off":
        return remove(patcher.clone()), ""
    judge = failed(type(patcher.model).__name__, "Compile Model")
    outcome, failure = attempt(lambda: _compiled(patcher, settings), judge, INTERRUPTS)
    return (remove(patcher.clone()), failure) if failure else outcome


def _compiled(patcher: ModelPatcher, settings: Settings) -> tuple[ModelPatcher, str]:
    clone, name = remove(patcher.clone()), type(patcher.model).__name__  # of two such nodes, the last one decides
    if obstacle := devices.obstacle(patcher.load_device):
        STATS.fallback(name, obstacle)
        return clone, obstacle
    session = Session(settings, name, engine_of(patcher), size_of(patcher))
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, session.sampling)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, session.forward)
    put_around(clone, KEY, session.whole_forward)
    clone.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, let_go_on_detach)
    return clone, _graph_message(settings, clone.load_device)


class Around:
    """Our forward in the place of a model's own, for one call of ComfyUI's ``apply_model``.

    It is there only until it is called: what runs then, and what our looks at the model see, is the model as it is,
    with whatever another pack has put there. A patch of the patcher's would stand over that, and stay in its place.
    arounds: by node, the outermost last.
    """

    def __init__(self, model: nn.Module, arounds: dict[str, MakesForward]) -> None:
        self._model, self.arounds = model, arounds
        self._own: Forward | None = None  # another pack's; None if it is the class's

    def __enter__(self) -> None:
        self._own = self._model.__dict__.get("forward")
        self._model.forward = self

    def __exit__(self, *error: object) -> None:
        if self._model.__dict__.get("forward") is not self:  # another pack's by now, which it looks after
            return
        if self._own is None:
            del self._model.forward
        else:
            self._model.forward = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result."""
        self.__exit__()
        try:
            forward = self._model.forward
            for around in self.arounds.values():
                forward = around(self._model, forward)
            return forward(*args, **kwargs)
        finally:
            self.__enter__()


def put_around(patcher: ModelPatcher, key: str, around: MakesForward) -> None:
    """Where the model's forward calls no wrappers, puts what ``around`` makes of it in its place.

    Looked at in each call: another pack's node may give the model another class, whose forward calls none.
    key: the node's, for ``remove_forward``.
    """
    kind = type(patcher.model.diffusion_model)

    def applied(executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        model = executor.class_obj.diffusion_model
        if not isinstance(model, kind) or _calls_wrappers(type(model)):  # no instance: what torch.compile made of it
            return executor(*args, **kwargs)
        there = model.__dict__.get("forward")
        if isinstance(there, Around):  # another node of ours
            there.arounds[key] = around
            return executor(*args, **kwargs)
        with Around(model, {key: around}):
            return executor(*args, **kwargs)

    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, key, applied)


def size_of(patcher: ModelPatcher) -> Callable[[tuple[int, ...]], tuple[int, int, int]] | None:
    """What tells (width, height, frames) of a picture from its latent's shape; None where nobody knows."""
    latents = latents_of(patcher.model.latent_format)
    return latents.size if latents else None


def engine_of(patcher: ModelPatcher) -> Callable[[nn.Module], Engine]:
    """What gives the engine of the diffusion model that is sampled."""
    name = type(patcher.model).__name__
    return lambda model: engine_for(model, name, "model")


@functools.lru_cache(maxsize=64)
def _calls_wrappers(kind: type) -> bool:
    """Whether a model's forward calls DIFFUSION_MODEL wrappers. Those of SD3 and some others do not.

    Some leave it to the forward of their base class (Anima, LTXAV): one of ours around that would be a second one.
    """
    for base in kind.__mro__:
        if "forward" not in vars(base):
            continue
        try:
            source = inspect.getsource(base.forward)
        except (OSError, TypeError):  # no source here: most do
            return True
        if "DIFFUSION_MODEL" in source:
            return True
        if "super(" not in source:
            return False
    return False


def remove(patcher: ModelPatcher) -> ModelPatcher:
    """Removes our wrappers and callbacks from ``patcher``, and returns it."""
    for wrapper in (WrappersMP.OUTER_SAMPLE, WrappersMP.DIFFUSION_MODEL):
        patcher.remove_wrappers_with_key(wrapper, KEY)
    patcher.remove_callbacks_with_key(CallbacksMP.ON_DETACH, KEY)
    remove_forward(patcher, KEY)
    return patcher


def remove_forward(patcher: ModelPatcher, key: str) -> None:
    """Removes from ``patcher`` what a node put around the model's own forward."""
    patcher.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, key)


def _graph_message(settings: Settings, device: torch.device) -> str:
    """What the user should know of graphs before the first run; "" where all is as it should be."""
    if not devices.is_nvidia(device) or settings.graph_budget_mb == 0:
        return ""
    card = torch.cuda.get_device_properties(device).total_memory
    if settings.graph_budget_bytes <= card:
        return ""
    return say("large_budget", budget=settings.graph_budget_mb, card=card >> 20)


def let_go_on_detach(patcher: ModelPatcher, unpatch_all: bool = True, *_: Any) -> None:
    """Lets go of the weights, because ComfyUI has unloaded the model, or loads it again, perhaps for another patcher.

    That one may have other LoRAs, and these weights must not stay on the GPU. unpatch_all: the model is unloaded, and
    graphs go as well. What ComfyUI maps in (DynamicVRAM) has its memory for as long as the model is there.
    """
    module = getattr(patcher.model, "diffusion_model", patcher.model)  # a ControlNet is its own
    if unpatch_all:
        drop_graphs(module)
        return
    engines = engines_of(module)
    if not engines or any(map(is_mapped, parts_of(module))):
        return
    for engine in engines:
        attempt(engine.loosen, failed(engine.stats.name, "letting go of weights"), INTERRUPTS)


def drop_graphs(module: nn.Module) -> None:
    """Frees the memory of this model's graphs, if it has any."""
    for engine in engines_of(module):
        attempt(engine.drop_graphs, failed(engine.stats.name, "giving graphs back"), INTERRUPTS)
    small_weights.forget(module)


def settings_of(patcher: ModelPatcher | None) -> Settings:
    """Returns the settings of the Compile Model node that made this patcher, or the defaults without such a node."""
    session = session_of(patcher) if patcher else None
    return session.settings if session else Settings()


def session_of(patcher: ModelPatcher) -> Session | None:
    """Returns what the Compile Model node put on this patcher; None without such a node, or in mode off."""
    return next((wrapper.__self__ for wrapper in patcher.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY)), None)
