"""Compile VAE: sends a VAE's decode and encode through the engine, where they are recorded like any model.

The loaded VAE is never touched. ComfyUI's ``VAE`` is copied with a clone of its patcher, and its first-stage model is
copied shallowly: the same layers and weights, but a ``decode`` and an ``encode`` of ours around ComfyUI's own. Tiles,
batches and the memory that is freed for them stay ComfyUI's.
"""

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.sd
from torch import nn

from .. import devices
from ..attempt import Fallback, attempt, failed
from ..call import Settings
from ..frames import together
from ..reasons import say
from ..stats import STATS
from . import entries, known_code, sampling_state, taping
from .attach import engine_for
from .compat import outside_memory_plan
from .latents import Latents
from .surroundings import INTERRUPTS, through

WAYS = {"decode": "VAE decoder", "encode": "VAE encoder"}  # and what the stats call them


def compile_vae(vae: comfy.sd.VAE, verify: bool = True) -> tuple[comfy.sd.VAE, str]:
    """(a VAE that decodes and encodes compiled, what the user should know or ""); ``vae`` stays as it is.

    verify: compare each new size's first result with eager.

    A VAE that cannot be compiled comes back as it is, with the reason; one that is compiled already, as it is.
    """
    name = type(vae.first_stage_model).__name__
    settings = Settings(graph_budget_mb=0, verify=verify)  # a decoder keeps the GPU busy without a graph
    outcome, failure = attempt(lambda: _compiled(vae, name, settings), failed(name, "Compile VAE"), INTERRUPTS)
    return (vae, failure) if failure else outcome


def _compiled(vae: comfy.sd.VAE, name: str, settings: Settings) -> tuple[comfy.sd.VAE, str]:
    model = vae.first_stage_model
    if is_compiled(vae):
        return vae, ""
    obstacle = devices.obstacle(vae.device) if model is not None else say("no_vae")
    if obstacle:
        message = f"{obstacle}. It runs in eager, as without this node"
        STATS.fallback(name, message)
        return vae, message
    compiled = copy.copy(vae)
    compiled.patcher = vae.patcher.clone()
    compiled.first_stage_model = _with_our_ways(model, latents_of(vae), settings)
    return compiled, ""


def is_compiled(vae: comfy.sd.VAE) -> bool:
    """Whether this VAE comes from Compile VAE, and runs on our forwards."""
    return bool(entries.engines_of(vae.first_stage_model))


def latents_of(vae: comfy.sd.VAE) -> Latents | None:
    """The latents of a VAE; None if they are not those of images or video (sound, 3D shapes)."""
    if vae.latent_dim not in (2, 3) or vae.extra_1d_channel is not None or vae.output_channels == 2:
        return None
    frames = vae.temporal_compression_decode() if vae.latent_dim == 3 else 0
    return Latents(vae.latent_channels, int(vae.spacial_compression_decode()), frames or 0)


def _with_our_ways(model: nn.Module, latents: Latents | None, settings: Settings) -> nn.Module:
    """A shallow copy of the first-stage model: the same layers, weights and code, but our ``decode`` and ``encode``."""
    shadow = copy.copy(model)
    passing = _PassedOn(model, shadow)
    for way in WAYS:
        if callable(getattr(model, way, None)):
            setattr(shadow, way, _Way(model, way, latents, settings, passing))
    return shadow


class _PassedOn:
    """Passes on to a first-stage model what nodes set of its copy: LTX's noise of the decoder, say."""

    def __init__(self, model: nn.Module, shadow: nn.Module) -> None:
        self._model, self._shadow, self._known = model, weakref.ref(shadow), dict(shadow.__dict__)

    def __call__(self) -> None:
        """What is new since the last time."""
        shadow = self._shadow()
        for name, value in list(vars(shadow).items()) if shadow is not None else ():
            if name not in WAYS and (name not in self._known or self._known[name] is not value):
                self._known[name] = value
                setattr(self._model, name, value)


class _Way:
    """``decode`` or ``encode`` of a first-stage model, through its engine."""

    def __init__(
        self, model: nn.Module, way: str, latents: Latents | None, settings: Settings, passing: _PassedOn
    ) -> None:  # fmt: skip
        self._pass_on = passing
        self._model, self._way, self._latents, self._settings = model, way, latents, settings
        self._engine = engine_for(model, WAYS[way], "vae", uses_graphs=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ComfyUI's own gives for these arguments."""
        self._pass_on()
        original = getattr(self._model, self._way)  # another pack may have replaced it meanwhile
        ours = partial(self._through_engine, original)
        where, what = self._engine.stats.name, f"a call of {self._way}"
        return together(lambda: through(ours, original, args, kwargs, where, what))

    def _through_engine(
        self, original: Callable[..., Any], fallback: Fallback, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        given = taping.take(original, args, kwargs)
        fallback.run = lambda: given.call(original)
        run = sampling_state.SamplingState(self._model, known_code.fingerprints(self._model))
        try:
            call = taping.call_of(self._model, original, given, run, fallback, self._size, lean=True)
            if not call.obstacle and run.is_elsewhere(given.first.device):
                call = replace(call, obstacle=say("vae_in_pieces"), taped=None)
            call = replace(call, pieces=self._latents.steps(call.frames) if self._latents else 1)
            with outside_memory_plan():
                return self._engine(call, self._settings)
        finally:
            run.close()
            self._engine.release()

    def _size(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(width, height, frames) in image pixels, of what is decoded or encoded; of sound (its length, 1, 1)."""
        video = len(shape) > 4
        if self._latents is None or len(shape) < 4:
            return shape[-1], 1, 1
        if self._way == "encode":
            return shape[-1], shape[-2], shape[-3] if video else 1
        return (self._latents if video else replace(self._latents, frames=0)).size(shape)
