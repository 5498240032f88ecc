"""Draws each mixed run of bench/results into docs/images: what the first prompt costs, and how the time adds up.

python -m bench.plot

One picture a model. The picture carries the hash of the result that it was drawn from, so that a stale one is noticed.
"""

import hashlib
import io
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from bench import figures
from tools.paths import ROOT

IMAGES = ROOT / "docs" / "images"
SOURCE = "Figures-SHA256"  # the key in the picture's metadata
# Okabe and Ito's colours, told apart without red and green; the two light ones darkened for text on white.
COLOURS = {"eager": "#333333", "anyshape": "#0072B2", "blocks": "#C44E00", "core": "#A5467E"}  # what is drawn
NAMES = {"eager": "eager", "anyshape": "AnyShape", "blocks": "blocks compiled", "core": "TorchCompileModel"}
CACHES = {"cold": "caches empty", "warm": "caches filled"}
STYLES = {"cold": "-", "warm": (0, (4, 2))}
TALLEST = 2.2  # the time axis ends here, in runs of eager: what takes longer leaves at the top, with a note


class Line(NamedTuple):
    """A run as it is drawn: seconds at the end of each finished prompt, from 0 on."""

    how: str
    temperature: str
    run: dict[str, Any]
    seconds: list[float]

    @property
    def label(self) -> str:
        """The method; with the state of its caches where it has any."""
        return NAMES[self.how] if self.how == "eager" else f"{NAMES[self.how]}, {CACHES[self.temperature]}"

    @property
    def style(self) -> dict[str, Any]:
        """Colour by method, dashes by caches."""
        return {"color": COLOURS[self.how], "linestyle": STYLES[self.temperature]}


def lines(result: dict[str, Any]) -> list[Line]:
    """Every run of ``result`` that is drawn."""
    found = []
    for how, name, run in figures.runs(result):
        seconds = [0.0]
        for prompt in run["prompts"]:
            seconds.append(seconds[-1] + prompt["seconds"])
        found.append(Line(how, name, run, seconds))
    return found


def draw(result: dict[str, Any]) -> Figure:
    """The picture of one mixed run."""
    figure = Figure(figsize=(10.5, 4.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    every = lines(result)
    first_prompt(left, every)
    together(right, every, result["runs"]["eager"]["cold"]["prompts"])
    gpu = result["machine"].split(",")[0]
    title = f"{figures.MODELS[result['model']]}: one session, every prompt another size or batch"
    figure.suptitle(f"{title} ({result['steps']} Euler steps each, {gpu})", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def first_prompt(axes: Axes, every: list[Line]) -> None:
    """A bar per run: seconds of the first prompt, and what that is beyond eager's."""
    eager = every[0].seconds[1]
    for place, line in enumerate(every):
        if len(line.seconds) > 1:
            value = line.seconds[1]
            axes.barh(place, value, color=COLOURS[line.how], alpha=1.0 if line.temperature == "cold" else 0.6)
            text = f"{value:.1f}" if line.how == "eager" else f"{value:.1f} ({value - eager:+.1f})"
        else:
            value = line.run["limit_seconds"] if line.run["exit_code"] is None else 0
            axes.barh(place, value, fill=False, hatch="//")
            text = f"not done in {value:g} s" if value else "failed"
        axes.annotate(f" {text}", (value, place), va="center")
    axes.set_yticks(range(len(every)), [line.label.replace(", ", ",\n") for line in every], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of the first prompt (beyond eager's)")


def together(axes: Axes, every: list[Line], prompts: list[dict[str, Any]]) -> None:
    """A line per run: seconds since the first prompt began, at the end of each prompt."""
    top = min(max(line.seconds[-1] for line in every), TALLEST * every[0].seconds[-1]) * 1.05
    for line in every:
        axes.plot(range(len(line.seconds)), line.seconds, linewidth=1.8, **line.style)
        if not line.run["finished"]:
            unfinished(axes, line)
    axes.set_ylim(0, top)
    axes.set_xlim(0, len(prompts))
    shown = [line for line in every if line.run["finished"] and line.seconds[-1] <= top]
    end_labels(axes, shown, len(prompts), top)
    notes(axes, [line for line in every if line not in shown], len(prompts))
    names = [f"{p['width']}x{p['height']}" + (f", batch {p['images']}" * (p["images"] > 1)) for p in prompts]
    axes.set_xticks(range(1, len(names) + 1), names, rotation=40, ha="right", fontsize=8)
    axes.set_ylabel("seconds since the first prompt began")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)


def unfinished(axes: Axes, line: Line) -> None:
    """A dotted line into the prompt at which a run was stopped, up to the time given to it."""
    done, given = len(line.seconds) - 1, line.run["limit_seconds"]
    if line.run["exit_code"] is None:
        axes.plot([done, done + 1], [line.seconds[-1], given], color=COLOURS[line.how], linestyle=":", linewidth=1.8)
    axes.plot(done, line.seconds[-1], marker="x", color=COLOURS[line.how])


def end_labels(axes: Axes, shown: list[Line], x: int, top: float) -> None:
    """Each line's name and total at its end, moved apart where they would overlap."""
    height, last = top * 0.065, -top
    for line in sorted(shown, key=lambda each: each.seconds[-1]):
        last = max(line.seconds[-1], last + height)
        axes.annotate(
            f"{line.label}: {line.seconds[-1]:.1f} s", (x, line.seconds[-1]), xytext=(x * 1.02, last),
            color=COLOURS[line.how], fontsize=9, va="center", annotation_clip=False,
        )  # fmt: skip


def notes(axes: Axes, absent: list[Line], count: int) -> None:
    """What became of the runs that leave the picture."""
    for place, line in enumerate(absent):
        axes.annotate(
            f"{line.label}: {fate(line, count)}", (0.2, 0.97 - 0.07 * place), xycoords="axes fraction",
            color=COLOURS[line.how], fontsize=9, va="top", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip


def fate(line: Line, count: int) -> str:
    """Why a line has no end in the picture."""
    done = len(line.seconds) - 1
    if line.run["finished"]:
        return f"{line.seconds[-1]:.0f} s ↑"
    if line.run["exit_code"] is not None:
        return f"failed after {done} of {count} prompts"
    return f"not finished, {done} of {count} prompts in {line.run['limit_seconds']:g} s"


def digest(path: Path) -> str:
    """The hash of a result, as the picture carries it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save(figure: Figure, path: Path, source: str) -> None:
    """A PNG of few colours, a third of the size of a full one."""
    drawn, facts = io.BytesIO(), PngInfo()
    figure.savefig(drawn, format="png", dpi=110)
    facts.add_text(SOURCE, source)
    Image.open(drawn).convert("RGB").quantize(96).save(path, optimize=True, pnginfo=facts)


def main() -> None:
    """Draws every mixed run that there is."""
    for model in figures.MODELS:
        path = figures.mixed_path(model)
        if path.exists():
            target = IMAGES / f"{path.stem}.png"
            save(draw(figures.load(path)), target, digest(path))
            print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
