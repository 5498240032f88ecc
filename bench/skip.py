"""What Skip Blocks saves in a sampling run of full-size models, in eager and on Compile Model.

python -m bench.skip [--model sdxl,flux,...] [--ways eager,compiled] [--interval 3] [--depth auto] [--json FILE]

30 Euler steps through comfy.sample, with the CFG that is usual for the model. Each way runs twice for some steps to
warm up (graphs, cuDNN's plans), then in full, UNets twice, of which the faster run counts. The figures say nothing
about the picture: weights are random (``bench.skip_quality``). Several models have a file each: FILE with the model's
name in it.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack()

import argparse  # noqa: E402
import gc  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from anyshape.accel import stats  # noqa: E402
from anyshape.accel.skip.schedule import FEW_STEPS  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from bench import measure, models, zoo  # noqa: E402
from bench.product import AUTO, Settings, SkipSettings, compile_model, skip_blocks  # noqa: E402
from bench.step import Case  # noqa: E402

SIZES = {
    "sdxl": [Case(1024, 1024), Case(960, 720), Case(728, 720)],
    "sd15": [Case(512, 512), Case(544, 408)],
    "wan": [Case(832, 480, frames=33)],
    "ltxv": [Case(768, 512, frames=65)],
}
USUAL = [Case(1024, 1024)]
STEPS = 30
WARM_UP, WARM_STEPS = 2, FEW_STEPS + 1  # the shortest run that has skipped steps
WAYS = ("eager", "compiled")


def seconds(patcher: ModelPatcher, case: Case, repeats: int) -> float:
    """Of one warm sampling run."""
    took: list[float] = []
    for _ in range(WARM_UP):
        case.sample(patcher, WARM_STEPS)
    for _ in range(repeats):
        one: dict[str, float] = {}
        with measure.seconds(one, "run"):
            case.sample(patcher, STEPS)
        took.append(one["run"])
    return min(took)


def row(ways: dict[str, ModelPatcher], case: Case, repeats: int) -> dict[str, Any]:
    """One row of the JSON: seconds of each way, what skipping makes of it, and what the last run says of itself."""
    took = {name: round(seconds(patcher, case, repeats), 3) for name, patcher in ways.items()}
    run = stats.snapshot()["skip"][-1]
    speedups = {f"{way}_speedup": round(took[way] / took[f"{way}_skip"], 2) for way in WAYS if way in took}
    return {
        "width": case.width, "height": case.height, "frames": case.frames, "seconds": took, **speedups,
        "depth": run["depth"], "full": run["full"], "skipped": run["skipped"], "resets": run["resets"],
        "feature_mb": round(run["bytes"] / 1e6, 1),
    }  # fmt: skip


def rows(model: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The JSON of one model."""
    plain, settings = zoo.make(model), SkipSettings(chosen.interval, chosen.depth)
    ways = {"eager": plain} if "eager" in chosen.ways else {}
    if "compiled" in chosen.ways:
        ways["compiled"] = compile_model(plain, Settings())[0]
    ways |= {f"{name}_skip": skip_blocks(way, settings, lambda line: None)[0] for name, way in ways.items()}
    found: list[dict[str, Any]] = []
    for case in SIZES.get(model, USUAL):
        found.append(row(ways, case, 2 if model in models.UNETS else 1))
        print(model, found[-1], flush=True)
    return {"model": model, "interval": chosen.interval, "steps": STEPS, "rows": found}


def main() -> None:
    """Prints a line per size and writes the JSON."""
    parser = measure.options(__doc__.splitlines()[0])
    parser.add_argument("--model", default="sdxl", help=f"a list of {', '.join(zoo.NAMES)}")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"a list of {', '.join(WAYS)}")
    parser.add_argument("--interval", type=int, default=3)
    parser.add_argument("--depth", default=AUTO)
    chosen = parser.parse_args()
    names = chosen.model.split(",")
    for name in names:
        path: Path | None = chosen.json
        if path is not None and len(names) > 1:
            path = path.with_name(f"{path.stem}-{name}{path.suffix}")
        measure.write(path, rows(name, chosen))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
