"""Steps of SDXL with one ControlNet: neither compiled, the model alone, the ControlNet alone, both.

python -m bench.controlnet [--json FILE]

Through comfy.sample and Apply ControlNet (Advanced), in fp16 with CFG, so model and ControlNet see 2 rows. The error is
that of the latent after 2 Euler steps with CFG 7, which multiplies differences.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack(store=False)

import os  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from anyshape.accel import stats  # noqa: E402
from torch import Tensor  # noqa: E402

from bench import measure, models, process  # noqa: E402
from bench.product import Settings, compile_controlnet, compile_model  # noqa: E402
from tools.driving import steering  # noqa: E402

SIZES = [(1024, 1024), (960, 720), (728, 720), (512, 512), (544, 408)]
STEADY_STEPS = 16
Way = tuple[Any, Any]  # a MODEL and a CONTROL_NET


def ways() -> dict[str, Way]:
    """What is compiled, by name."""
    model, control = models.unet("sdxl"), models.controlnet("sdxl")
    fast, fast_control = compile_model(model, Settings())[0], compile_controlnet(control)[0]
    return {"neither": (model, control), "model": (fast, control), "control": (model, fast_control),
            "both": (fast, fast_control)}  # fmt: skip


def run(way: Way, size: tuple[int, int], steps: int, **more: Any) -> Tensor:
    """One sampling run; the latent."""
    width, height = size
    steer = steering(way[1], width=width, height=height, strength=0.8)
    return models.sample(way[0], width, height, steps=steps, steer=steer, **more)


def steady_ms(way: Way, size: tuple[int, int]) -> float:
    """Milliseconds per step inside a run, on the device's clock: the median, which the run's start does not touch."""
    ticks = measure.Ticks()
    run(way, size, STEADY_STEPS, callback=lambda *args: ticks.mark())
    return statistics.median(ticks.intervals_ms())


def row(compared: dict[str, Way], size: tuple[int, int]) -> dict[str, Any]:
    """One size: what a first run of 2 steps took, seconds; a step, milliseconds; how far the latent is from eager's."""
    figures: dict[str, Any] = {"width": size[0], "height": size[1]}
    latents: dict[str, Tensor] = {}
    for name, way in compared.items():
        with measure.seconds(figures, f"{name}_first_run_seconds"):
            latents[name] = run(way, size, 2)
        figures[f"{name}_ms"] = round(steady_ms(way, size), 2)
        figures[f"{name}_latent_error"] = measure.relative_error(latents[name], latents["neither"])
    print(" ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()), flush=True)
    return figures


def main() -> None:
    """Prints the table and writes the JSON."""
    chosen = measure.options(__doc__).parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= process.caches(Path(folder))
        compared = ways()
        rows = [row(compared, size) for size in SIZES]
    measure.write(chosen.json, {"rows": rows, "stats": stats.snapshot()})


if __name__ == "__main__":
    main()
