"""The first call of a process: eager's, ours with an empty Triton cache, and ours with a filled one.

python -m bench.first_call [--model zimage,flux] [--size 1024x1024] [--mode auto|exact] [--repeat N] [--json FILE]

Each is a separate process. Seconds count from the loaded model to the end of the first of a run's two steps, Compile
Model included. The last process before them does not count: it leaves Python's bytecode (``bench.process``) and builds
a small model alone.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import measure, process

LIMIT = 300.0  # seconds given to a process
BYTECODE = ("cosmos", 256, 256)  # what the process that does not count runs
STARTS = ("eager", "cold", "warm")


def worker(model: str, case: list[int], mode: str) -> None:
    """One start in this process; prints a line when the model is loaded and one with the figures."""
    from tools import embed

    embed.use_comfyui()
    embed.load_pack(store=False)
    import torch

    from bench import product, zoo
    from bench.step import Case

    kernels, size = measure.Kernels().listen(), Case(*case)
    patcher = zoo.make(model)
    torch.zeros(1, device=patcher.load_device)
    print(json.dumps({"conditions": measure.conditions()}), flush=True)
    took: dict[str, float] = {}
    with measure.until_called(took, "seconds") as first:
        if mode != "off":
            patcher = product.compile_model(patcher, product.Settings(mode=mode))[0]
        size.sample(patcher, 2, first)
    with measure.until_called(took, "second_run") as first:
        size.sample(patcher, 2, first)
    counted = {"compiled": kernels.compiled, "found": kernels.found, "compile_seconds": round(kernels.seconds, 3)}
    print(json.dumps(took | {"kernels": counted}), flush=True)


def follow(model: str, case: tuple[int, ...], mode: str, caches: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures of one process, the conditions it ran under)."""
    command = [sys.executable, "-m", "bench.first_call", "--model", model, "--mode", mode]
    ended = process.follow([*command, "--worker", ",".join(map(str, case))], caches, LIMIT)
    figures = next((line for line in ended.lines if "seconds" in line), {"seconds": None, "exit_code": ended.code})
    return figures, next((line["conditions"] for line in ended.lines if "conditions" in line), {})


def once(model: str, case: tuple[int, ...], mode: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(the figures of each start, the conditions); cold begins with an empty cache and leaves it to warm."""
    found, known = {}, {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        for start in STARTS:
            found[start], conditions = follow(model, case, "off" if start == "eager" else mode, Path(caches))
            known |= conditions
            print(f"{model}, {start}: {json.dumps(found[start])}", flush=True)
    return found, known


def beyond(runs: list[dict[str, dict[str, Any]]], start: str) -> float | None:
    """Seconds of a start beyond eager's, the best of each: other programs of the machine only ever add time."""
    best = [[run[each]["seconds"] for run in runs if run[each]["seconds"] is not None] for each in (start, "eager")]
    return round(min(best[0]) - min(best[1]), 3) if all(best) else None


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zimage", help="a list, as that of bench.forward")
    parser.add_argument("--size", default="1024x1024", help="width x height (x frames)")
    parser.add_argument("--mode", choices=("auto", "exact", "off"), default="auto")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, each with new caches; the best of each counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Prints a line for each start and writes the JSON after each round."""
    chosen = arguments()
    if chosen.worker:
        return worker(chosen.model, [int(number) for number in chosen.worker.split(",")], chosen.mode)
    width, height, frames = ([int(number) for number in chosen.size.split("x")] + [1])[:3]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        name, *small = BYTECODE
        follow(name, tuple(small), chosen.mode, Path(caches))
    command = f"python -m bench.first_call --model {chosen.model} --size {chosen.size} --mode {chosen.mode}"
    result: dict[str, Any] = {"command": f"{command} --repeat {chosen.repeat}", "size": chosen.size, "models": {}}
    for model in chosen.model.split(","):
        runs: list[dict[str, dict[str, Any]]] = []
        for _ in range(chosen.repeat):
            figures, conditions = once(model, (width, height, 1, frames), chosen.mode)
            runs.append(figures)
            extra = {f"{start}_seconds": beyond(runs, start) for start in STARTS[1:]}
            result = conditions | result
            result["models"][model] = {"mode": chosen.mode, "runs": runs, **extra}
            measure.save(chosen.json, result)
        print(f"{model}, seconds beyond eager: {extra}", flush=True)


if __name__ == "__main__":
    main()
