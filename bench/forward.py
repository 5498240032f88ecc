"""One forward of a full-size model at many sizes: eager and compiled, first call, error, memory, break-even.

python -m bench.forward [--model sdxl|sd15|flux] [--no-starts] [--json FILE]

Through comfy.sample, as ComfyUI calls it; eager and compiled in the same process, which begins with empty compiler
caches. ``rows`` is the batch that the model sees: CFG makes 2 rows an image, without CFG it is 1. The error is that of
the latent after 2 Euler steps with CFG 7, which multiplies differences.

The start is what the first compiled run of a process costs beyond eager, once CUDA and cuDNN have started: measured on
the first size in two fresh processes, the first with an empty Triton cache, the second with what the first left there.
Break-even is the number of 20-step images after which that is won back.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack(store=False)

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import torch  # noqa: E402
from anyshape.accel import stats  # noqa: E402
from anyshape.accel.engine import MODES, Settings  # noqa: E402
from anyshape.accel.families.attach import compile_model  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from torch import Tensor  # noqa: E402

from bench import figures, measure, models, process  # noqa: E402

SIZES = {
    "sdxl": [(1024, 1024, 1), (1024, 1152, 1), (896, 768, 1), (960, 720, 1), (512, 512, 1), (1280, 1280, 1),
             (728, 720, 1), (544, 408, 1), (512, 2048, 1), (768, 768, 4), (1536, 1536, 1)],
    "sd15": [(512, 512, 1), (512, 768, 1), (768, 768, 1), (544, 408, 1), (512, 512, 4), (512, 768, 4), (768, 768, 4)],
    "flux": [(1024, 1024, 1), (512, 512, 1), (896, 768, 1), (1024, 1152, 1), (1024, 1024, 2)],
}  # fmt: skip
# Those of SIZES that are measured without CFG as well: half the rows.
WITHOUT_CFG = {
    "sdxl": [(1024, 1024, 1), (896, 768, 1), (512, 512, 1), (1280, 1280, 1)],
    "sd15": [(512, 512, 1), (512, 768, 1), (768, 768, 1)],
}
STEADY_STEPS = 16
START_LIMIT = 300.0  # seconds given to the worker that measures a start


class Case(NamedTuple):
    """A line of the table: a size in image pixels, images a prompt, and whether the negative prompt is left out."""

    width: int
    height: int
    images: int
    no_cfg: bool = False

    def sample(self, patcher: ModelPatcher, steps: int) -> Tensor:
        """One sampling run. Without CFG is ``cfg=1.0``; with it is whatever ``models.sample`` does by itself."""
        guidance = {"cfg": 1.0} if self.no_cfg else {}
        return models.sample(patcher, self.width, self.height, self.images, steps=steps, **guidance)


class Eager(NamedTuple):
    """What a case is compared with: ms a step, seconds of a run of 2 steps, its latent, rows that the model saw."""

    ms: float
    seconds: float
    latent: Tensor
    rows: int


def cases(model: str) -> list[Case]:
    """The lines of the table, those without CFG after the same size with it."""
    halved = WITHOUT_CFG.get(model, [])
    return [Case(*size, no_cfg) for size in SIZES[model] for no_cfg in (False, True)[: 1 + (size in halved)]]


def ticking(patcher: ModelPatcher) -> tuple[ModelPatcher, measure.Ticks]:
    """(a clone that marks the end of every step, the marks)."""
    ticks, clone = measure.Ticks(), patcher.clone()

    def mark(args: dict[str, Any]) -> Tensor:  # a function, because ComfyUI copies objects with the options
        ticks.mark()
        return args["denoised"]

    clone.set_model_sampler_post_cfg_function(mark)
    return clone, ticks


def steady_ms(patcher: ModelPatcher, case: Case) -> float:
    """Milliseconds a step inside a run, on the device's clock: the median, which the run's start does not touch."""
    clone, ticks = ticking(patcher)
    case.sample(clone, STEADY_STEPS)
    return statistics.median(ticks.intervals_ms())


def two_steps(patcher: ModelPatcher, case: Case) -> tuple[float, Tensor]:
    """(seconds of a run of 2 steps, its latent)."""
    took: dict[str, float] = {}
    with measure.seconds(took, "all"):
        latent = case.sample(patcher, 2)
    return took["all"], latent


def rows_of(patcher: ModelPatcher, case: Case) -> int:
    """The batch that the model sees, found by looking; also warms ``case`` up."""
    seen: list[int] = []
    hook = patcher.model.diffusion_model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    try:
        case.sample(patcher, 2)
    finally:
        hook.remove()
    return max(seen)


def eager_figures(patcher: ModelPatcher, case: Case) -> Eager:
    """``case`` in eager, warm."""
    rows = rows_of(patcher, case)
    seconds, latent = two_steps(patcher, case)
    return Eager(steady_ms(patcher, case), seconds, latent, rows)


def compiled_figures(patcher: ModelPatcher, case: Case, eager: Eager) -> dict[str, Any]:
    """One row of the JSON: ``case`` compiled, from its first call on, against ``eager``."""
    first, _ = two_steps(patcher, case)
    _, latent = two_steps(patcher, case)
    return {
        "width": case.width, "height": case.height, "images": case.images, "rows": eager.rows,
        "eager_ms": round(eager.ms, 2), "compiled_ms": round(steady_ms(patcher, case), 2),
        "first_call_extra_seconds": round(first - eager.seconds, 3),
        "latent_error_after_2_steps": measure.relative_error(latent, eager.latent),
    }  # fmt: skip


def table(model: str, mode: str, starts: dict[str, Any] | None) -> dict[str, Any]:
    """Every row, and the memory of all of them together. All of eager comes first, on untouched weights."""
    eager = models.diffusion_model(model)
    compared = {case: eager_figures(eager, case) for case in cases(model)}
    compiled, _ = compile_model(eager, Settings(mode=mode))
    before = settled_mib()
    rows = []
    for case, expected in compared.items():
        rows.append(figures.with_break_even(compiled_figures(compiled, case, expected), starts))
        print(told(rows[-1]), flush=True)
    grown = settled_mib() - before
    print(f"memory above eager for {len(rows)} shapes: {grown:.0f} MiB")
    return {"rows": rows, "memory_mib": grown, "stats": stats.snapshot()}


def settled_mib() -> float:
    """Device memory in use without what the allocator only keeps, MiB."""
    torch.cuda.empty_cache()
    return measure.used_mib()


def told(row: dict[str, Any]) -> str:
    """A row for the person who waits."""
    even = row["break_even_images"]
    return (
        f"{row['width']}x{row['height']} images {row['images']}, rows {row['rows']}: eager {row['eager_ms']} ms, "
        f"compiled {row['compiled_ms']} ms, first call {row['first_call_extra_seconds']:+.2f} s, break-even after "
        f"{even['cold']} images cold, {even['warm']} warm, error {row['latent_error_after_2_steps']:.1e}"
    )


def start_worker(model: str, mode: str) -> None:
    """Prints what the first compiled run of this process costs beyond eager, seconds."""
    case, eager = cases(model)[0], models.diffusion_model(model)
    case.sample(eager, 2)
    print(json.dumps({"loaded": True}), flush=True)
    plain, _ = two_steps(eager, case)
    took: dict[str, float] = {}
    with measure.seconds(took, "all"):
        case.sample(compile_model(eager, Settings(mode=mode))[0], 2)
    print(json.dumps({"seconds": round(took["all"] - plain, 3)}), flush=True)


def both_starts(model: str, mode: str, folder: Path) -> dict[str, Any]:
    """The cold and the warm start, seconds; None for one that did not get there."""
    width, height, images, _ = cases(model)[0]
    command = [sys.executable, "-m", "bench.forward", "--start-worker", "--model", model, "--mode", mode]
    starts: dict[str, Any] = {"width": width, "height": height, "images": images}
    for name in ("cold", "warm"):
        ended = process.follow(command, folder, START_LIMIT)
        starts[f"{name}_seconds"] = next((line["seconds"] for line in ended.lines if "seconds" in line), None)
        print(f"{name} start: {starts[f'{name}_seconds']} s beyond eager (exit code {ended.code})", flush=True)
    return starts


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = measure.options(__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), default="sdxl")
    parser.add_argument("--mode", choices=MODES, default="auto", help="of the node; off compares eager with itself")
    parser.add_argument("--starts", action=argparse.BooleanOptionalAction, default=True, help="measure starts")
    parser.add_argument("--start-worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Prints the table and writes the JSON."""
    chosen = arguments()
    if chosen.start_worker:
        return start_worker(chosen.model, chosen.mode)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        starts = both_starts(chosen.model, chosen.mode, Path(folder) / "starts") if chosen.starts else None
        os.environ |= process.caches(Path(folder) / "table")  # empty: the first calls below are cold ones
        measured = table(chosen.model, chosen.mode, starts)
    measure.write(chosen.json, {"model": chosen.model, "mode": chosen.mode, "starts": starts} | measured)


if __name__ == "__main__":
    main()
