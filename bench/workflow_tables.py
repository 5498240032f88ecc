"""What bench/results says of whole workflows, for docs/performance.md: ControlNet, restarts, soak. Needs no torch."""

from pathlib import Path
from typing import Any

from bench import figures
from bench.markdown import headed, size, table

CONTROLNET = figures.RESULTS / "controlnet.json"
WAYS = ("neither", "control", "model", "both")  # what is compiled
Result = dict[str, Any]


def parts() -> list[str]:
    """The sections, as far as they have been measured."""
    found = [controlnet_part(figures.load(CONTROLNET))] if CONTROLNET.exists() else []
    found += restart_parts()
    return [*found, *([soak_part([figures.load(path) for path in soaks])] if (soaks := soak_paths()) else [])]


def controlnet_part(result: Result) -> str:
    """Milliseconds per step of SDXL with a ControlNet."""
    head = ["Size", "Eager, ms", "Compile ControlNet", "Compile Model", "Both", "Faster", "Error of both"]
    return headed("SDXL with a ControlNet, one step", result, table(head, map(controlnet_row, result["rows"])))


def controlnet_row(row: Result) -> list[str]:
    """One size."""
    times = [row[f"{way}_ms"] for way in WAYS]
    faster = f"{row['neither_ms'] / row['both_ms']:.2f}x"
    return [size(row), *(f"{ms:.1f}" for ms in times), faster, f"{row['both_latent_error']:.1e}"]


STARTS = {
    "eager": "eager",
    "cold": "AnyShape, all caches and the store empty",
    "store": "AnyShape, cold compiler caches, filled store",
    "caches": "AnyShape, warm compiler caches, no store",
}


def restart_path(model: str) -> Path:
    """Where the result of ``bench.restart`` lies."""
    return figures.RESULTS / f"restart-{model}.json"


def restart_parts() -> list[str]:
    """Those of the models."""
    paths = [restart_path(model) for model in figures.MODELS]
    return [restart_part(figures.load(path)) for path in paths if path.exists()]


def fastest(runs: list[Result]) -> Result:
    """Of the processes that started alike."""
    return min(runs, key=lambda run: run["seconds"])


def restart_part(result: Result) -> str:
    """Seconds from a loaded model to the first picture of a process."""
    size, count = "x".join(map(str, result["size"])), len(result["starts"]["eager"])
    each = "one process each" if count == 1 else f"the fastest of {count}"
    above = f"Seconds from the loaded model to its first picture, {size}, {result['steps']} steps; {each}."
    head = ["Start", "Picture, s", "First step, s", "Decode, s", "Kernels compiled", "Read from the store, s"]
    lines = [restart_row(name, result["starts"][start]) for start, name in STARTS.items()]
    title = f"{figures.MODELS[result['model']]}, the first picture of a process"
    return headed(title, result, above, result.get("remark", ""), table(head, lines))


def restart_row(name: str, runs: list[Result]) -> list[str]:
    """One kind of start."""
    run = fastest(runs)
    compiled = "" if name == "eager" else str(run["kernels"]["compiled"])
    times = [f"{run[part]:.2f}" if part in run else "" for part in ("seconds", "first_step", "decode")]
    return [name, *times, compiled, f"{run['store_load']:.2f}" if run["artifacts"]["loaded"] else ""]


def soak_paths() -> list[Path]:
    """The processes of the soak on a GPU, in the order of their prompts."""
    return sorted(figures.RESULTS.glob("soak-sdxl-*.json"))


def soak_part(results: list[Result]) -> str:
    """What the random prompts came to."""
    head = "Which | Prompts | Failed | Model calls | Broken off | Unloads | Worst latent | Worst picture | GPU | RAM"
    count, failed = sum(result["prompts"] for result in results), sum(len(result["failed"]) for result in results)
    above = (
        f"Random prompts on full-size SDXL, each compared with eager (`bench/soak.py`), in {len(results)} processes; "
        f"the command is the first one's. {count} prompts, {failed} of them failed. *Worst*: relative L2 error against "
        f"eager; the limit is 1e-2 for an fp16 latent and 3e-2 for a picture of a bf16 VAE. *GPU*, *RAM*: MiB in use "
        f"at the first and the last check of memory, each after everything was unloaded; the models are in RAM then."
    )
    lines = map(soak_row, soak_paths(), results)
    return headed("Soak", results[0], above, table(head.split(" | "), lines))


def soak_row(path: Path, result: Result) -> list[str]:
    """One process; its file is named after the numbers of its prompts."""
    looks = [result["memory"][0], result["memory"][-1]]
    return [
        path.stem.removeprefix("soak-sdxl-").replace("-", " to "),
        str(result["prompts"]),
        str(len(result["failed"])),
        str(result["calls"].get("model", result["calls"].get("unet"))),  # "unet" up to 2026-11-21
        str(result["broken_off"]),
        str(result["unloads"] + result["rebuilds"]),
        f"{result['worst_error']:.1e}",
        f"{result['worst_picture']:.1e}",
        *(" → ".join(str(look[where]) for look in looks) for where in ("device", "process")),
    ]
