"""How much faster than ComfyUI's own forwards: only of what was measured, and never of what runs as ComfyUI does."""

from collections.abc import Iterable
from typing import Any

import torch


def can_gain() -> bool:
    """Whether this machine has what makes models faster."""
    return torch.cuda.is_available()


def factor(state: str, eager_ms: float | None, median_ms: float) -> float | None:
    """Eager's time by ours; None where one of them is not known, or where nothing is gained: in eager, on a CPU."""
    if state == "eager" or not eager_ms or not median_ms or not can_gain():
        return None
    return round(eager_ms / median_ms, 3)


def total(shapes: Iterable[dict[str, Any]]) -> dict[str, float]:
    """{"factor", "saved_seconds"} of the sizes where both are known, by how often each ran; {} if there is none.

    shapes: as in the stats. What was saved is less than nothing until the first calls' cost is won back.
    """
    known = [s for s in shapes if s["factor"] is not None]
    if not known:
        return {}
    eager, ours = (sum(s["calls"] * s[name] for s in known) for name in ("eager_ms", "median_ms"))
    return {"factor": round(eager / ours, 3), "saved_seconds": round(sum(s["saved_seconds"] for s in known), 2)}


def times(factor: float) -> str:
    """As "1.4x"; near 1 with two digits, so that a loss is seen to be one."""
    return f"{factor:.2f}x" if 0.9 < factor < 1.1 else f"{factor:.1f}x"


def duration(seconds: float) -> str:
    """Seconds with as many digits as they deserve, and minutes and hours of many."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
