"""Reads the counters of the shared kernel cache, if the operator switched it on.

It is a package of its own (``fleet/anyshape_redis``), which Triton loads because environment variables say so; nothing
here loads it or depends on it.
"""

import sys
from typing import Any

MODULE = "anyshape_redis"
WHERE = "shared kernel cache"


def snapshot() -> dict[str, Any]:
    """Its counters (``docs/scripts.md``); {} where it is not in use."""
    counted = getattr(sys.modules.get(MODULE), "snapshot", None)  # None as well while it is still being imported
    return counted() if counted else {}


def fallbacks(counts: dict[str, Any]) -> list[dict[str, Any]]:
    """Its rejections and outages as entries of the stats' ``fallbacks``."""
    found = [item for name in ("outages", "rejected") for item in counts.get(name, {}).items()]
    return [{"where": WHERE, "reason": reason, "count": count} for reason, count in found]


def forget() -> None:
    """Drops the rejections and outages counted so far."""
    forget = getattr(sys.modules.get(MODULE), "forget", None)
    if forget:
        forget()
