"""One forward of full-size models at several sizes: eager and compiled, first calls, error, memory.

python -m bench.forward [--model flux,zimage,...] [--sizes 1024x1024,832x480x33,768x768*4] [--mode auto|exact|off]
                        [--repeat N] [--profile N] [--dynamic] [--json FILE]

A forward is one call of the model inside a sampling run, as ComfyUI's sampler makes it (``bench.step``), in one
process, which begins with empty compiler caches: for each size eager's first call, its later ones, ours, and eager's
again. ``rows`` is the batch that the model sees: CFG makes 2 rows per image. A size is width x height (x frames)
(* images).

The error is that of the model's output, on inputs that neither has seen before. ``first_call_extra_seconds`` is our
first call of a size beyond eager's first call of that size; CUDA has started before. First calls of fresh processes:
``bench.first_call``. What fails is told and noted; the sizes and models after it are measured.

``--dynamic``: ComfyUI with DynamicVRAM, as most people have it. "zimage-int8": a model with quantised weights.

The JSON is written after each size. Several models have a file each: FILE with the model's name before it.
"""

import sys

from tools import dynamic_vram, embed

DYNAMIC = "--dynamic"
if DYNAMIC in sys.argv:  # its library must be there before ComfyUI is imported
    dynamic_vram.start(store=False)
else:
    embed.use_comfyui()
    embed.load_pack(store=False)

import argparse  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

from anyshape.accel import stats  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from torch import Tensor  # noqa: E402

from bench import markdown, measure, process, product, zoo  # noqa: E402
from bench.step import Case, Steady, Step, first_seconds, inside, profiled, size, steady  # noqa: E402

USUAL = [Case(1024, 1024), Case(512, 512), Case(840, 968)]
SIZES = {
    "sdxl": [Case(*size) for size in [
        (1024, 1024, 1), (1024, 1152, 1), (896, 768, 1), (960, 720, 1), (512, 512, 1), (1280, 1280, 1), (728, 720, 1),
        (544, 408, 1), (512, 2048, 1), (768, 768, 4), (1536, 1536, 1)]],
    "sd15": [Case(*size) for size in [
        (512, 512, 1), (512, 768, 1), (768, 768, 1), (544, 408, 1), (512, 512, 4), (512, 768, 4), (768, 768, 4)]],
    "wan": [Case(1024, 1024), Case(832, 480, frames=33), Case(840, 968)],
    "cosmos": [Case(1024, 1024), Case(512, 512), Case(848, 976)],  # which takes multiples of 16
    "ltxv": [Case(768, 512, frames=65), Case(512, 320, frames=33), Case(736, 480, frames=49)],
    "ltx2": [Case(768, 512, frames=97), Case(512, 320, frames=49), Case(736, 480, frames=65)],
    "minimax": [Case(768, 512, frames=33), Case(1280, 704, frames=33), Case(736, 480, frames=49)],
}  # fmt: skip
# Those of SIZES that are measured without CFG as well: half the rows.
WITHOUT_CFG = {
    "sdxl": [(1024, 1024), (896, 768), (512, 512), (1280, 1280)],
    "sd15": [(512, 512), (512, 768), (768, 768)],
}
NAMED = f"{', '.join(zoo.NAMES)}, or one of them with its weights in {', '.join(zoo.FORMS)}: zimage-int8"
MOST_SECONDS = 4.0  # that the repeats of one way at one size take
FRESH = ((11, 0.3), (12, 0.7))  # seed and part of the run of the inputs that the error is measured on
SMALL = Case(256, 256)  # a first forward of this size starts CUDA, which then counts for nobody


class Eager(NamedTuple):
    """What a case is compared with."""

    first_seconds: float
    first: Tensor  # what the first call gave
    outs: list[Tensor]  # what FRESH gave
    steady: Steady
    rows: int


def cases(model: str) -> list[Case]:
    """The sizes of a model's table, those without CFG after the same size with it."""
    halved = WITHOUT_CFG.get(model, [])
    every = [(case, case._replace(no_cfg=True)) for case in SIZES.get(model, USUAL)]
    return [each for pair in every for each in pair[: 1 + (pair[0].images == 1 and pair[0][:2] in halved)]]


def eager_figures(step: Step, repeat: int) -> Eager:
    """Eager, from its first call of a size on."""
    first, took = first_seconds(step)
    outs = [step(step.fresh(*each)) for each in FRESH]
    return Eager(took, first, outs, steady(step, repeat, 2, MOST_SECONDS), len(step.own.x))


def compiled_figures(step: Step, eager: Eager, kernels: measure.Kernels, repeat: int, profile: int) -> dict[str, Any]:
    """Ours, from its first call of a size on."""
    counted, before = (kernels.compiled, kernels.found), stats.snapshot()
    first, took = first_seconds(step)
    given = [step.fresh(*each) for each in FRESH]
    errors = [step.error(each, step(each), out) for each, out in zip(given, eager.outs, strict=True)]
    timed = steady(step, repeat, 3, MOST_SECONDS)
    found = {
        "compiled_ms": round(statistics.median(timed.ms), 3), "compiled_host_ms": round(timed.host_ms, 3),
        "compiled_first_seconds": took, "first_call_extra_seconds": round(took - eager.first_seconds, 3),
        "error": finite(max(errors, key=lambda error: math.inf if math.isnan(error) else error)),
        "first_error": finite(step.error(step.own, first, eager.first)),
        "kernels_compiled": kernels.compiled - counted[0], "kernels_found": kernels.found - counted[1],
        "repeats": len(timed.ms), **noted(before, stats.snapshot()),
    }  # fmt: skip
    if profile:
        every, total = profiled(step, profile)
        found |= {"profile": [kernel._asdict() for kernel in every], "profile_ms": total}
    return found


def finite(error: float) -> float | None:
    """None for what is no number, which JSON has not."""
    return error if math.isfinite(error) else None


def noted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What the stats say of the shape that was called between two looks at them; nothing if none was."""
    calls = {(model["name"], shape["key"]): shape["calls"] for model in before["models"] for shape in model["shapes"]}
    known = {model["name"]: model for model in before["models"]}
    for model in after["models"]:
        for shape in model["shapes"]:
            if shape["calls"] > calls.get((model["name"], shape["key"]), 0):
                old = known.get(model["name"], {})
                grown = {name: model.get(name, 0) - old.get(name, 0) for name in ("kernels", "recompiles")}
                return {"state": shape["state"], "graph_bytes": shape["bytes"], "note": shape["reason"], **grown}
    return {"state": "eager", "graph_bytes": 0, "note": "the call did not come through Compile Model"}


def row(eager: ModelPatcher, compiled: ModelPatcher, case: Case, chosen: argparse.Namespace) -> dict[str, Any]:
    """One row of the JSON. Eager comes before and after, in turns with ours as far as that is cheap."""
    if case.frames > 1 and eager.model.latent_format.latent_dimensions != 3:
        raise ValueError("this model makes no videos: give its size without frames")
    expected = inside(eager, case, lambda step: eager_figures(step, chosen.repeat))
    ours = inside(
        compiled, case, lambda step: compiled_figures(step, expected, chosen.kernels, chosen.repeat, chosen.profile)
    )
    again = inside(eager, case, lambda step: steady(step, chosen.repeat, 1, MOST_SECONDS))
    eager_ms = statistics.median(expected.steady.ms + again.ms)
    return {
        "width": case.width, "height": case.height, "frames": case.frames, "images": case.images, "rows": expected.rows,
        "eager_ms": round(eager_ms, 3), "eager_host_ms": round(expected.steady.host_ms, 3),
        "eager_first_seconds": expected.first_seconds, **ours, "ratio": round(eager_ms / ours["compiled_ms"], 3),
    }  # fmt: skip


def table(model: str, chosen: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fills ``result`` with every row; saves it after each."""
    took: dict[str, float] = {}
    with measure.seconds(took, "weights"):
        eager = dynamic_vram.made(model) if chosen.dynamic else zoo.make(model)
    result["parameters"] = sum(parameter.numel() for parameter in eager.model.diffusion_model.parameters())
    compiled, result["message"] = product.compile_model(eager, product.Settings(mode=chosen.mode))
    print(f"== {model}: {result['parameters'] / 1e9:.2f} B parameters in {took['weights']} s {result['message']}")
    attempted(result, "the first forward", lambda: inside(eager, SMALL, lambda step: step()))
    before = measure.settled_mib()
    for case in chosen.sizes or cases(model.partition("-")[0]):
        found = attempted(result, str(case), lambda case=case: row(eager, compiled, case, chosen))
        if found is not None:
            result["rows"].append(found)
            told(result["rows"][-1])
        result["memory_mib"] = measure.settled_mib() - before
        result["stats"] = stats.snapshot()
        measure.write(path_for(model, chosen), result)


def attempted(result: dict[str, Any], what: str, fn: Any) -> Any:
    """What ``fn`` gives; None if it fails, which is told and noted."""
    try:
        return fn()
    except Exception as error:  # noqa: BLE001  one model's failure must not lose the others' figures
        if isinstance(error, zoo.NotThere):
            print(error, flush=True)
        else:
            traceback.print_exc(limit=-4)
        result["failed"].append({"what": what, "error": f"{type(error).__name__}: {error}"[:500]})
        return None


def told(row: dict[str, Any]) -> None:
    """Prints a row for the person who waits."""
    error = "not finite" if row["error"] is None else f"{row['error']:.1e}"
    print(
        f"{sized(row)}, {row['rows']} rows: eager {row['eager_ms']} ms (first {row['eager_first_seconds']} s), "
        f"ours {row['compiled_ms']} ms, {row['ratio']:.2f}x, first {row['compiled_first_seconds']} s, "
        f"{row['kernels_compiled']} kernels compiled, host {row['eager_host_ms']} and {row['compiled_host_ms']} ms, "
        f"error {error}, {row['state']} {row['graph_bytes'] >> 20} MiB {row['note']}",
        flush=True,
    )
    for kernel in row.get("profile", []):
        print(f"   {kernel['ms']:9.3f} ms {kernel['count']:5d} {kernel['name']}")
    if "profile" in row:
        print(f"   {row['profile_ms']:9.3f} ms all kernels of a call", flush=True)


def sized(row: dict[str, Any]) -> str:
    """The size and the images of a row."""
    return markdown.size(row) + (f"*{row['images']}" if row["images"] > 1 else "")


def summary(results: list[dict[str, Any]]) -> str:
    """A short table of all models, and what failed."""
    head = "Model | Size | Rows | Eager, ms | Ours, ms | Ratio | First beyond, s | Kernels | Host, ms | Error | State"
    lines = [
        [
            result["model"], sized(row), str(row["rows"]), f"{row['eager_ms']:.2f}", f"{row['compiled_ms']:.2f}",
            f"{row['ratio']:.3f}", f"{row['first_call_extra_seconds']:.2f}", str(row["kernels_compiled"]),
            f"{row['compiled_host_ms']:.2f}", "" if row["error"] is None else f"{row['error']:.1e}", row["state"],
        ]
        for result in results
        for row in result["rows"]
    ]  # fmt: skip
    failed = [f"{result['model']}, {each['what']}: {each['error']}" for result in results for each in result["failed"]]
    return "\n".join([markdown.table(head.split(" | "), lines), *failed])


def path_for(model: str, chosen: argparse.Namespace) -> Path | None:
    """Where the JSON of a model goes."""
    if chosen.json is None or len(chosen.model) == 1:
        return chosen.json
    return chosen.json.with_name(f"{model}-{chosen.json.name}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = measure.options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="sdxl", help=f"a list of {NAMED}")
    parser.add_argument("--sizes", help="a list; without it the model's own")
    parser.add_argument("--mode", choices=("auto", "exact", "off"), default="auto", help="off: eager against itself")
    parser.add_argument("--repeat", type=int, default=10, help="timed calls of each way; fewer where a call is long")
    parser.add_argument("--profile", type=int, default=0, help="print so many of the largest kernels of a call")
    parser.add_argument(DYNAMIC, action="store_true", help="ComfyUI with DynamicVRAM, as its main.py starts it")
    chosen = parser.parse_args()
    chosen.model = chosen.model.split(",")
    if unknown := [name for name in chosen.model if not zoo.known(name)]:
        parser.error(f"--model {','.join(unknown)} is not known; choose from {NAMED}")
    try:
        chosen.sizes = [size(text) for text in chosen.sizes.split(",")] if chosen.sizes else []
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return chosen


def measured(model: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The result of a model, whatever becomes of it."""
    result: dict[str, Any] = {
        "model": model, "mode": chosen.mode, "dynamic": chosen.dynamic, "failed": [], "rows": [],
    }  # fmt: skip
    started = time.perf_counter()
    attempted(result, "the model", lambda: table(model, chosen, result))
    left = attempted(result, "freeing its memory", measure.freed_mib)
    print(f"== {model}: {time.perf_counter() - started:.1f} s, {left or 0:.0f} MiB stay in use", flush=True)
    measure.write(path_for(model, chosen), result)
    return result


def main() -> None:
    """Prints every row as it is measured and a table at the end; writes the JSON."""
    chosen = arguments()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= process.caches(Path(folder))  # empty: the first calls below are cold ones
        chosen.kernels = measure.Kernels().listen()
        results = [measured(model, chosen) for model in chosen.model]
    print(summary(results), flush=True)


if __name__ == "__main__":
    main()
