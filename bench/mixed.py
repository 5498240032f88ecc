"""The mixed run: 12 prompts of other sizes and batches, 20 Euler steps each, through comfy.sample.

python -m bench.mixed --model sdxl|zimage|... --how eager,anyshape,core,blocks [--steps N] [--limit S]
                      [--cold-only] --json FILE

Each ``how`` runs in processes of its own: cold (empty compiler caches) and warm (the caches that the cold run filled).
One that is not done ``--limit`` seconds after its model was loaded is stopped and reported as not finished, with what
it had done by then. The JSON is written after each run: what was measured is kept if a later run takes the machine.

- eager: ComfyUI as it is
- anyshape: the Compile Model node
- core: ComfyUI's TorchCompileModel node with its defaults
- blocks: each transformer block compiled with torch's defaults, as popular packs do (``bench.blocks``)
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import blocks, measure, process

HOWS = ("eager", "anyshape", "core", "blocks")
PROMPTS = {  # every model of bench.zoo that is not here makes those of sdxl
    "sdxl": [(1024, 1024, 1), (1024, 1152, 1), (896, 768, 1), (960, 720, 1), (1280, 1280, 1), (512, 2048, 1),
             (2048, 512, 1), (720, 1280, 1), (1024, 1024, 2), (728, 720, 1), (768, 768, 4), (1536, 1536, 1)],
    "sd15": [(512, 512, 1), (512, 768, 1), (768, 512, 1), (768, 768, 1), (544, 408, 1), (640, 448, 1),
             (512, 512, 2), (512, 768, 2), (512, 512, 4), (728, 720, 1), (512, 512, 8), (1024, 1024, 1)],
}  # fmt: skip
STEPS = 20


def prompts(model: str) -> list[tuple[int, int, int]]:
    """Width, height in image pixels, and images."""
    return PROMPTS.get(model, PROMPTS["sdxl"])


def worker(model: str, how: str, steps: int) -> None:
    """Runs the prompts in this process; prints the conditions when the model is loaded, then a JSON line per prompt."""
    from tools import embed

    embed.use_comfyui()
    embed.load_pack()
    import torch

    from bench import models, zoo

    patcher = prepare(zoo.make(model), how)
    torch.zeros(1, device=patcher.load_device)
    before = measure.used_mib()
    print(json.dumps({"conditions": measure.conditions()}), flush=True)
    for index, (width, height, batch) in enumerate(prompts(model)):
        took: dict[str, float] = {}
        with measure.seconds(took, "seconds"):
            models.sample(patcher, width, height, batch, steps=steps, seed=index)
        line = {"width": width, "height": height, "images": batch, **took, "grown_mib": measure.used_mib() - before}
        print(json.dumps(line), flush=True)


def prepare(patcher: Any, how: str) -> Any:
    """The patcher that ``how`` samples with."""
    if how == "anyshape":
        from bench import product

        return product.compile_model(patcher, product.Settings())[0]
    if how == "core":
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        patcher = patcher.clone()
        set_torch_compile_wrapper(model=patcher, backend="inductor")
    if how == "blocks":
        for block in blocks.repeated(patcher.model.diffusion_model):
            block.compile()
    return patcher


def run(model: str, how: str, caches: Path, limit: float, steps: int = STEPS) -> tuple[dict[str, Any], dict[str, Any]]:
    """(one process of ``worker``: what it did within ``limit`` seconds, the conditions it ran under)."""
    command = [sys.executable, "-m", "bench.mixed", "--model", model, "--steps", str(steps), "--worker", how]
    ended = process.follow(command, caches, limit)
    done = [line for line in ended.lines if "seconds" in line]
    figures = {
        "finished": ended.code == 0 and len(done) == len(prompts(model)),
        "exit_code": ended.code,  # null: stopped at the limit
        "limit_seconds": limit,
        "seconds": round(sum(line["seconds"] for line in done), 3),
        "prompts": done,
    }
    return figures, next((line["conditions"] for line in ended.lines if "conditions" in line), {})


def told(run: dict[str, Any]) -> str:
    """A run for the person who waits."""
    each, code = [prompt["seconds"] for prompt in run["prompts"]], run["exit_code"]
    reason = f"stopped after {run['limit_seconds']:g} s" if code is None else f"exit code {code}"
    state = "finished" if run["finished"] else f"NOT finished: {reason}"
    return f"{sum(each):.2f} s, {len(each)} prompts, {state}; {each}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl", help="one of bench.zoo")
    parser.add_argument("--how", default="eager,anyshape", help=f"a list of {', '.join(HOWS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each prompt")
    parser.add_argument("--cold-only", action="store_true", help="no second process with the caches of the first")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds given to each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=HOWS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.how.split(",")) - set(HOWS):
        parser.error(f"--how {','.join(sorted(unknown))} is not known; choose from {', '.join(HOWS)}")
    return chosen


def both(how: str, chosen: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """("cold" or "warm", run, conditions) of ``how``; eager has nothing to warm."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        for temperature in ("cold",) if how == "eager" or chosen.cold_only else ("cold", "warm"):
            yield temperature, *run(chosen.model, how, Path(caches), chosen.limit, chosen.steps)


def main() -> None:
    """Prints a line for each run and writes the JSON."""
    chosen = arguments()
    if chosen.worker:
        return worker(chosen.model, chosen.worker, chosen.steps)
    command = f"python -m bench.mixed --model {chosen.model} --how {chosen.how} --limit {chosen.limit:g}"
    command += "" if chosen.steps == STEPS else f" --steps {chosen.steps}"
    command += " --cold-only" if chosen.cold_only else ""
    result = {"command": command, "model": chosen.model, "steps": chosen.steps, "runs": {}}
    for how in chosen.how.split(","):
        for temperature, figures, conditions in both(how, chosen):
            print(f"{how} {temperature}: {told(figures)}", flush=True)
            result = conditions | result  # the first that came stay
            result["runs"].setdefault(how, {})[temperature] = figures
            measure.save(chosen.json, result)


if __name__ == "__main__":
    main()
