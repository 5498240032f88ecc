"""What Skip Blocks saves in a sampling run of a full-size UNet, in eager and on Compile Model.

python -m bench.skip [--model sdxl|sd15] [--interval 3] [--depth auto] [--json FILE]

30 Euler steps with CFG through comfy.sample. Each way runs twice to warm up (graphs, cuDNN's plans), then twice more,
of which the faster counts. The figures say nothing about the picture: weights are random (``bench.skip_quality``).
"""

from tools import embed

embed.use_comfyui()
embed.load_pack()

from typing import Any  # noqa: E402

from anyshape.accel import stats  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from bench import measure, models  # noqa: E402
from bench.product import AUTO, Settings, SkipSettings, compile_model, skip_blocks  # noqa: E402

SIZES = {
    "sdxl": [(1024, 1024), (960, 720), (728, 720)],
    "sd15": [(512, 512), (544, 408)],
}
STEPS = 30
WARM_UP, REPEATS = 2, 2


def seconds(patcher: ModelPatcher, width: int, height: int) -> float:
    """Of one warm sampling run."""
    took: list[float] = []
    for _ in range(WARM_UP + REPEATS):
        one: dict[str, float] = {}
        with measure.seconds(one, "run"):
            models.sample(patcher, width, height, steps=STEPS)
        took.append(one["run"])
    return min(took[WARM_UP:])


def row(ways: dict[str, ModelPatcher], width: int, height: int) -> dict[str, Any]:
    """One row of the JSON: seconds of each way, what skipping makes of it, and what the last run says of itself."""
    took = {name: round(seconds(patcher, width, height), 3) for name, patcher in ways.items()}
    run = stats.snapshot()["skip"][-1]
    return {
        "width": width, "height": height, "seconds": took,
        "eager_speedup": round(took["eager"] / took["eager_skip"], 2),
        "compiled_speedup": round(took["compiled"] / took["compiled_skip"], 2),
        "depth": run["depth"], "full": run["full"], "skipped": run["skipped"], "resets": run["resets"],
        "feature_mb": round(run["bytes"] / 1e6, 1),
    }  # fmt: skip


def main() -> None:
    """Prints a line per size and writes the JSON."""
    parser = measure.options(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SIZES), default="sdxl")
    parser.add_argument("--interval", type=int, default=3)
    parser.add_argument("--depth", default=AUTO)
    args = parser.parse_args()
    patcher, settings = models.unet(args.model), SkipSettings(args.interval, args.depth)
    compiled, _ = compile_model(patcher, Settings())
    ways = {"eager": patcher, "compiled": compiled}
    ways |= {f"{name}_skip": skip_blocks(way, settings, lambda line: None)[0] for name, way in ways.items()}
    rows = []
    for width, height in SIZES[args.model]:
        rows.append(row(ways, width, height))
        print(rows[-1], flush=True)
    measure.write(args.json, {"model": args.model, "interval": args.interval, "steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
