"""What docs/fleet.md shows of ``bench.fleet``. Needs neither torch nor ComfyUI."""

import statistics
from typing import Any

from bench import figures
from bench.markdown import headed, table

HEAD = "Worker | First picture, s | Second, s | Kernels compiled | Found | Read, MB | Stored, MB | Waited for Redis, s"
NAMES = {
    "alone": "without a shared cache, empty disk",
    "first": "the first of the fleet: empty disk, empty Redis",
    "joined": "a later worker: empty disk, filled Redis",
    "again": "the same worker started again: filled disk",
    "down": "empty disk, Redis's port is closed",
    "frozen": "empty disk, Redis accepts but never answers",
}


def document() -> str:
    """The block of docs/fleet.md."""
    path = figures.fleet_path("sdxl")
    if not path.exists():
        return "Not measured yet: `python -m bench.fleet --json bench/results/fleet-sdxl.json`."
    result = figures.load(path)
    lines = [line(name, result["runs"][how]) for how, name in NAMES.items() if how in result["runs"]]
    what = f"SDXL, {result['width']}x{result['height']}, {result['steps']} steps"
    count = result["repeats"]
    each = "one process each" if count == 1 else f"medians of {count} processes each"
    said = f"Seconds from the loaded model to the latent; {each}."
    return headed(what, result, said, table(HEAD.split(" | "), lines))


def line(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """A way of starting, over its repeats; one that failed shows as such."""
    done = [run for run in runs if run["finished"]]
    if len(done) < len(runs):
        return [name, "failed", "", "", "", "", "", ""]
    middle = lambda key: statistics.median(run[key] for run in done)  # noqa: E731
    shared = lambda key: statistics.median(run["fleet"].get(key, 0) for run in done)  # noqa: E731
    sizes = [f"{shared(key) / 1e6:.1f}" for key in ("bytes_read", "bytes_stored")]
    counts = [f"{middle(key):g}" for key in ("compiled", "found")]
    return [name, f"{middle('first_seconds'):.2f}", f"{middle('second_seconds'):.2f}", *counts, *sizes,
            f"{shared('waited_seconds'):.2f}"]  # fmt: skip
