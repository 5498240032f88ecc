"""Draws the race of the README: SDXL's 20 steps at four sizes, eager and AnyShape, as an animated SVG.

python -m bench.race

What moves is time as it was measured, at half its speed: a lane is full when 20 model calls of bench/results are done.
A viewer that does not move pictures shows the end, with the seconds.
"""

from typing import Any, NamedTuple

from bench import figures
from bench.markdown import conditions, size
from bench.plot import COLOURS, IMAGES, SOURCE, digest
from tools.paths import ROOT

MODEL = "sdxl"
SIZES = ("512x512", "896x768", "1024x1024", "1536x1536")  # each with CFG, one image
RESULT, PATH = figures.forward_path(MODEL), IMAGES / f"race-{MODEL}.svg"
SLOWER = 2.0  # times slower than it was
REST = 3.0  # seconds between two rounds
WIDTH, LEFT, TRACK, LANE, GAP, TOP = 860, 120, 560, 16, 22, 62  # pixels
INK, PALE = "#222222", "#E6E6E6"


class Lane(NamedTuple):
    """One of the racers: at one size, one way."""

    how: str  # of COLOURS
    label: str  # of the size, before the first of its lanes
    seconds: float
    ahead: str  # how many times as fast as eager


def lanes(result: dict[str, Any]) -> list[Lane]:
    """Two for each size."""
    found = []
    for name in SIZES:
        (row,) = [r for r in result["rows"] if (size(r), r["images"], r["rows"]) == (name, 1, 2)]
        eager, ours = (figures.STEPS * row[key] / 1e3 for key in ("eager_ms", "compiled_ms"))
        found += [Lane("eager", name, eager, ""), Lane("anyshape", "", ours, f"{eager / ours:.2f}x")]
    return found


def draw(result: dict[str, Any], source: str) -> str:
    """The picture, which carries the hash of the result that it is drawn from."""
    racers = lanes(result)
    whole = SLOWER * max(lane.seconds for lane in racers) + REST
    height = TOP + len(racers) // 2 * (2 * LANE + GAP) + 6
    title = f"{figures.MODELS[MODEL]}, one image of {figures.STEPS} steps with CFG: seconds in the model"
    where = "{gpu}, torch {torch}, ComfyUI {comfyui}".format(**conditions(result))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<!-- {SOURCE}: {source} -->",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 22, title, size=15, weight="bold"),
        _text(LEFT, 42, f"{where}, {result['date']}; shown at half speed", colour="#666666", size=12),
        _text(LEFT + TRACK + 14, 42, "ComfyUI", colour=COLOURS["eager"], size=12),
        _text(LEFT + TRACK + 84, 42, "AnyShape", colour=COLOURS["anyshape"], size=12, weight="bold"),
    ]
    for place, lane in enumerate(racers):
        parts += _lane(lane, TOP + place // 2 * (2 * LANE + GAP) + place % 2 * LANE, whole)
    return "\n".join([*parts, "</svg>", ""])


def _lane(lane: Lane, top: int, whole: float) -> list[str]:
    done = SLOWER * lane.seconds / whole  # of a round
    colour, bottom = COLOURS[lane.how], top + LANE - 4
    moved = f'values="0;{TRACK};{TRACK}" keyTimes="0;{done:.4f};1" dur="{whole:.2f}s" repeatCount="indefinite"'
    shown = f'values="0;1;1" keyTimes="0;{done:.4f};1" calcMode="discrete" dur="{whole:.2f}s" repeatCount="indefinite"'
    seconds = f"{lane.seconds:.2f} s" + (f", {lane.ahead}" if lane.ahead else "")
    weight = "bold" if lane.ahead else "normal"
    return [
        _text(LEFT - 12, top + LANE + 4, lane.label, anchor="end") if lane.label else "",
        f'<rect x="{LEFT}" y="{top}" width="{TRACK}" height="{LANE - 3}" fill="{PALE}"/>',
        f'<rect x="{LEFT}" y="{top}" width="{TRACK}" height="{LANE - 3}" fill="{colour}">'
        f'<animate attributeName="width" {moved}/></rect>',
        _text(
            LEFT + TRACK + 14,
            bottom,
            seconds,
            colour,
            weight=weight,
            inside=f'<animate attributeName="opacity" {shown}/>',
        ),
    ]


def _text(
    x: int, y: int, text: str, colour: str = INK, size: int = 13, weight: str = "normal", anchor: str = "start",
    inside: str = "",
) -> str:  # fmt: skip
    style = f'fill="{colour}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{text}{inside}</text>'


def main() -> None:
    """Draws it."""
    PATH.write_text(draw(figures.load(RESULT), digest(RESULT)), encoding="utf-8")
    print(PATH.relative_to(ROOT))


if __name__ == "__main__":
    main()
