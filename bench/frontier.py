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
# Of bench.plot; the same method with more blocks a step has the same colour.
STYLES: dict[str, dict[str, Any]] = {
    "Skip Blocks": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "Skip Blocks, depth 1": {"color": "#0072B2", "linestyle": (0, (4, 2)), "marker": "s"},
    "DeepCache": {"color": "#C44E00", "linestyle": "-", "marker": "^"},
    "EasyCache": {"color": "#A5467E", "linestyle": "-", "marker": "D"},
    "fewer steps": {"color": "#333333", "linestyle": "-", "marker": "x"},
}
NAMES = {"Skip Blocks": "Skip Blocks, depth auto", "DeepCache": "plain DeepCache, same depth"}
BELOW = ("Skip Blocks, depth 1", "DeepCache")  # methods whose settings are written below their points
AXES = {"seconds": "seconds of sampling for a picture", "cost": "cost, in full forwards"}


def draw(result: dict[str, Any]) -> Figure:
    """Two panels: the same points against time and against cost."""
    figure = Figure(figsize=(10.5, 4.6), layout="constrained", facecolor="white")
    rows = skip_tables.at_size(result["rows"])
    for axes, (name, label) in zip(figure.subplots(1, 2, sharey=True), AXES.items(), strict=True):
        panel(axes, rows, name)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", linewidth=0.6)
    figure.axes[0].set_ylabel(f"PSNR to the picture of {result['steps']} full steps, dB")
    figure.axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    half(figure.axes[1], result["steps"] / 2)
    machine = result["machine"].split(",")[0]
    title = f"Demo model, {size(rows[0])}, {result['prompts']} prompts, {result['setting']['sampler']}, {machine}"
    figure.suptitle(f"{title}: each point a setting, upper left is better", fontsize=11)
    return figure


def panel(axes: Axes, rows: list[dict[str, Any]], name: str) -> None:
    """A line per method over the figure ``name``; each point with its steps, interval or threshold."""
    for method, style in STYLES.items():
        points = sorted((row[name], row["psnr"], row["setting"]) for row in skip_tables.of_method(rows, method))
        axes.plot(
            [x for x, _, _ in points], [y for _, y, _ in points],
            linewidth=1.6, markersize=4, label=NAMES.get(method, method), **style,
        )  # fmt: skip
        for x, y, setting in points:
            place = (5, -8) if method in BELOW else (-5, 4)
            axes.annotate(
                f"{setting:g}", (x, y), xytext=place, textcoords="offset points", ha="center", fontsize=7,
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
