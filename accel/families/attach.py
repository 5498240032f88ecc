"""How a family meets ComfyUI: keyed wrappers on a clone of the model's patcher, state per sampling run.

``compile_model`` returns a clone whose every forward goes through an engine; the shared model is not touched, so a
workflow without our node (or with ``mode: off``) gets exactly ComfyUI's own forward.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import nn

from ..attempt import attempt, failed
from ..engine import Engine, Settings
from ..stats import STATS
from . import flux, unet
from .family import Family
from .layers import INTERRUPTS
from .session import Session

KEY = "anyshape"
FAMILIES: tuple[Family, ...] = (unet, flux)

_ENGINES: "weakref.WeakKeyDictionary[nn.Module, Engine]" = weakref.WeakKeyDictionary()


def engine_for(module: nn.Module, name: str, kind: str, **traits: bool) -> Engine:
    """The engine of ``module``: one for all clones of its patcher, gone when the module is. ``traits``: see Engine."""
    if module not in _ENGINES:
        _ENGINES[module] = Engine(STATS.model(name, kind), INTERRUPTS, **traits)
    return _ENGINES[module]


def entry_names(module: nn.Module | None) -> list[str]:
    """The names of the stats' entries that ``module`` has; none before its first forward."""
    engine = None if module is None else _ENGINES.get(module)
    return [engine.stats.name] if engine else []


def compile_model(patcher: ModelPatcher, settings: Settings) -> tuple[ModelPatcher, str]:
    """(a clone that runs compiled, what the user should know or "").

    A model that cannot be compiled comes back as a plain clone with the reason; ``mode: off`` as a plain clone.
    """
    clone, name = patcher.clone(), type(patcher.model).__name__
    remove(clone)  # of two Compile Model nodes in a row, the last one decides
    if settings.mode == "off":
        return clone, ""
    message, failure = attempt(lambda: _attach(clone, name, settings), failed(name, "Compile Model"), INTERRUPTS)
    if failure:
        remove(clone)
    return clone, failure or message


def _attach(clone: ModelPatcher, name: str, settings: Settings) -> str:
    """Puts our wrappers on ``clone``, or says why it runs in eager; returns what the user should know or ""."""
    family, obstacle = family_of(getattr(clone.model, "diffusion_model", None))
    if obstacle:
        message = f"{obstacle}. It runs in eager, as without this node; Compile VAE works with any SD or Flux VAE"
        STATS.fallback(name, message)
        return message
    session = Session(family, settings, name, engine_of(family, clone))
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, session.sampling)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, session.forward)
    clone.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _drop_graphs_on_unload)
    return _graph_message(settings, clone.load_device)


def engine_of(family: Family, patcher: ModelPatcher) -> Callable[[nn.Module], Engine]:
    """What gives the engine of the diffusion model that is sampled."""
    name = type(patcher.model).__name__
    return lambda model: engine_for(model, name, family.KIND)


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
    if unpatch_all and hasattr(patcher.model, "diffusion_model"):
        drop_graphs(patcher.model.diffusion_model)


def drop_graphs(module: nn.Module) -> None:
    """Gives the memory of this model's graphs back, if it has any."""
    engine = _ENGINES.get(module)
    if engine is not None:
        attempt(engine.drop_graphs, failed(engine.stats.name, "giving graphs back"), INTERRUPTS)


def settings_of(patcher: ModelPatcher | None) -> Settings:
    """The settings of the Compile Model node that made this patcher; the default ones without such a node."""
    wrappers = patcher.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY) if patcher else ()
    return next((wrapper.__self__.settings for wrapper in wrappers), Settings())
