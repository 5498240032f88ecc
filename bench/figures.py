"""The figures in bench/results: where they lie, and what follows from them. Needs neither torch nor ComfyUI."""

import json
from pathlib import Path
from typing import Any

from tools.paths import ROOT

RESULTS = ROOT / "bench" / "results"
STREAMED = RESULTS / "streamed.json", RESULTS / "streamed-more.json"  # of bench.streamed: the later one counts
STEPS = 20  # of a picture in the race
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


def total(run: dict[str, Any]) -> float:
    """Seconds of the prompts that a mixed run finished."""
    return sum(prompt["seconds"] for prompt in run["prompts"])


def runs(result: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(how, "cold" or "warm", run) of a mixed result, in the order of the tables."""
    found = result["runs"]
    return [(how, name, run) for how in HOWS if how in found for name, run in found[how].items()]
