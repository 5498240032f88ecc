"""The figures in bench/results: where they lie, and what follows from them. Needs neither torch nor ComfyUI."""

import json
import math
from pathlib import Path
from typing import Any

from tools.paths import ROOT

RESULTS = ROOT / "bench" / "results"
STEPS = 20  # of the picture that break-even counts in
MODELS = {  # the order of the tables
    "sdxl": "SDXL", "sd15": "SD1.5", "flux": "Flux", "zimage": "Z-Image", "qwen": "Qwen-Image", "sd35l": "SD3.5 large",
    "chroma": "Chroma", "wan": "Wan 2.1 14B", "cosmos": "Cosmos-Predict2 2B", "krea": "Krea 2",
    "klein": "Flux.2 Klein 9B", "ltxv": "LTX-Video 13B", "ltx2": "LTX-2 19B", "minimax": "MiniMax H3, 20 of 50 blocks",
}  # fmt: skip
FORMS = {"int8": "int8", "convrot": "int8, turned (convrot)", "fp8": "fp8"}  # of weights; else bf16
HOWS = ("eager", "anyshape", "blocks", "core")
CONDITIONS = ("machine", "versions", "allocator", "date", "command")


def load(path: Path) -> dict[str, Any]:
    """One result."""
    return json.loads(path.read_text())


def forward_path(model: str) -> Path:
    """Where the result of ``bench.forward`` lies."""
    return RESULTS / f"{model}-forward.json"


def dynamic_paths() -> list[Path]:
    """Where the results of ``bench.forward --dynamic`` lie, in the order of the tables."""
    names = [f"{model}{form}" for model in MODELS for form in ("", *(f"-{form}" for form in FORMS))]
    return [path for name in names if (path := RESULTS / f"dynamic-{name}.json").exists()]


def mixed_path(model: str) -> Path:
    """Where the result of ``bench.mixed`` lies."""
    return RESULTS / f"mixed-{model}.json"


def fleet_path(model: str) -> Path:
    """Where the result of ``bench.fleet`` lies."""
    return RESULTS / f"fleet-{model}.json"


def break_even(start_seconds: float | None, eager_ms: float, compiled_ms: float, images: int) -> int | None:
    """Pictures of 20 steps until a start has paid for itself; None where it never does, or was not measured.

    A batch is sampled as a whole: the count is that of whole batches, times ``images``.
    """
    saved = (eager_ms - compiled_ms) * STEPS / 1e3
    if start_seconds is None or saved <= 0:
        return None
    return max(0, math.ceil(start_seconds / saved)) * images


def with_break_even(row: dict[str, Any], starts: dict[str, Any] | None) -> dict[str, Any]:
    """``row`` of a forward table with ``break_even_images`` for a cold and a warm start."""
    times = (row["eager_ms"], row["compiled_ms"], row["images"])
    starts = starts or {}
    counts = {name: break_even(starts.get(f"{name}_seconds"), *times) for name in ("cold", "warm")}
    return row | {"break_even_images": counts}


def error(row: dict[str, Any]) -> float | None:
    """Of a row of a forward table: of a call, or in results before November 2026 of the latent after two steps."""
    return row["error"] if "error" in row else row["latent_error_after_2_steps"]


def total(run: dict[str, Any]) -> float:
    """Seconds of the prompts that a mixed run finished."""
    return sum(prompt["seconds"] for prompt in run["prompts"])


def runs(result: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(how, "cold" or "warm", run) of a mixed result, in the order of the tables."""
    found = result["runs"]
    return [(how, name, run) for how in HOWS if how in found for name, run in found[how].items()]
