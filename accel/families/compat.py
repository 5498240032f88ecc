"""Where ComfyUI's versions differ: asked of what is there, never of a version number.

Older than 0.3.75: models are left in training mode. Newer: weights that are streamed while a model runs (DynamicVRAM),
memory plans recorded around some models.
"""

import inspect
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from comfy.model_patcher import ModelPatcher
from torch import nn

from ..reasons import say

try:
    import comfy.model_prefetch as prefetch
except ImportError:  # ComfyUI before its prefetch queues
    prefetch = None

# The weights of models that ComfyUI streams, loaded once more to stay in place: as ``clone`` takes them.
_STATIC: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


def static_clone(patcher: ModelPatcher) -> tuple[ModelPatcher, str]:
    """(a clone whose weights stay in place while it is sampled, why there is none or "").

    Without DynamicVRAM every clone is one. With it ComfyUI loads the model a second time; one such copy serves all
    clones of the model, so that another LoRA or mode loads nothing.
    """
    if not is_streamed(patcher):
        return patcher.clone(), ""
    takes = inspect.signature(patcher.clone).parameters
    known = {"model_override": _STATIC.get(patcher.model)} if "model_override" in takes else {}
    try:
        clone = patcher.clone(disable_dynamic=True, **known)
    except (RuntimeError, TypeError, OSError) as error:  # a loader that keeps no way to load again; a file that is gone
        return patcher.clone(), say("streamed", error=f" ({error})")
    if known:
        _STATIC[patcher.model] = clone.get_clone_model_override()
    return clone, ""


def is_streamed(patcher: ModelPatcher) -> bool:
    """Whether ComfyUI streams this model's weights (DynamicVRAM)."""
    return getattr(patcher, "is_dynamic", bool)()


def is_streamed_layer(layer: nn.Module) -> bool:
    """Whether this layer's weights are pages of such a stream, which must be given back after each use."""
    return hasattr(layer, "_v")


def outside_memory_plan() -> AbstractContextManager:
    """Keeps what is allocated within out of the memory plan that ComfyUI's model compiler records for some models."""
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return nullcontext() if pause is None else pause()
