"""What the tests of the page share: a workflow with our nodes in it, what is looked for there, and made-up figures."""

from collections.abc import Callable
from typing import Any

from tools.api_format import inputs, node, text_to_image
from tools.comfy_server import ComfyServer
from tools.web_page import WebPage, patiently

PANEL = ".anyshape-panel"
EMPTY = "Nothing has run through a compile node yet."
SIZE = "136×120"  # image pixels; an odd latent
PLACES = {"1": (120, 160), "4": (120, 330), "2": (120, 600), "3": (420, 600), "5": (740, 160), "6": (1070, 160),
          "7": (1260, 160)}  # fmt: skip
# Notes what of ours moves on the page by itself, from here on.
SHIFTS = """() => {
    window.shifted = [];
    const fixed = '.anyshape-panel header *, .anyshape-badge, .anyshape-info';  // tables grow within what scrolls
    const ours = (node) => (node?.matches ? node : node?.parentElement)?.matches(fixed);
    const note = (list) => list.getEntries().forEach((entry) => entry.sources.forEach((source) => {
        if (ours(source.node)) shifted.push(source.node.className || source.node.textContent);
    }));
    new PerformanceObserver(note).observe({ type: 'layout-shift' });
}"""
# The front end's script for extensions, as if there were no sidebar.
OLDER = """
const real = window.comfyAPI.app.app;
const hidden = new Set(["extensionManager"]);
export const app = new Proxy(real, {
  get(target, name) {
    const value = hidden.has(name) ? undefined : target[name];
    return typeof value === "function" ? value.bind(target) : value;
  },
});
"""
# Of a video on a GPU, as the stats have them.
VIDEO = {
    "key": "x[1x16x31x144x128]", "width": 1024, "height": 1152, "batch": 1, "frames": 121, "state": "tape", "calls": 20,
    "replays": 0, "first_call_seconds": 2.5, "median_ms": 700.4, "eager_ms": 812.5, "bytes": 0, "reason": "",
    "note": "the GPU is the limit at this size (GPU 700 ms, host 60 ms): a graph would not help",
}  # fmt: skip
WAN = {
    "name": "WAN21", "kind": "model", "kernels": 41, "recompiles": 0, "compile_seconds": 3.0, "shapes": [VIDEO],
    "inexact": ["RMSNorm is rounded once: up to half of bf16's last bit"],
}  # fmt: skip


def flow() -> dict[str, dict[str, Any]]:
    """Text to image on the demo model, by ComfyUI's own nodes alone."""
    return text_to_image("1 2 4 5 6 7 3", (136, 120, 2), steps=3, cfg=2.0)


def compiled_flow(name: str, budget: int) -> dict[str, dict[str, Any]]:
    """``flow`` with a Compile Model node of this id and budget."""
    made = flow() | {name: node("AnyShapeCompileModel", model=["1", 0], mode="auto", graph_budget_mb=budget)}
    made["5"]["inputs"]["model"] = [name, 0]
    return made


class Built:
    """The page with our nodes in the workflow, and the ids of the nodes."""

    def __init__(self, page: WebPage, server: ComfyServer) -> None:
        self.page, self.server = page, server
        page.load_workflow(flow(), PLACES)
        self.model = page.add_node("Compile Model", 410, 160)
        self.vae = page.add_node("Compile VAE", 410, 400)
        self.info = page.add_node("Shape Cache Info", 1000, 500)
        links = [(1, 0, self.model), (1, 1, self.vae), (6, 0, self.info)]
        for source, output, target in links:
            page.connect(source, output, target, 0)
        page.connect(self.model, 0, 5, 0)
        page.connect(self.vae, 0, 6, 1)

    def panel(self) -> str:
        return self.page.page.locator(PANEL).inner_text()

    def stats(self) -> dict[str, Any]:
        return self.server.get("/anyshape/stats").json()

    def link(self, source: int, target: int) -> None:
        """The panel, where it is open, covers the loader: a mouse does not reach it."""
        connect = "([from, to]) => app.graph.getNodeById(from).connect(0, app.graph.getNodeById(to), 0)"
        self.page.page.evaluate(connect, [source, target])


def answering(address: str, **answer: Any) -> Callable[[Any], None]:
    """For a page whose requests to this address get this answer."""
    return lambda page: page.route(address, lambda route: route.fulfill(**answer))


def open_help(page: WebPage, one: int) -> None:
    """The help of a node. In a new language the front end makes its nodes again, and none is selected then."""
    info = page.page.locator("[data-testid=info-button]")
    patiently(lambda: page.select(one), lambda patience: info.click(timeout=patience))


def known_inputs(made: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """What the server reads of a node's inputs; the front end sends the text that Preview Any shows too."""
    return {name: made["inputs"][name] for name in inputs(known[made["class_type"]]) if name in made["inputs"]}


def _luminance(colour: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(page: Any, selector: str) -> float:
    """Of a text and what is painted behind it, by WCAG."""
    colours = page.evaluate(
        """(selector) => {
            const parse = (text) => text.match(/[\\d.]+/g).map(Number);
            let at = document.querySelector(selector);
            const front = parse(getComputedStyle(at).color);
            while (at && (parse(getComputedStyle(at).backgroundColor)[3] ?? 1) === 0) at = at.parentElement;
            return [front, parse(getComputedStyle(at).backgroundColor)].map((c) => c.slice(0, 3).map((v) => v / 255));
        }""",
        selector,
    )
    light, dark = sorted(map(_luminance, colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)
