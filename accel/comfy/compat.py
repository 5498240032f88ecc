"""Differences between versions of ComfyUI, found by asking for features, never for a version number.

Older than 0.3.75: models are left in training mode. Newer: memory plans recorded around some models, and weights that
are mapped in while a model runs (``dynamic``).
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from comfy.cli_args import args
from torch import nn

from ..tape.named_tensors import parts_of

try:
    import comfy.model_prefetch as prefetch
except ImportError:  # ComfyUI before its prefetch queues
    prefetch = None


def outside_memory_plan() -> AbstractContextManager:
    """Keeps what is allocated within out of the memory plan that ComfyUI's model compiler records for some models."""
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return nullcontext() if pause is None else pause()


NO_PLANS = "disable_comfy_compiler"  # ComfyUI's start option
PREFERENCE = "comfy_attention"  # of a layer: its file may name an attention for it
_LOCK = threading.Lock()
_RUNS = [0]  # that go on without plans, because we switched them off


@contextmanager
def without_memory_plans() -> Iterator[None]:
    """Within, ComfyUI begins no such plan: for a whole sampling run, in all threads.

    Some models begin one before they call any wrapper, and end it afterwards (MiniMax H3). A plan is of the allocations
    between, and one of none, or of ours, is an error there that ends the run. ``outside_memory_plan`` comes too late.
    """
    with _LOCK:
        ours = _RUNS[0] > 0 or getattr(args, NO_PLANS, True) is False
        if ours:
            _RUNS[0] += 1
            setattr(args, NO_PLANS, True)
    try:
        yield
    finally:
        if ours:
            with _LOCK:
                _RUNS[0] -= 1
                if not _RUNS[0]:
                    setattr(args, NO_PLANS, False)


def preferences(model: nn.Module) -> list[Any]:
    """Where the model itself names the attention of a layer, which counts unless an override is among the options."""
    places = [own for part in parts_of(model) for own in (part._modules, part.__dict__) if PREFERENCE in own]
    return [own[PREFERENCE] for own in places if getattr(own[PREFERENCE], "function", None) is not None]
