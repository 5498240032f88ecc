"""How much faster than ComfyUI's own forward: only where both were measured, never for what runs as ComfyUI does.

Behind Skip Blocks both kinds of step are compared with the full forward that ComfyUI runs in their place. So the
total of a run says how much less its user waits, and the total of its full steps what the same work gained.
"""

from collections.abc import Iterable
from typing import Any

import torch


def can_gain() -> bool:
    """Whether this machine has a device that makes models faster."""
    return torch.cuda.is_available()


def factor(state: str, eager_ms: float | None, median_ms: float, skips: bool = False) -> float | None:
    """Eager's time by ours; None where one of them is not known, or where nothing is gained: in eager, on a CPU.

    skips: it is a step of a run with Skip Blocks, which gains on every device.
    """
    if state == "eager" or not eager_ms or not median_ms or not (skips or can_gain()):
        return None
    return round(eager_ms / median_ms, 3)


def total(shapes: Iterable[dict[str, Any]]) -> dict[str, float]:
    """{"factor", "saved_seconds"} of the sizes where both are known, by how often each ran; {} if there is none.

    With "full_steps", the factor of full steps alone, where Skip Blocks skipped some. shapes: as in the stats. What was
    saved is less than nothing until the first calls' cost is won back.
    """
    known = [s for s in shapes if s["factor"] is not None]
    if not known:
        return {}
    found = {"factor": _by_calls(known), "saved_seconds": round(sum(s["saved_seconds"] for s in known), 2)}
    full = [s for s in known if s["step"] == "full"]
    return found | {"full_steps": _by_calls(full)} if full and any(s["step"] == "skipped" for s in known) else found


def _by_calls(known: list[dict[str, Any]]) -> float:
    eager, ours = (sum(s["calls"] * s[name] for s in known) for name in ("eager_ms", "median_ms"))
    return round(eager / ours, 3)


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
