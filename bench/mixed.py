"""The mixed run: 12 prompts of other sizes and batches, 20 Euler steps each, CFG 7, through comfy.sample.

python -m bench.mixed --model sdxl|sd15|flux --how eager,anyshape,core,blocks [--limit SECONDS] --json FILE

Each ``how`` runs in processes of its own: cold (empty compiler caches) and warm (the caches that the cold run filled).
One that is not done after ``--limit`` seconds is reported as not finished, with what it had done by then.

- eager: ComfyUI as it is
- anyshape: the Compile Model node
- core: ComfyUI's TorchCompileModel node with its defaults
- blocks: each transformer block compiled with torch's defaults, as popular packs do
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HOWS = ("eager", "anyshape", "core", "blocks")
PROMPTS = {
    "sdxl": [(1024, 1024, 1), (1024, 1152, 1), (896, 768, 1), (960, 720, 1), (1280, 1280, 1), (512, 2048, 1),
             (2048, 512, 1), (720, 1280, 1), (1024, 1024, 2), (728, 720, 1), (768, 768, 4), (1536, 1536, 1)],
    "sd15": [(512, 512, 1), (512, 768, 1), (768, 512, 1), (768, 768, 1), (544, 408, 1), (640, 448, 1),
             (512, 512, 2), (512, 768, 2), (512, 512, 4), (728, 720, 1), (512, 512, 8), (1024, 1024, 1)],
}  # fmt: skip
PROMPTS["flux"] = PROMPTS["sdxl"]
STEPS = 20


def worker(model: str, how: str) -> None:
    """Runs the prompts in this process and prints a JSON line for each."""
    from tools import embed

    embed.use_comfyui()
    embed.load_pack()
    import torch

    from bench import measure, models

    patcher = prepare(models.diffusion_model(model), how)
    torch.zeros(1, device="cuda")
    before = measure.used_mib()
    for index, (width, height, batch) in enumerate(PROMPTS[model]):
        took: dict[str, float] = {}
        with measure.seconds(took, "seconds"):
            models.sample(patcher, width, height, batch, steps=STEPS, seed=index)
        line = {"width": width, "height": height, "images": batch, **took, "grown_mib": measure.used_mib() - before}
        print(json.dumps(line), flush=True)
    print(json.dumps({"conditions": measure.conditions() | {"command": f"--worker {how}"}}), flush=True)


def prepare(patcher: Any, how: str) -> Any:
    """The patcher that ``how`` samples with."""
    if how == "anyshape":
        from anyshape.accel.engine import Settings
        from anyshape.accel.families.attach import compile_model

        return compile_model(patcher, Settings())[0]
    if how == "core":
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        patcher = patcher.clone()
        set_torch_compile_wrapper(model=patcher, backend="inductor")
    if how == "blocks":
        from comfy.ldm.flux.layers import DoubleStreamBlock, SingleStreamBlock
        from comfy.ldm.modules.attention import BasicTransformerBlock

        for module in patcher.model.modules():
            if isinstance(module, (BasicTransformerBlock, DoubleStreamBlock, SingleStreamBlock)):
                module.compile()
    return patcher


def run(model: str, how: str, caches: Path, limit: float) -> dict[str, Any]:
    """One process of ``worker``, followed line by line until it ends or ``limit`` seconds have passed."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    command = [sys.executable, "-m", "bench.mixed", "--model", model, "--worker", how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    lines, finished = follow(process, limit)
    prompts = [line for line in lines if "seconds" in line]
    return {
        "finished": finished,
        "limit_seconds": limit,
        "seconds": round(sum(p["seconds"] for p in prompts), 3),
        "prompts": prompts,
        "conditions": next((line["conditions"] for line in lines if "conditions" in line), None),
    }


def follow(process: subprocess.Popen, limit: float) -> tuple[list[dict[str, Any]], bool]:
    """(the JSON lines that came, whether the process ended well in time)."""
    lines, deadline = [], time.monotonic() + limit
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        text = process.stdout.readline()
        if not text:
            return lines, process.wait() == 0
        if text.startswith("{"):
            lines.append(json.loads(text))
    process.kill()
    process.wait()
    return lines, False


def main() -> None:
    """Prints a line for each run and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(PROMPTS), default="sdxl")
    parser.add_argument("--how", default="eager,anyshape", help=f"a list of {', '.join(HOWS)}")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds given to each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=HOWS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return worker(chosen.model, chosen.worker)
    hows = chosen.how.split(",")
    if unknown := set(hows) - set(HOWS):
        parser.error(f"--how {','.join(sorted(unknown))} is not known; choose from {', '.join(HOWS)}")
    runs = {how: both(chosen.model, how, chosen.limit) for how in hows}
    if chosen.json:
        command = f"python -m bench.mixed --model {chosen.model} --how {chosen.how} --limit {chosen.limit:g}"
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"command": command, "model": chosen.model, "steps": STEPS, "runs": runs}
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


def both(model: str, how: str, limit: float) -> dict[str, Any]:
    """The cold and the warm run of ``how``; eager has nothing to warm."""
    figures = {}
    with tempfile.TemporaryDirectory() as caches:
        for temperature in ("cold",) if how == "eager" else ("cold", "warm"):
            figures[temperature] = run(model, how, Path(caches), limit)
            done = "finished" if figures[temperature]["finished"] else f"NOT finished in {limit:.0f} s"
            each = [p["seconds"] for p in figures[temperature]["prompts"]]
            print(f"{how} {temperature}: {sum(each):.2f} s, {len(each)} prompts, {done}; {each}", flush=True)
    return figures


if __name__ == "__main__":
    main()
