"""Finds the entries of the stats that belong to a node's outputs. The node's line in the browser shows them.

Each function gives the names of the entries, in a form that keeps no model alive, or None for what is not compiled.
"""

import weakref
from collections.abc import Callable

import comfy.controlnet
import comfy.sd
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import nn

from ..engine import Engine
from . import attach, skipping

Names = Callable[[], list[str]]


def of_model(patcher: ModelPatcher, key: str = attach.KEY) -> Names | None:
    """Of a MODEL from Compile Model. Its entry is made by its first forward."""
    if not patcher.get_wrappers(WrappersMP.DIFFUSION_MODEL, key):
        return None
    module = weakref.ref(patcher.model.diffusion_model)
    return lambda: attach.entry_names(module())


def passed_by(patcher: ModelPatcher) -> Callable[[], str]:
    """Of a MODEL from Compile Model: why its latest sampling run went past it; "" if it did not."""
    session = attach.session_of(patcher)
    found = weakref.ref(session) if session else lambda: None
    return lambda: session.passed_by if (session := found()) else ""


def of_skipping(patcher: ModelPatcher) -> Names | None:
    """Of a MODEL from Skip Blocks."""
    return of_model(patcher, skipping.KEY)


def of_vae(vae: comfy.sd.VAE) -> Names | None:
    """Of a VAE: its decoder's and its encoder's."""
    names = [engine.stats.name for engine in engines_of(vae.first_stage_model)]
    return (lambda: names) if names else None


def engines_of(model: nn.Module | None) -> list[Engine]:
    """Those of a VAE's first-stage model, for decoding and for encoding; none if it does not come from Compile VAE."""
    ways = (getattr(model, way, None) for way in ("decode", "encode"))
    return [engine for way in ways if isinstance(engine := getattr(way, "_engine", None), Engine)]


def of_controlnet(control: comfy.controlnet.ControlBase) -> Names | None:
    """Of a ControlNet."""
    engine = getattr(control, "engine", None)
    return (lambda: [engine.stats.name]) if isinstance(engine, Engine) else None


def of_warm_up(patcher: ModelPatcher, vae: comfy.sd.VAE | None) -> Names | None:
    """Of what Warm Up passes on: the MODEL's, and the VAE's if there is one."""
    parts = [of_model(patcher), of_vae(vae) if vae is not None else None]
    found = [names for names in parts if names]
    return (lambda: [name for names in found for name in names()]) if found else None
