"""The pictures of templates and nodes, made with the real server on the demo model.

    python -m tools.thumbnails           # all of them; needs a Chromium, about a minute

Beside the templates that have no card of their own figures (bench/cards), pictures that the demo model has drawn; in
web/docs/assets a picture of each node in each language, for its help page, taken in the real front end.
"""

import io
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from tools import browser as installed
from tools import embed
from tools.comfy_server import ComfyServer
from tools.paths import ROOT, project_env
from tools.web_page import WebPage, chromium

embed.bare_demo()

from anyshape_demo.workflows import Case, picture  # noqa: E402 - the package exists from the line above on

RUN = ROOT / "demo/example_workflows/Emoji - three sizes, nothing to download.json"  # needs no model that is not here
COMPARISON = ROOT / "example_workflows/Comparison SDXL - with and without AnyShape.jpg"
WARMED = ROOT / "example_workflows/Warm Up SDXL - image to image with LCM.jpg"
FORMS = ((256, 256), (320, 192), (200, 264))  # square, wide and tall
ASSETS = ROOT / "web/docs/assets"
LANGUAGES = ("en", "zh")
VIEW = {"width": 1600, "height": 1100}
CLEAR = {"x": 80, "y": 150, "width": 1440, "height": 810}  # pixels of the page over which nothing of ComfyUI's lies
THUMBNAIL, QUALITY = (640, 360), 85
PAPER, INK, CAPTION, SPACE = "#E4E4E8", "#222222", 34, 14  # of a thumbnail; pixels below and between its pictures
NODE_SCALE, MARGIN, BADGE = 1.5, 10, 24  # BADGE: the pack's name above a node, pixels of the canvas
SHARP = {"LiteGraph_Canvas_MinFontSizeForLOD": 0}  # texts are drawn however small
TITLE = 30
NODE_PLACE = (150, 130)
INFO, INFO_SIZE = "AnyShapeShapeCacheInfo", (480, 350)


class Canvas:
    """A page with a workflow on its canvas."""

    def __init__(self, browser: Any, server: ComfyServer, language: str = "en") -> None:
        self.web, self.server = WebPage(browser, server, Comfy_Locale=language, **SHARP), server
        self.web.page.set_viewport_size(VIEW)
        self._ids = itertools.count(1000)

    def open(self, path: Path) -> None:
        """A workflow as the template browser opens it."""
        self.web.page.evaluate("workflow => app.loadGraphData(workflow)", json.loads(path.read_text(encoding="utf-8")))
        self.web.page.wait_for_timeout(500)

    def bounds(self, kind: str = "") -> tuple[float, float, float, float]:
        """(left, top, width, height) on the canvas of the first node of a kind, or of all nodes."""
        boxes = self.web.page.evaluate(
            "kind => app.graph.nodes.filter((n) => !kind || n.type === kind).map((n) => [...n.pos, ...n.size])", kind
        )
        boxes = boxes[:1] if kind else boxes
        left, top = min(box[0] for box in boxes), min(box[1] for box in boxes) - TITLE - BADGE
        return left, top, max(b[0] + b[2] for b in boxes) - left, max(b[1] + b[3] for b in boxes) - top

    def shot(self, bounds: tuple[float, float, float, float], scale: float | None = None) -> Image.Image:
        """A picture of a part of the canvas: centred in CLEAR and as large as fits there, or cut out at ``scale``."""
        left, top, width, height = bounds
        fit = min(scale or 1.0, (CLEAR["width"] - 2 * MARGIN) / width, (CLEAR["height"] - 2 * MARGIN) / height)
        x, y = CLEAR["x"] + (CLEAR["width"] - fit * width) / 2, CLEAR["y"] + (CLEAR["height"] - fit * height) / 2
        self.web.page.evaluate(
            """([scale, x, y, left, top]) => {
                const box = app.canvas.canvas.getBoundingClientRect();
                app.canvas.deselectAll?.();
                app.canvas.ds.scale = scale;
                app.canvas.ds.offset = [(x - box.left) / scale - left, (y - box.top) / scale - top];
                app.canvas.setDirty(true, true);
            }""",
            [fit, x, y, left, top],
        )
        self.web.page.mouse.move(5, VIEW["height"] - 5)  # over nothing that has a tooltip
        self.web.page.wait_for_timeout(700)
        cut = {"x": x - MARGIN, "y": y - MARGIN, "width": fit * width + 2 * MARGIN, "height": fit * height + 2 * MARGIN}
        return Image.open(io.BytesIO(self.web.page.screenshot(clip=cut if scale else CLEAR))).convert("RGB")

    def run(self) -> None:
        """Opens the workflow for the demo model and runs it."""
        self.open(RUN)
        self.web.run(self.server)

    def add(self, kind: str) -> None:
        """A new node, in a workflow of its own."""
        self.web.page.evaluate(
            """([kind, place, id]) => {
                app.graph.clear();
                const node = LiteGraph.createNode(kind);
                // the front end gives a node the values of the last one of its id
                Object.assign(node, { pos: place, id });
                app.graph.add(node);
            }""",
            [kind, NODE_PLACE, next(self._ids)],
        )
        self.web.page.wait_for_timeout(300)

    def resize(self, kind: str, size: tuple[float, float]) -> None:
        """Of the nodes of a kind."""
        self.web.page.evaluate(
            "([kind, size]) => app.graph.nodes.forEach((node) => node.type === kind && node.setSize(size))",
            [kind, size],
        )


def thumbnails(server: ComfyServer) -> None:
    """What the demo model draws, with what the picture shows below it."""

    def drawn(text: str, width: int, height: int, compiled: bool = True) -> Image.Image:
        flow = picture(Case(width, height, 1, True, text), 2, compiled)
        (image,) = server.run(flow)["outputs"]["save"]["images"]
        return server.view(image).convert("RGB")

    sizes = [f"{width}x{height}" for width, height in FORMS]
    _thumbnail(
        COMPARISON,
        [drawn("rocket", 256, 256, compiled=False), drawn("rocket", 256, 256)],
        ["ComfyUI", "AnyShape, the same seed"],
    )
    _thumbnail(WARMED, [drawn("cactus", *form) for form in FORMS], sizes)
    _thumbnail(RUN.with_suffix(".jpg"), [drawn("octopus", *form) for form in FORMS], sizes)


def _thumbnail(path: Path, pictures: list[Image.Image], captions: list[str]) -> None:
    """The pictures beside one another, as large as they fit, each with its caption."""
    wide = THUMBNAIL[0] - SPACE * (len(pictures) + 1)
    scale = min(
        wide / sum(one.width for one in pictures),
        (THUMBNAIL[1] - CAPTION - SPACE) / max(one.height for one in pictures),
    )
    pictures = [
        one.resize((int(one.width * scale), int(one.height * scale)), Image.Resampling.LANCZOS) for one in pictures
    ]
    sheet, font = Image.new("RGB", THUMBNAIL, PAPER), ImageFont.load_default(18)
    pen, room = ImageDraw.Draw(sheet), (wide - sum(one.width for one in pictures)) // 2
    left = SPACE + room
    for one, caption in zip(pictures, captions, strict=True):
        top = (THUMBNAIL[1] - CAPTION - one.height) // 2
        sheet.paste(one, (left, top))
        pen.text((left + one.width // 2, top + one.height + 8), caption, fill=INK, font=font, anchor="mt")
        left += one.width + SPACE
    sheet.save(path, quality=QUALITY, optimize=True)
    print(path.relative_to(ROOT))


def nodes(canvas: Canvas, language: str) -> None:
    """A picture of each node: of the workflow that has just run, or else as it is when it is added."""
    canvas.resize(INFO, INFO_SIZE)
    ours = sorted(name for name, node in canvas.server.object_info().items() if node["category"] == "AnyShape")
    there = canvas.web.page.evaluate("() => app.graph.nodes.map((node) => node.type)")
    for kind in sorted(ours, key=lambda name: name not in there):
        if kind not in there:
            canvas.add(kind)
        path = ASSETS / f"{kind}.{language}.png"
        canvas.shot(canvas.bounds(kind), NODE_SCALE).quantize(64).save(path, optimize=True)
        print(path.relative_to(ROOT))


def main() -> int:
    """The exit code."""
    if not installed.find():
        print(installed.MISSING, file=sys.stderr)
        return 1
    os.environ.update(project_env())
    ASSETS.mkdir(exist_ok=True)
    with ComfyServer() as server:  # without a browser, whose loop would be in the way of the server's client
        thumbnails(server)
    for language in LANGUAGES:
        with ComfyServer() as server, chromium() as browser:  # a new one each: its figures are of one run
            canvas = Canvas(browser, server, language)
            canvas.run()
            nodes(canvas, language)
    return 0


if __name__ == "__main__":
    sys.exit(main())
