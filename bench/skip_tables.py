"""What bench/results says of Skip Blocks, for README, docs/performance.md and the plot. Needs no torch."""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bench import figures
from bench.markdown import headed, said, size, table
from bench.texts import ENGLISH

QUALITY = figures.RESULTS / "skip-quality.json"
ABLATIONS = {
    "": "how it forecasts",
    "-density": "its full steps and its depth, UNet",
    "-transformer": "its full steps and its depth, transformer",
}
EQUAL = 100.0  # dB that equal pictures get, whose PSNR is infinite
WHOLE, FEWER, OURS, PLAIN, CACHE = "every step", "fewer steps", "Skip Blocks", "DeepCache", "EasyCache"
TAYLOR, MAGNITUDE = "TaylorSeer", "MagCache"
VERSUS = (OURS, FEWER, PLAIN, TAYLOR, MAGNITUDE, CACHE)  # columns of the comparison at equal cost
PICTURE = "PSNR against cost and against seconds per picture, one line per method, for both models"
HALF = (
    "PSNR in dB and SSIM at half the cost of full sampling, in FLOPs, interpolated between two settings. In "
    "brackets: by how much Skip Blocks is better. A cell is empty if no setting of the method costs as little, or as "
    "much."
)
CASE = ("model", "sampler", "steps", "width", "height")
WAY = {"axis": "Axis", "damping": "Damping", "density": "Density", "of_order": "Order", "depth": "Depth"}
COST, SECONDS = "cost", "seconds"  # by what methods are compared: full forwards, or seconds of a picture
Row = dict[str, Any]


class Point(NamedTuple):
    """A setting of a method on the frontier."""

    cost: float  # full forwards, or seconds
    psnr: float  # dB
    ssim: float = 1.0


def parts() -> list[str]:
    """The sections, as far as they have been measured."""
    found: list[tuple[Path, Callable[[dict[str, Any]], str]]] = [(QUALITY, quality_part)]
    for name, title in ABLATIONS.items():
        found.append((figures.RESULTS / f"skip-ablation{name}.json", partial(ablation_part, f"Skip Blocks: {title}")))
    return [speed_part(speeds()), *(part(figures.load(path)) for path, part in found if path.exists())]


# Speed ------------------------------------------------------------------------------------------------------------


def speeds() -> list[dict[str, Any]]:
    """The results of ``bench.skip``, in the order of the tables."""
    paths = [figures.RESULTS / f"skip-{model}.json" for model in figures.MODELS]
    return [figures.load(path) for path in paths if path.exists()]


def speed_part(results: list[dict[str, Any]]) -> str:
    """Seconds of a sampling run with and without skipping, in eager and on Compile Model."""
    head = "Model | Size | Eager, s | skipping | Faster | Compiled, s | skipping | Faster | Depth | Full | Features"
    first, commands = results[0], "`, `".join(dict.fromkeys(result["command"] for result in results))
    how = (
        f"{first['steps']} Euler steps with the CFG that is usual for the model, interval {first['interval']}, depth "
        "auto. *Full*: how many of the steps run every block."
    )
    rows = [[figures.MODELS[result["model"]], *speed_row(row)] for result in results for row in result["rows"]]
    return headed("Skip Blocks: speed", first | {"command": commands}, how, table(head.split(" | "), rows))


def speed_row(row: Row) -> list[str]:
    """One size."""
    cells = [size(row)]
    for way in ("eager", "compiled"):
        if way not in row["seconds"]:
            cells += ["", "", ""]
            continue
        took, skipping = row["seconds"][way], row["seconds"][f"{way}_skip"]
        cells += [f"{took:.2f}", f"{skipping:.2f}", f"{took / skipping:.2f}x"]
    return [*cells, str(row["depth"]), str(row["full"]), f"{row['feature_mb']:.0f} MB"]


def usual_speedups() -> str:
    """By how much skipping makes a compiled model faster, each model at its first size."""
    found = ((result["model"], result["rows"][0]["compiled_speedup"]) for result in speeds())
    return ", ".join(f"{figures.MODELS[model]} {factor:.2f}x" for model, factor in found)


# Quality ----------------------------------------------------------------------------------------------------------


def cases(rows: list[Row]) -> list[list[Row]]:
    """The rows of each model, sampler, number of steps and size."""
    return [list(found) for _, found in groupby(rows, key=lambda row: [row[name] for name in CASE])]


def first_cases(rows: list[Row]) -> list[list[Row]]:
    """Of each model, what was measured first."""
    found: dict[str, list[Row]] = {}
    for case in cases(rows):
        found.setdefault(case[0]["model"], case)
    return list(found.values())


def of_method(rows: list[Row], method: str) -> list[Row]:
    """The rows of a method that have a PSNR: settings that skip nothing give the same pictures, and are left out."""
    return [row for row in rows if row["method"] == method and row.get("psnr", EQUAL) < EQUAL]


def line(rows: list[Row], method: str, by: str = COST) -> list[Point]:
    """The frontier of a method."""
    return sorted(Point(row[by], row["psnr"], row.get("ssim", 1.0)) for row in of_method(rows, method))


def at_cost(points: list[Point], cost: float) -> Point | None:
    """What a cost gives, linear between the two settings around it; None beyond the ends. Points by rising cost."""
    for left, right in zip(points, points[1:], strict=False):
        if left.cost <= cost <= right.cost:
            share = (cost - left.cost) / (right.cost - left.cost) if right.cost > left.cost else 0.0
            return Point(cost, *(a + share * (b - a) for a, b in zip(left[1:], right[1:], strict=True)))
    return next((point for point in points if point.cost == cost), None)


def quality_part(result: dict[str, Any]) -> str:
    """The plot, the comparisons at half the cost, and every row of each model's first case."""
    rows = result["rows"]
    head = "Model | Method | Setting | Full | Skipped | Cost | ms per picture | PSNR, dB | SSIM"
    columns = ["Model", "Sampler", "Steps", "Size", *VERSUS]
    first = first_cases(rows)
    one = first[0][0]
    return headed(
        "Skip Blocks: quality",
        result,
        said(ENGLISH, [sampling(result)], wrap=True),
        f"![{PICTURE}](images/{QUALITY.stem}.png)",
        said(ENGLISH, [HALF], wrap=True),
        table(columns, [half(case, COST) for case in cases(rows)]),
        "The same at half the time:",
        table(columns, [half(case, SECONDS) for case in cases(rows)]),
        "Every setting at {}, {sampler}, {steps} steps; bench/results has the others.".format(size(one), **one),
        table(head.split(" | "), [quality_row(row) for case in first for row in case]),
    )


def sampling(result: dict[str, Any]) -> str:
    """How the pictures were made."""
    return (
        "{prompts} prompts of the demo's models in {dtype}, scheduler {setting[scheduler]}, CFG {setting[cfg]}, "
        "batches of {batch}. Everything is compared with full sampling by the same sampler and seed."
    ).format(**result)


def half(case: list[Row], by: str) -> list[str]:
    """A line of a comparison at half of what every step in full costs."""
    whole = next(row for row in case if row["method"] == WHOLE)
    ours, *others = (at_cost(line(case, method, by), whole[by] / 2) for method in VERSUS)
    names = [whole["model"], whole["sampler"], str(whole["steps"]), size(whole)]
    return [*names, beyond(ours, ours), *(beyond(other, ours) for other in others)]


def beyond(found: Point | None, ours: Point | None) -> str:
    """PSNR and SSIM of a method, and how far ours lies above it."""
    if found is None:
        return ""
    above = "" if ours in (None, found) else f" ({ours.psnr - found.psnr:+.1f})"
    return f"{found.psnr:.1f}{above}, {found.ssim:.4f}"


def quality_row(row: Row) -> list[str]:
    """One setting."""
    likeness = [f"{row['psnr']:.1f}", f"{row['ssim']:.4f}"] if row.get("psnr", EQUAL) < EQUAL else ["equal", "1"]
    counts = [f"{row[name]:g}" for name in ("setting", "full", "skipped")]
    return [row["model"], row["method"], *counts, f"{row['cost']:.1f}", f"{row['seconds'] * 1e3:.1f}", *likeness]


# Ablation ---------------------------------------------------------------------------------------------------------


def ablation_part(title: str, result: dict[str, Any]) -> str:
    """A line a way to forecast, a column a number of steps and an interval."""
    rows = result["rows"]
    cases = list(dict.fromkeys((row["steps"], row["interval"]) for row in rows))
    names = [name for name in WAY if len({row[name] for row in rows if name in row}) > 1]
    head = [*(WAY[name] for name in names), *(f"{steps} steps, 1 in {interval}" for steps, interval in cases), "Mean"]
    lines = [way_row(way[1:], found) for way, found in ways(rows, ["method", *names]).items()]
    how = f"PSNR in dB at {size(result)}, {result['prompts']} prompts; the first line is plain DeepCache."
    if "density" in names and any(row.get("density", 0) is None for row in rows):
        how += " If no density is given, Skip Blocks itself places the full steps."
    if "depth" in names:
        how += " A larger depth costs more."
    return headed(title, result, how, table(head, lines))


def ways(rows: list[Row], names: list[str]) -> dict[tuple, list[Row]]:
    """The rows of each way; plain DeepCache has None for all but its method."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return found


def way_row(way: tuple, found: list[Row]) -> list[str]:
    """One way to forecast."""
    names = ["" if value is None else str(value) for value in way]
    return [*names, *(f"{row['psnr']:.1f}" for row in found), f"{fmean(row['psnr'] for row in found):.2f}"]
