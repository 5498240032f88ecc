"""What bench/results says of Skip Blocks, for README, docs/performance.md and the plot. Needs no torch."""

from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bench import figures
from bench.markdown import headed, said, size, table
from bench.texts import ENGLISH

QUALITY, ABLATION = figures.RESULTS / "skip-quality.json", figures.RESULTS / "skip-ablation.json"
EQUAL = 100.0  # dB that equal pictures get, whose PSNR is infinite
WHOLE, FEWER, OURS, PLAIN, CACHE = "every step", "fewer steps", "Skip Blocks", "DeepCache", "EasyCache"
TAYLOR, MAGNITUDE = "TaylorSeer", "MagCache"
VERSUS = (OURS, FEWER, PLAIN, TAYLOR, MAGNITUDE, CACHE)  # columns of the comparison at equal cost
PICTURE = "PSNR against seconds per picture and against cost, one line per method"
Row = dict[str, Any]


class Point(NamedTuple):
    """A setting of a method on the frontier."""

    cost: float  # full forwards
    psnr: float  # dB


def parts() -> list[str]:
    """The sections, as far as they have been measured."""
    found = [(speed_path(model), speed_part) for model in figures.MODELS]
    found += [(QUALITY, quality_part), (ABLATION, ablation_part)]
    return [part(figures.load(path)) for path, part in found if path.exists()]


# Speed ------------------------------------------------------------------------------------------------------------


def speed_path(model: str) -> Path:
    """Where the result of ``bench.skip`` lies."""
    return figures.RESULTS / f"skip-{model}.json"


def speed_part(result: dict[str, Any]) -> str:
    """Seconds of a sampling run with and without skipping, in eager and on Compile Model."""
    head = "Size | Eager, s | skipping | Faster | Compiled, s | skipping | Faster | Depth | Full steps | Features"
    how = f"One image of {result['steps']} Euler steps with CFG in fp16, interval {result['interval']}, depth auto."
    title = f"Skip Blocks: speed of {figures.MODELS[result['model']]}"
    return headed(title, result, how, table(head.split(" | "), map(speed_row, result["rows"])))


def speed_row(row: Row) -> list[str]:
    """One size."""
    cells = [size(row)]
    for way in ("eager", "compiled"):
        took, skipping = row["seconds"][way], row["seconds"][f"{way}_skip"]
        cells += [f"{took:.3f}", f"{skipping:.3f}", f"{took / skipping:.2f}x"]
    steps = f"{row['full']} of {row['full'] + row['skipped']}"
    return [*cells, str(row["depth"]), steps, f"{row['feature_mb']:.0f} MB"]


# Quality ----------------------------------------------------------------------------------------------------------


def at_size(rows: list[Row], first: bool = True) -> list[Row]:
    """The rows of the first size, or of the others."""
    same = (rows[0]["width"], rows[0]["height"])
    return [row for row in rows if ((row["width"], row["height"]) == same) is first]


def of_method(rows: list[Row], method: str) -> list[Row]:
    """The rows of a method that have a PSNR: settings that skip nothing give the same pictures, and are left out."""
    return [row for row in rows if row["method"] == method and row["psnr"] < EQUAL]


def line(rows: list[Row], method: str) -> list[Point]:
    """The frontier of a method by cost."""
    return sorted(Point(row["cost"], row["psnr"]) for row in of_method(rows, method))


def at_cost(points: list[Point], cost: float) -> float | None:
    """PSNR at a cost, linear between the two settings around it; None beyond the ends. Points by rising cost."""
    for left, right in zip(points, points[1:], strict=False):
        if left.cost <= cost <= right.cost:
            share = (cost - left.cost) / (right.cost - left.cost) if right.cost > left.cost else 0.0
            return left.psnr + share * (right.psnr - left.psnr)
    return next((point.psnr for point in points if point.cost == cost), None)


def quality_part(result: dict[str, Any]) -> str:
    """The plot, the comparison at equal cost, and every row."""
    rows = result["rows"]
    head = "Size | Method | Setting | Full | Skipped | Cost | Seconds per picture | PSNR, dB | SSIM"
    return headed(
        "Skip Blocks: quality",
        result,
        said(ENGLISH, [sampling(result)], wrap=True),
        f"![{PICTURE}](images/{QUALITY.stem}.png)",
        "PSNR in dB at the same cost, between two settings linear in it; in brackets: how far Skip Blocks lies above.",
        table(["Cost", "", *VERSUS], versus(at_size(rows), result["steps"])),
        "Every setting; the second size with fewer of them:",
        table(head.split(" | "), map(quality_row, rows)),
    )


def sampling(result: dict[str, Any]) -> str:
    """How the pictures were made."""
    setting = "{sampler}, {scheduler}, CFG {cfg}".format(**result["setting"])
    return (
        f"{result['prompts']} prompts of the demo model in float32, {setting}, batches of {result['batch']}, "
        f"{result['threads']} threads; SSIM by scikit-image {result['scikit_image']}. Everything is compared with "
        f"{result['steps']} full steps of the same seed."
    )


def versus(rows: list[Row], steps: int) -> list[list[str]]:
    """A line a setting of ours, and one for half the cost of every step, which lies between two of them."""
    names = {row["cost"]: f"interval {row['setting']}" for row in rows if row["method"] == OURS}
    lines = {method: line(rows, method) for method in VERSUS}
    found = []
    for cost in sorted({*names, steps / 2}, reverse=True):
        ours, *others = (at_cost(points, cost) for points in lines.values())
        cells = [beyond(value, ours) for value in others]
        found.append([f"{cost:.1f}", names.get(cost, "half of every step"), beyond(ours, ours), *cells])
    return found


def beyond(value: float | None, ours: float | None) -> str:
    """PSNR of a method, and how far ours lies above it."""
    if value is None:
        return ""
    return f"{value:.1f}" if ours in (None, value) else f"{value:.1f} ({ours - value:+.1f})"


def quality_row(row: Row) -> list[str]:
    """One setting."""
    likeness = [f"{row['psnr']:.1f}", f"{row['ssim']:.4f}"] if row.get("psnr", EQUAL) < EQUAL else ["equal", "1"]
    counts = [f"{row[name]:g}" for name in ("setting", "full", "skipped")]
    return [size(row), row["method"], *counts, f"{row['cost']:.1f}", f"{row['seconds']:.3f}", *likeness]


# Ablation ---------------------------------------------------------------------------------------------------------


def ablation_part(result: dict[str, Any]) -> str:
    """A line a way to forecast, a column a number of steps and an interval."""
    cases = list(dict.fromkeys((row["steps"], row["interval"]) for row in result["rows"]))
    head = ["Axis", "Damping", "Density", *(f"{steps} steps, 1 in {interval}" for steps, interval in cases), "Mean"]
    lines = [way_row(way, values) for way, values in ways(result["rows"]).items()]
    how = f"PSNR in dB at {size(result)}, {result['prompts']} prompts, depth auto; the first line is plain DeepCache."
    return headed("Skip Blocks: how it forecasts", result, how, table(head, lines))


def ways(rows: list[Row]) -> dict[tuple, list[float]]:
    """PSNR of each case, by (axis, damping, density); plain DeepCache has None for all three."""
    found: dict[tuple, list[float]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in ("axis", "damping", "density")), []).append(row["psnr"])
    return found


def way_row(way: tuple, values: list[float]) -> list[str]:
    """One way to forecast."""
    names = ["" if value is None else str(value) for value in way]
    return [*names, *(f"{value:.1f}" for value in values), f"{fmean(values):.2f}"]
