"""From a loaded model to its first picture, in a new process: what artefacts on disk are worth.

python -m bench.restart [--model sdxl|zimage|...] [--mode auto|exact] [--steps N] [--repeat N] [--json FILE]

One prompt of 1024x1024 (SD1.5: 512x512), and of a UNet its decode by the VAE. Each start is a process:

- eager: ComfyUI as it is
- cold: AnyShape with empty compiler caches and an empty store
- store: AnyShape with empty compiler caches, and the store that the cold start filled
- caches: AnyShape with the compiler caches that the cold start filled, and no store

Seconds count from when the models are loaded, and end when the picture is in memory. What the pack does in the
background while models are built (it starts Triton and reads the store) is therefore not in them, as it is not in a
user's wait. A process before the others does not count: it leaves Python's bytecode (``bench.process``).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import measure, process

SIDE = {"sd15": 512}  # pixels; of any other model 1024
UNETS = ("sdxl", "sd15")  # whose picture is decoded
STARTS = ("eager", "cold", "store", "caches")
LIMIT = 400.0  # seconds given to a start
STORE = "2048"  # megabytes


class Clocks:
    """Seconds that a start spends, by what it does."""

    def __init__(self) -> None:
        self.store_load = 0.0
        self.kernels = measure.Kernels()

    def install(self) -> None:
        """Before the pack is loaded."""
        from anyshape.accel.artifacts import keeper

        load = keeper.Keeper._load_all

        def timed(*args: Any) -> None:
            started = time.perf_counter()
            load(*args)
            self.store_load += time.perf_counter() - started

        keeper.Keeper._load_all = timed
        self.kernels.listen()


def worker(model: str, mode: str, steps: int, start: str, base: Path) -> None:
    """One start in this process; prints a line when the models are loaded and one with the figures."""
    from tools import embed

    if start in ("cold", "store"):
        os.environ["ANYSHAPE_ARTIFACTS_MB"] = STORE
    embed.use_comfyui(extra={"base_directory": str(embed.make_base(base))})
    embed.bare_pack()
    clocks = Clocks()
    clocks.install()
    embed.load_pack()
    import torch

    from bench import models, zoo

    patcher = zoo.make(model)
    vae = models.vae(torch.bfloat16) if model in UNETS else None
    torch.zeros(1, device=patcher.load_device)
    measure.synchronize()
    print(json.dumps({"conditions": measure.conditions()}), flush=True)
    print(json.dumps(_figures(patcher, vae, model, mode, steps, start) | _counts(clocks)), flush=True)


def _figures(patcher: Any, vae: Any, model: str, mode: str, steps: int, start: str) -> dict[str, Any]:
    """Seconds to the picture, and of its parts."""
    import torch

    from bench import models

    took: dict[str, float] = {}
    with measure.seconds(took, "seconds"):
        if start != "eager":
            patcher, vae = _compiled(patcher, vae, mode)
        marks = [time.perf_counter()]

        def after_step(*state: Any) -> None:
            if len(marks) == 1:
                measure.synchronize()
                marks.append(time.perf_counter())

        with measure.seconds(took, "sampling"):
            side = SIDE.get(model, 1024)
            latent = models.sample(patcher, side, side, steps=steps, callback=after_step)
        if vae is not None:
            with measure.seconds(took, "decode"), torch.inference_mode():
                vae.decode(latent)
    return took | {"first_step": round(marks[1] - marks[0], 3)}


def _compiled(patcher: Any, vae: Any, mode: str) -> tuple[Any, Any]:
    from bench import product

    compiled, _ = product.compile_model(patcher, product.Settings(mode=mode))
    return compiled, vae and product.compile_vae(vae)[0]


def _counts(clocks: Clocks) -> dict[str, Any]:
    from anyshape.accel.artifacts import KEEPER
    from anyshape.accel.stats import snapshot

    KEEPER.wait()
    found = snapshot()
    return {
        "store_load": round(clocks.store_load, 3),
        "triton_compile": round(clocks.kernels.seconds, 3),
        "kernels": {"compiled": clocks.kernels.compiled, "found": clocks.kernels.found},
        "artifacts": {name: found["artifacts"][name] for name in ("loaded", "saved")},
        "rejected": len(found["artifacts"]["rejected"]),
        "states": sorted({shape["state"] for entry in found["models"] for shape in entry["shapes"]}),
    }


def follow(chosen: argparse.Namespace, start: str, caches: Path, base: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures of one start, the conditions it ran under)."""
    command = [sys.executable, "-m", "bench.restart", "--model", chosen.model, "--mode", chosen.mode]
    command += ["--steps", str(chosen.steps), "--worker", start, "--base", str(base)]
    ended = process.follow(command, caches, LIMIT)
    figures = next((line for line in ended.lines if "seconds" in line), {"seconds": None, "exit_code": ended.code})
    return figures, next((line["conditions"] for line in ended.lines if "conditions" in line), {})


def once(chosen: argparse.Namespace, starts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Every kind of start once, its figures added to ``starts``; the conditions."""
    known: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        full, base = Path(folder) / "full", Path(folder) / "base"
        places = {"eager": (full, base), "cold": (full, base), "store": (Path(folder) / "empty", base)}
        for start in STARTS:
            figures, conditions = follow(chosen, start, *places.get(start, (full, Path(folder) / "no store")))
            print(f"{start}: {json.dumps(figures)}", flush=True)
            known |= conditions
            starts.setdefault(start, []).append(figures)
    return known


def main() -> None:
    """Prints a line for each start and writes the JSON after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl", help="one of bench.zoo")
    parser.add_argument("--mode", choices=("auto", "exact"), default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--repeat", type=int, default=1, help="how often each start is made, each round with new caches"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return worker(chosen.model, chosen.mode, chosen.steps, chosen.worker, chosen.base)
    size = SIDE.get(chosen.model, 1024)
    result = {"model": chosen.model, "mode": chosen.mode, "size": [size, size], "steps": chosen.steps, "starts": {}}
    command = f"python -m bench.restart --model {chosen.model} --mode {chosen.mode} --steps {chosen.steps}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        follow(chosen, "eager", Path(folder) / "caches", Path(folder) / "base")
    for _ in range(chosen.repeat):
        conditions = once(chosen, result["starts"])
        measure.save(chosen.json, conditions | {"command": f"{command} --repeat {chosen.repeat}"} | result)


if __name__ == "__main__":
    main()
