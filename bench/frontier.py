"""Draws the frontier of Skip Blocks into docs/images: how near the pictures come, against time and against cost.

python -m bench.frontier

The picture carries the hash of the result that it was drawn from, as those of ``bench.plot`` do.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import figures, plot, skip_tables
from bench.markdown import size
from tools.paths import ROOT

PATH = plot.IMAGES / f"{skip_tables.QUALITY.stem}.png"
STYLES: dict[str, dict[str, Any]] = {
    skip_tables.OURS: {"color": "#0072B2", "marker": "o"},
    skip_tables.FEWER: {"color": "#333333", "marker": "x"},
    skip_tables.PLAIN: {"color": "#C44E00", "marker": "^"},
    skip_tables.TAYLOR: {"color": "#00796B", "marker": "s"},
    skip_tables.MAGNITUDE: {"color": "#8D6E00", "marker": "v"},
    skip_tables.CACHE: {"color": "#A5467E", "marker": "D"},
}
NAMES = {skip_tables.PLAIN: "reuse of the deep blocks' result (DeepCache)", skip_tables.TAYLOR: "TaylorSeer, order 2"}
AXES = {skip_tables.COST: "cost, in full forwards", skip_tables.SECONDS: "seconds of sampling for a picture"}


def draw(result: dict[str, Any]) -> Figure:
    """A row of panels for each model: the same points against cost and against time."""
    first = skip_tables.first_cases(result["rows"])
    figure = Figure(figsize=(10.5, 4.3 * len(first)), layout="constrained", facecolor="white")
    for case, row in zip(first, figure.subplots(len(first), 2, sharey="row", squeeze=False), strict=True):
        whole = next(each for each in case if each["method"] == skip_tables.WHOLE)
        for axes, (name, label) in zip(row, AXES.items(), strict=True):
            panel(axes, case, name)
            axes.set_xlabel(label)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#DDDDDD", linewidth=0.6)
            half(axes, whole[name] / 2)
        row[0].set_ylabel(f"{whole['model']}: PSNR to {whole['steps']} full steps, dB")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    machine = result["machine"].split(",")[0]
    whole = first[0][0]
    title = f"The demo's models, {size(whole)}, {result['prompts']} prompts, {whole['sampler']}, {machine}"
    figure.suptitle(f"{title}: each point a setting, upper left is better", fontsize=11)
    return figure


def panel(axes: Axes, rows: list[dict[str, Any]], name: str) -> None:
    """A line per method over the figure ``name``; ours with its intervals."""
    for method, style in STYLES.items():
        points = sorted((row[name], row["psnr"], row["setting"]) for row in skip_tables.of_method(rows, method))
        axes.plot(
            [x for x, _, _ in points], [y for _, y, _ in points],
            linewidth=1.6, markersize=4, label=NAMES.get(method, method), **style,
        )  # fmt: skip
        for x, y, setting in points if method == skip_tables.OURS else ():
            axes.annotate(
                f"{setting:g}", (x, y), xytext=(-5, 4), textcoords="offset points", ha="center", fontsize=7,
                color=style["color"],
            )  # fmt: skip


def half(axes: Axes, cost: float) -> None:
    """A mark at half the cost of every step."""
    axes.axvline(cost, color="#888888", linewidth=0.8, linestyle=":")
    axes.annotate(
        "half of every step", (cost, 0), xycoords=("data", "axes fraction"), xytext=(3, 4),
        textcoords="offset points", fontsize=8, color="#555555",
    )  # fmt: skip


def main() -> None:
    """Draws it."""
    path = skip_tables.QUALITY
    plot.save(draw(figures.load(path)), PATH, plot.digest(path))
    print(PATH.relative_to(ROOT))


if __name__ == "__main__":
    main()
