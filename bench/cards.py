"""Draws the cards of the templates from bench/results: a model's times, eager and AnyShape, beside its workflow.

python -m bench.cards

Templates without a figure of their own have pictures of the demo model: tools/thumbnails. Those of Skip Blocks whose
speed was not measured have a plan: which steps of their workflow run every block.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from bench import figures
from bench.markdown import conditions, size
from bench.plot import COLOURS, digest
from bench.tables import three
from tools import embed
from tools.paths import ROOT

embed.bare_pack()

from anyshape.accel.skip.schedule import full_steps  # noqa: E402 - the package exists from the line above on

FOLDER = ROOT / "example_workflows"
CARD, QUALITY = (640, 360), 88
PAPER, INK, PALE, FAINT = "#FFFFFF", "#222222", "#666666", "#E6E6E6"
WITHOUT_AND_WITH = ("ComfyUI", "AnyShape")
LEFT, TRACK, TOP, ROW, BAR = 150, 330, 96, 74, 22  # pixels


class Bar(NamedTuple):
    """A size, and two times in one unit."""

    label: str
    before: float
    after: float


class Card(NamedTuple):
    """What a card shows."""

    template: str
    title: str
    what: str  # is measured
    names: tuple[str, str]
    results: tuple[Path, ...]
    bars: list[Bar]
    note: str = ""

    @property
    def digest(self) -> str:
        """Of what was measured."""
        return " ".join(map(digest, self.results))


def forward(template: str, model: str, sizes: tuple[str, ...], with_cfg: bool = False) -> Card:
    """One model call."""
    path = figures.forward_path(model)
    rows = {(size(r), r["rows"]): r for r in figures.load(path)["rows"] if r["images"] == 1}
    bars = [Bar(name, rows[name, 1 + with_cfg]["eager_ms"], rows[name, 1 + with_cfg]["compiled_ms"]) for name in sizes]
    what = "ms for one model call" + (" with CFG" if with_cfg else "")
    return Card(template, figures.MODELS[model], what, WITHOUT_AND_WITH, (path,), bars)


def accelerate() -> Card:
    """What its node makes faster: the model and the VAE of SDXL, at one size."""
    model, vae = figures.forward_path("sdxl"), figures.RESULTS / "vae.json"
    (call,) = (r for r in figures.load(model)["rows"] if (size(r), r["images"], r["rows"]) == ("1024x1024", 1, 2))
    (part,) = (r for r in figures.load(vae)["rows"] if (size(r), r["images"]) == ("1024x1024", 1))
    bars = [
        Bar("model call", call["eager_ms"], call["compiled_ms"]),
        Bar("VAE decode", part["eager_ms"], part["compiled_ms"]),
        Bar("VAE encode", part["encode_eager_ms"], part["encode_compiled_ms"]),
    ]
    template, what = "Accelerate SDXL - one node for model and VAE", "ms at 1024x1024, the model call with CFG"
    return Card(template, "Accelerate (SDXL)", what, WITHOUT_AND_WITH, (model, vae), bars)


def control() -> Card:
    """A model call with its ControlNet."""
    path = figures.RESULTS / "controlnet.json"
    rows = figures.load(path)["rows"]
    bars = [Bar(size(r), r["neither_ms"], r["both_ms"]) for r in rows if size(r) in ("1024x1024", "960x720", "512x512")]
    template, title = "ControlNet SD1.5 - one image, then four", "ControlNet"
    what, note = "ms for one call of SDXL with its ControlNet", ", a slow host"
    return Card(template, title, what, WITHOUT_AND_WITH, (path,), bars, note)


def skipping() -> Card:
    """A picture's sampling with every step in full, and with two of three skipped, both compiled."""
    path = figures.RESULTS / "skip-sd15.json"
    found = figures.load(path)
    bars = [Bar(size(r), r["seconds"]["compiled"], r["seconds"]["compiled_skip"]) for r in found["rows"]]
    what = f"seconds for {found['steps']} steps on Compile Model"
    names = ("every step", f"interval {found['interval']}")
    return Card("Skip Blocks SD1.5 - every step beside one in three", "Skip Blocks (SD1.5)", what, names, (path,), bars)


def cards() -> list[Card]:
    """All of them."""
    three = ("1024x1024", "840x968", "512x512")
    return [
        forward("SDXL - three sizes, one compilation", "sdxl", ("1024x1024", "896x768", "512x512"), with_cfg=True),
        forward("Flux - three sizes, one compilation", "flux", three),
        forward("Z-Image Turbo - three sizes, eight steps each", "zimage", three),
        forward("Qwen-Image - square, portrait and landscape", "qwen", three),
        forward("Wan 2.1 - videos of two sizes and lengths", "wan", ("1024x1024", "832x480x33")),
        accelerate(),
        control(),
        skipping(),
    ]


class Plan(NamedTuple):
    """Which steps of a transformer's workflow run every block."""

    template: str
    title: str
    steps: int
    full: list[int]

    @property
    def digest(self) -> str:
        """What the picture shows."""
        return f"{self.steps} steps, full: {self.full}"


def plan(template: str, title: str) -> Plan:
    """By the settings in the workflow's file."""
    workflow = json.loads((FOLDER / f"{template}.json").read_text(encoding="utf-8"))
    values = {node["type"]: node["widgets_values"] for node in workflow["nodes"]}
    steps, interval = values["KSampler"][2], values["AnyShapeSkipBlocks"][0]
    return Plan(template, title, steps, sorted(full_steps(range(steps), interval, density=None)))


def plans() -> list[Plan]:
    """All of them."""
    return [
        plan("Skip Blocks Wan 2.1 - every step beside one in three", "Skip Blocks (Wan 2.1)"),
        plan("Skip Blocks Z-Image - every step beside one in three", "Skip Blocks (Z-Image)"),
    ]


def draw(card: Card) -> Image.Image:
    """The picture."""
    image, pen = _paper(card.title, card.what)
    for place, name in enumerate(card.names):
        pen.text((LEFT + TRACK + 12, 20 + 26 * place), name, fill=_colour(place), font=_font(18))
    longest = max(bar.before for bar in card.bars)
    for number, bar in enumerate(card.bars):
        _bars(pen, bar, TOP + ROW * number, longest)
    measured = dict.fromkeys(_where(figures.load(path)) for path in card.results)
    pen.text((24, CARD[1] - 30), "; ".join(measured) + card.note, fill=PALE, font=_font(14))
    return image


def draw_plan(plan: Plan) -> Image.Image:
    """The picture: a box per step, filled where every block runs."""
    image, pen = _paper(plan.title, f"{plan.steps} steps with CFG, and where every block of the model runs")
    wide = (CARD[0] - 48) / plan.steps
    for place, (name, full) in enumerate((("every step", range(plan.steps)), ("with Skip Blocks", plan.full))):
        top = TOP + 8 + 96 * place
        pen.text((24, top), name, fill=_colour(place), font=_font(18))
        for step in range(plan.steps):
            box = (24 + wide * step, top + 30, 24 + wide * (step + 1) - 4, top + 66)
            pen.rectangle(box, fill=_colour(place) if step in full else FAINT)
    skipped = plan.steps - len(plan.full)
    said = f"{len(plan.full)} full steps; on {skipped} the middle blocks are forecast"
    pen.text((24, TOP + 196), said, fill=INK, font=_font(18))
    pen.text((24, CARD[1] - 30), "The plan of the workflow. Its speed was not measured.", fill=PALE, font=_font(14))
    return image


def _paper(title: str, what: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", CARD, PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((24, 18), title, fill=INK, font=_font(28))
    pen.text((24, 56), what, fill=PALE, font=_font(17))
    return image, pen


def _bars(pen: ImageDraw.ImageDraw, bar: Bar, top: int, longest: float) -> None:
    pen.text((24, top + BAR - 10), bar.label, fill=INK, font=_font(18))
    for place, value in enumerate((bar.before, bar.after)):
        y, length = top + place * (BAR + 3), round(TRACK * value / longest)
        pen.rectangle((LEFT, y, LEFT + length, y + BAR), fill=_colour(place))
        pen.text((LEFT + length + 8, y + 1), three(value), fill=_colour(place), font=_font(16))
    pen.text((LEFT + TRACK + 66, top + BAR - 16), f"{bar.before / bar.after:.2f}x", fill=_colour(1), font=_font(30))


def _colour(place: int) -> str:
    return COLOURS[("eager", "anyshape")[place]]


def _font(pixels: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(pixels)


def _where(result: dict[str, Any]) -> str:
    return "{gpu}, torch {torch}, ComfyUI {comfyui}, ".format(**conditions(result)) + result["date"]


def main() -> None:
    """Draws them beside their workflows; the hash of the result, or the plan itself, lies in each as a comment."""
    drawn = [(card.template, draw(card), card.digest) for card in cards()]
    drawn += [(one.template, draw_plan(one), one.digest) for one in plans()]
    for template, image, comment in drawn:
        path = FOLDER / f"{template}.jpg"
        image.save(path, quality=QUALITY, optimize=True, comment=comment)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
