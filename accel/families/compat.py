"""Where ComfyUI's versions differ: asked of what is there, never of a version number.

Older than 0.3.75: models are left in training mode. Newer: memory plans recorded around some models, and weights that
are mapped in while a model runs (``dynamic``).
"""

from contextlib import AbstractContextManager, nullcontext

try:
    import comfy.model_prefetch as prefetch
except ImportError:  # ComfyUI before its prefetch queues
    prefetch = None


def outside_memory_plan() -> AbstractContextManager:
    """Keeps what is allocated within out of the memory plan that ComfyUI's model compiler records for some models."""
    pause = getattr(prefetch, "pause_malloc_graph", None)
    return nullcontext() if pause is None else pause()
