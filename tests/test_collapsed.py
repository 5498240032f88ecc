"""A collapsed node, which has no room for its line: a strip in its title says how its model runs.

``test_older_comfyui`` runs this on the older front end, too. Pictures of the page lie in .cache/screenshots afterwards.
"""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tools.api_format import node, text_to_image

pytest.importorskip("playwright", reason="the Python package playwright is not installed: make setup")

from tools.web_page import WebPage, patiently  # noqa: E402 - it imports playwright

COLOURS = {"fast": (42, 157, 143), "partly": (76, 120, 168), "as_comfyui": (196, 78, 82)}  # of style.css
SHARES = {"fast": 1, "partly": 0.5, "as_comfyui": 0.25}  # of the title's length
PLACES = {"1": (120, 160), "2": (120, 330), "3": (120, 600), "4": (420, 160), "5": (420, 420), "6": (740, 160),
          "7": (1070, 160), "8": (1260, 160)}  # fmt: skip
MODEL = 4
BYPASSED = 4  # of a node's `mode`
PLACE = "id => { const n = app.graph.getNodeById(id); return [...n.pos, n.width]; }"
COLLAPSED = "id => app.graph.getNodeById(id).flags.collapsed === true"


@pytest.fixture(scope="module")
def page(opened_pages, server) -> WebPage:
    """One page for the file, its Compile Model collapsed by the keyboard."""
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()
    shown = opened_pages.page(server)
    flow = text_to_image("1 2 3 6 7 8", (64, 72, 1), model=["4", 0], vae=["5", 0])
    flow |= {
        "4": node("AnyShapeCompileModel", model=["1", 0], mode="auto", graph_budget_mb=1024),
        "5": node("AnyShapeCompileVAE", vae=["1", 1], enabled=True),
    }
    shown.load_workflow(flow, PLACES)

    def collapse() -> None:  # once the key did nothing, however often it was pressed: so the node is selected too
        if not shown.page.evaluate(COLLAPSED, MODEL):
            shown.select(MODEL)
            shown.page.keyboard.press("Alt+c")

    patiently(collapse, lambda patience: shown.page.wait_for_function(COLLAPSED, arg=MODEL, timeout=patience))
    return shown


def size(width: int, **more: Any) -> dict[str, Any]:
    return {
        "key": f"x {width}", "width": width, "height": 64, "batch": 1, "frames": 1, "step": "", "state": "graph",
        "calls": 3, "replays": 0, "first_call_seconds": 0.2, "median_ms": 10.0, "eager_ms": None, "factor": None,
        "saved_seconds": None, "bytes": 0, "reason": "", "note": "", "prompt": 1, "workflows": [],
    } | more  # fmt: skip


FAST, SLOW = size(64), size(72, state="eager", reason="a patch of another node")
SHAPES = {"fast": [FAST], "partly": [FAST, SLOW], "as_comfyui": [SLOW]}


def show(page: WebPage, shapes: list[dict[str, Any]]) -> None:
    """The page gets the figures of a GPU, as the server pushes them."""
    page.page.evaluate(
        """(shapes) => app.api.dispatchEvent(new CustomEvent('anyshape.stats', { detail: {
            version: 2, device: 'NVIDIA H200', torch: '2.11', fallbacks: [], skip: [], preparing: {}, reasons: [],
            graphs: { budget_bytes: 0, used_bytes: 0, evictions: 0 },
            nodes: [{ id: '4', workflow: (app.rootGraph ?? app.graph).id, type: 'AnyShapeCompileModel', state: 'ready',
                      message: '', models: ['SDXL'] }],
            models: [{ name: 'SDXL', kind: 'model', kernels: 0, recompiles: 0, compile_seconds: 0, inexact: [],
                       shapes }],
        } }))""",
        shapes,
    )
    page.drawn()


def painted(page: WebPage, colour: tuple[int, ...]) -> np.ndarray:
    """Where the collapsed title has this colour, [height, width] of bools, in pixels of the page."""

    def shot() -> tuple[float, bytes]:
        x, y, width = page.page.evaluate(PLACE, MODEL)
        left, bottom = page._on_page(x, y)
        return width, page.page.screenshot(clip={"x": left, "y": bottom - 30, "width": width, "height": 30})

    before, now = None, shot()
    while now != before:  # its title is measured when it is drawn
        before, now = now, shot()
    picture = np.asarray(Image.open(io.BytesIO(now[1])).convert("RGB"), dtype=int)
    return np.abs(picture - np.array(colour)).max(axis=-1) <= 3


@pytest.mark.parametrize("level", SHARES)
def test_a_collapsed_node_has_a_strip_in_the_colour_of_its_state(page, server, level) -> None:
    """The longer the more of the model is fast, for those who see no colours."""
    show(page, SHAPES[level])
    page.shot(f"collapsed-{level}-{server.comfyui.name}")
    found = painted(page, COLOURS[level])
    columns = found[-3:-1].all(axis=0)
    assert columns.sum() == pytest.approx((found.shape[1] - 20) * SHARES[level], abs=3)
    assert not found[:-5].any()  # the title is as it was
    for other in set(SHARES) - {level}:
        assert not painted(page, COLOURS[other]).any(), other


def test_a_bypassed_one_is_grey_and_an_open_one_has_its_line_alone(page) -> None:
    show(page, SHAPES["fast"])
    page.select(MODEL)
    page.page.keyboard.press("Control+b")
    page.wait_for_line(MODEL, "bypassed: as without this node")
    page.drawn()
    assert not painted(page, COLOURS["fast"]).any()
    page.page.keyboard.press("Control+b")
    page.wait_for_line(MODEL, "fast: 64×64")
    page.page.keyboard.press("Alt+c")
    page.page.wait_for_function("id => !app.graph.getNodeById(id).flags.collapsed", arg=MODEL)
    page.drawn()
    assert not painted(page, COLOURS["fast"]).any()
    page.page.keyboard.press("Alt+c")


STRIP = """id => {
    const node = document.querySelector(`.lg-node[data-node-id="${id}"]`), style = getComputedStyle(node, '::after');
    return [style.content, style.backgroundColor, parseFloat(style.width) / (node.clientWidth - 20)];
}"""


def test_nodes_2_0_have_the_same_strip(page, server) -> None:
    page.set("Comfy.VueNodes.Enabled", True)
    page.page.locator(".lg-node[data-node-id='4']").wait_for()
    page.page.locator(".lg-node .anyshape-badge").first.wait_for()  # the VAE's node is open
    for level, shapes in SHAPES.items():
        show(page, shapes)
        content, colour, share = page.page.evaluate(STRIP, MODEL)
        assert content == '""' and colour == "rgb({}, {}, {})".format(*COLOURS[level])
        assert share == pytest.approx(SHARES[level], abs=0.03)
    page.shot(f"collapsed-2.0-{server.comfyui.name}")
    assert page.page.evaluate(STRIP, 5)[0] == "none"
    page.set("Comfy.VueNodes.Enabled", False)


def test_nothing_of_it_is_saved(page) -> None:
    """And our scripts complain of nothing."""
    saved = page.page.evaluate("() => app.graph.serialize().nodes.find((one) => one.id === 4)")
    assert saved["flags"]["collapsed"] is True and not {"boxcolor", "color", "bgcolor"} & set(saved)
    assert page.errors == []
