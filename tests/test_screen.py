"""What the screen says: the language, and nodes that are bypassed or muted.

``test_older_comfyui`` runs what depends on the front end on the older one, too. Pictures of the page lie in
.cache/screenshots afterwards.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tools.api_format import node, text_to_image
from tools.comfy_server import ComfyServer
from tools.paths import ROOT

pytest.importorskip("playwright", reason="the Python package playwright is not installed: make setup")

from tools.opened_pages import OpenedPages  # noqa: E402 - it imports playwright
from tools.page_session import PANEL, answering, open_help  # noqa: E402
from tools.web_page import OURS, SCREENSHOTS, SEARCH, WebPage  # noqa: E402

MUTED, BYPASSED = 2, 4  # of a node's `mode`, in every front end


def flow() -> dict[str, dict[str, Any]]:
    """Text to image on the demo model, through three of our nodes."""
    return text_to_image("1 2 3 6 7 8", (64, 72, 1), model=["4", 0], vae=["5", 0]) | {
        "4": node("AnyShapeCompileModel", model=["1", 0], mode="auto", graph_budget_mb=1024),
        "5": node("AnyShapeCompileVAE", vae=["1", 1], enabled=True),
        "9": node("AnyShapeShapeCacheInfo"),
    }


PLACES = {"1": (120, 160), "2": (120, 330), "3": (120, 600), "4": (420, 160), "5": (420, 420), "6": (740, 160),
          "7": (1070, 160), "8": (1260, 160), "9": (740, 560)}  # fmt: skip


@pytest.fixture(scope="module")
def english(opened_pages: OpenedPages, server: ComfyServer) -> WebPage:
    """One page for several tests: the front end takes three seconds to load."""
    return opened_pages.page(server)


@pytest.fixture
def page(english: WebPage) -> WebPage:
    """The same page with the workflow as it was."""
    english.load_workflow(flow(), PLACES)
    return english


@pytest.fixture(scope="module")
def finds(english: WebPage) -> Callable[[str, str], None]:
    """The search box lists the title for a text, having listed it no more for letters that nobody types."""

    def search(text: str, title: str) -> None:
        field = english.page.locator(f"{SEARCH} input").first
        if not field.count():
            english.search(text, title, 1000, 500)
        listed = english.page.locator(f"{SEARCH} [role=option]", has_text=title).first
        field.fill("¤¤¤¤")
        listed.wait_for(state="hidden")
        field.fill(text)
        listed.wait_for()

    return search


@pytest.fixture(scope="module")
def chinese(opened_pages: OpenedPages, server: ComfyServer) -> WebPage:
    """A page that is Chinese from the start."""
    shown = opened_pages.page(server, "zh")
    shown.load_workflow(flow(), PLACES)
    wait_for_title(shown, 4, CHINESE["title"])
    return shown


def pixels(server: ComfyServer, entry: dict[str, Any]) -> np.ndarray:
    (image,) = entry["outputs"]["8"]["images"]
    return np.asarray(server.view(image).convert("RGB"))


def ended(server: ComfyServer, prompt_id: str) -> dict[str, Any]:
    """The history's entry; the browser's driver has this thread's event loop, so nothing can be followed in it."""
    deadline = time.monotonic() + 120
    while not server.get(f"/history/{prompt_id}").json():
        assert time.monotonic() < deadline, "the prompt did not end"
        time.sleep(0.05)
    return server.history(prompt_id)


def calls(server: ComfyServer) -> int:
    return sum(s["calls"] for model in server.get("/anyshape/stats").json()["models"] for s in model["shapes"])


# Language ---------------------------------------------------------------------------------------------------------

SHOWN = """id => {
    const node = app.graph.getNodeById(id), names = (list) => list.map((one) => one.label ?? one.localized_name);
    return { title: node.title, inputs: names(node.inputs), outputs: names(node.outputs),
             widgets: names(node.widgets.filter((one) => one.name !== 'anyshape')) };
}"""
CHINESE = {
    "title": "编译模型（AnyShape）",
    "inputs": ["模型", "模式", "CUDA 图显存上限（MB）", "核对"],
    "outputs": ["模型"],
    "widgets": ["模式", "CUDA 图显存上限（MB）", "核对"],
}
ENGLISH = {
    "title": "Compile Model (AnyShape)",
    "inputs": ["model", "mode", "graph_budget_mb", "verify"],
    "outputs": ["MODEL"],
    "widgets": ["mode", "graph_budget_mb", "verify"],
}
HOVERED = ".node-tooltip"


def tooltip_of_title(page: WebPage, node_id: int) -> str:
    """As the mouse finds it."""
    place = page.page.evaluate("id => [...app.graph.getNodeById(id).pos]", node_id)
    page.page.mouse.move(*page._on_page(place[0] + 60, place[1] - 15), steps=3)
    page.page.locator(HOVERED).wait_for()
    return page.page.locator(HOVERED).inner_text()


def wait_for_title(page: WebPage, node_id: int, title: str) -> None:
    page.page.wait_for_function("([id, title]) => app.graph.getNodeById(id)?.title === title", arg=[node_id, title])


def test_nodes_are_chinese_and_change_with_the_setting(chinese, server) -> None:
    page = chinese
    assert page.page.evaluate(SHOWN, 4) == CHINESE
    assert page.page.evaluate(SHOWN, 9)["outputs"] == ["报告", "统计", "图表"]
    assert tooltip_of_title(page, 4).startswith("加快任意模型（图像或视频）的采样")
    assert page.page.locator(OURS).get_attribute("aria-label") == "尺寸缓存"
    page.shot(f"chinese-{server.comfyui.name}")
    page.set("Comfy.Locale", "en")
    wait_for_title(page, 4, ENGLISH["title"])
    assert page.page.evaluate(SHOWN, 4) == ENGLISH
    page.page.locator(f"{OURS}[aria-label='Shape cache']").wait_for()
    page.set("Comfy.Locale", "zh")
    wait_for_title(page, 4, CHINESE["title"])
    assert page.page.evaluate(SHOWN, 4) == CHINESE
    page.page.locator(f"{OURS}[aria-label='尺寸缓存']").wait_for()
    assert page.errors == []


def test_what_the_user_named_keeps_its_name(chinese) -> None:
    page = chinese
    page.page.evaluate(
        "async () => { const node = app.graph.getNodeById(4); node.title = 'Mine'; node.inputs[0].label = 'base';"
        " await app.loadGraphData(app.graph.serialize()); }"
    )
    shown = page.page.evaluate(SHOWN, 4)
    assert (shown["title"], shown["inputs"][:2]) == ("Mine", ["base", "模式"])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_help_pages_show_their_picture(request, language) -> None:
    """On a page of that language from the start: the front end fetches a page once, in the language of that moment."""
    page = request.getfixturevalue({"en": "page", "zh": "chinese"}[language])
    missing = []
    page.page.on("response", lambda answer: missing.append(answer.url) if answer.status == 404 else None)
    page.load_workflow({"1": node("AnyShapeCompileVAE", enabled=True)}, {"1": (500, 300)})
    texts = json.loads((ROOT / f"locales/{language}/nodeDefs.json").read_text(encoding="utf-8"))
    wait_for_title(page, 1, texts["AnyShapeCompileVAE"]["display_name"])
    open_help(page, 1)
    heading = {"en": "When to use it", "zh": "适合的情况"}[language]
    page.page.locator(".node-help-content").get_by_role("heading", name=heading, exact=True).wait_for()
    page.page.wait_for_function("() => document.querySelector('.node-help-content img').naturalWidth > 100")
    source = page.page.locator(".node-help-content img").get_attribute("src")
    assert source.endswith(f"/extensions/AnyShape/docs/assets/AnyShapeCompileVAE.{language}.png")
    page.shot(f"help-{language}")
    assert [url for url in missing if "/docs/" in url] == []


# Search -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "title"),
    [
        ("faster", "Compile Model (AnyShape)"), ("torch compile", "Compile Model"), ("cuda graph", "Compile Model"),
        ("teacache", "Skip Blocks (DeepCache)"), ("speed up vae", "Compile VAE"), ("预热", "Warm Up"),
    ],
)  # fmt: skip
def test_what_people_type_finds_the_nodes(finds, server, typed, title) -> None:
    if "search_aliases" not in server.get("/object_info/KSampler").json()["KSampler"]:
        pytest.skip("this ComfyUI searches titles alone")
    finds(typed, title)


@pytest.mark.parametrize(
    ("typed", "title"),
    [("compile model", "Compile Model"), ("warm up", "Warm Up"), ("deepcache", "Skip Blocks (DeepCache)")],
)
def test_titles_are_found(finds, typed, title) -> None:
    finds(typed, title)


# Bypassed and muted -----------------------------------------------------------------------------------------------


def press_on(page: WebPage, node_id: int, key: str, mode: int) -> None:
    """Selects a node and presses a key, as a person does, until the node is in that mode."""
    page.select(node_id)
    page.page.keyboard.press(key)
    page.page.wait_for_function("([id, mode]) => app.graph.getNodeById(id).mode === mode", arg=[node_id, mode])


def test_a_bypassed_node_gives_comfyuis_own_picture(page, server) -> None:
    plain = flow()
    plain["6"]["inputs"]["model"], plain["7"]["inputs"]["vae"] = ["1", 0], ["1", 1]
    wanted = pixels(server, ended(server, server.queue(plain)))
    for node_id in (4, 5):
        press_on(page, node_id, "Control+b", BYPASSED)
        page.wait_for_line(node_id, "bypassed: as without this node")
    before = calls(server)
    entry = page.run(server)
    assert entry["status"]["status_str"] == "success" and calls(server) == before
    assert np.array_equal(pixels(server, entry), wanted)
    press_on(page, 4, "Control+b", 0)
    page.run(server)
    page.wait_for_line(4, "as ComfyUI: 64×72, on a CPU")
    press_on(page, 4, "Control+b", BYPASSED)
    page.wait_for_line(4, "bypassed: as without this node")  # whatever ran before
    assert page.errors == []


def test_a_muted_node_leaves_the_sampler_without_a_model(page, server) -> None:
    """Which is why README and help pages say: bypass. ComfyUI names the sampler's input."""
    press_on(page, 4, "Control+m", MUTED)
    page.wait_for_line(4, "muted: nothing comes through. Bypass it instead (Ctrl+B)")
    with page.page.expect_response(lambda answer: answer.url.endswith("/prompt")) as posted:
        page.page.keyboard.press("Control+Enter")
    errors = posted.value.json()["node_errors"]["6"]["errors"]
    assert [(error["message"], error["details"]) for error in errors] == [("Required input is missing", "model")]


# The panel on a small screen --------------------------------------------------------------------------------------


def size(width: int, **more: Any) -> dict[str, Any]:
    return {
        "key": f"x {width}", "width": width, "height": 1152, "batch": 1, "frames": 1, "state": "graph", "calls": 1220,
        "replays": 0, "first_call_seconds": 0.25, "median_ms": 104.3, "eager_ms": 150.0, "factor": 1.438,
        "saved_seconds": 55.75, "bytes": 130 << 20, "reason": "", "note": "", "prompt": 1, "workflows": [],
    } | more  # fmt: skip


COMPILER = "no C++ compiler was found: install g++, or the build tools of your system, and start ComfyUI again"
SIZES = [
    size(1024, first_call_seconds=37.7),
    size(896, reason=COMPILER),
    size(1152, reason=COMPILER, state="tape", median_ms=1204.0, eager_ms=1000.0, factor=0.831, saved_seconds=-249.0),
    size(1216, reason="a patch of another node", state="eager", eager_ms=None, factor=None, saved_seconds=None),
]
FIGURES = {
    "version": 2, "torch": "2.11", "device": "NVIDIA H200", "graphs": {"budget_bytes": 1 << 31, "used_bytes": 1 << 30,
    "evictions": 0}, "fallbacks": [{"where": "SDXL", "reason": COMPILER, "count": 2}], "skip": [
        {"model": "SDXL", "depth": 2, "full": 10, "skipped": 20, "resets": {}, "seconds": 1.0, "bytes": 1},
    ] * 3,
    "nodes": [{"id": "4", "workflow": "", "type": "AnyShapeCompileModel", "state": "ready", "message": "", "models":
               ["SDXL"], "file": "sd_xl_base_1.0_with_a_long_name"}],
    "models": [{"name": "SDXL", "kind": "model", "kernels": 9, "recompiles": 0, "compile_seconds": 38.2, "inexact": [],
                "shapes": SIZES}],
}  # fmt: skip
HIDDEN = """() => {
    const panel = document.querySelector('.anyshape-panel'), box = panel.getBoundingClientRect(), cut = [];
    const shown = [...panel.querySelectorAll('h2, p, caption, th, td, li, button')].filter((one) => one.offsetParent);
    for (const one of shown) {
        const rect = one.getBoundingClientRect();
        if (rect.left < box.left - 1 || rect.right > box.right + 1 || one.scrollWidth > one.clientWidth + 1) {
            cut.push(`${one.tagName} ${one.textContent}`);
        }
    }
    return cut;
}"""
CROSSED = """() => [...document.querySelectorAll('.anyshape-panel .anyshape-bar')].filter((cell) => {
    if (!cell.offsetParent) return false;
    const text = document.createRange();
    text.selectNodeContents(cell);
    return text.getBoundingClientRect().bottom > cell.getBoundingClientRect().bottom - 4;
}).length"""


LINES = """() => [...document.querySelectorAll('.anyshape-panel td:nth-child(3)')].map((cell) => {
    const text = document.createRange();
    text.selectNodeContents(cell);
    return new Set([...text.getClientRects()].map((line) => line.top)).size;
})"""


def test_nothing_that_matters_is_hidden_on_a_small_screen(page, server) -> None:
    """At 1000x600, with the figures of a GPU in the place of the server's: the last test on its page."""
    answering("**/api/anyshape/stats", json=FIGURES)(page.page)
    page.page.evaluate(  # the entry is of this workflow, whose id only the page knows
        "(figures) => { figures.nodes[0].workflow = (app.rootGraph ?? app.graph).id;"
        " app.api.dispatchEvent(new CustomEvent('anyshape.stats', { detail: figures })); }",
        FIGURES,
    )
    page.page.set_viewport_size({"width": 1000, "height": 600})
    page.page.locator(OURS).click()
    page.page.locator(f"{PANEL} tr[data-level=fast]").wait_for()
    page.page.wait_for_timeout(500)
    page.page.screenshot(path=SCREENSHOTS / f"small-{server.comfyui.name}.png")
    assert page.page.evaluate(HIDDEN) == []
    narrow = page.page.locator(PANEL).bounding_box()["width"] < 280  # as the older front end's is
    assert max(page.page.evaluate(LINES)) <= (2 if narrow else 1)
    head = page.page.locator(f"{PANEL} th")
    assert head.nth(4).text_content() == "first, s" and head.nth(5).text_content() == "ms"
    assert [head.nth(i).is_visible() for i in (0, 2, 5)] == [True] * 3
    rows = page.page.locator(f"{PANEL} tbody tr")
    assert [rows.nth(i).locator("td").nth(2).inner_text() for i in range(4)] == [
        "fast", "partly fast", "partly fast", "as ComfyUI"
    ]  # fmt: skip
    assert rows.nth(1).locator("td").nth(2).get_attribute("title") == "graph: one CUDA graph"
    shown = page.page.locator(PANEL).inner_text()
    assert shown.count(COMPILER) == 1 and f"896×1152, 1152×1152: {COMPILER}" in shown
    assert "sd_xl_base_1.0_with_a_long_name (SDXL): 4 sizes" in shown and "depth 2 × 3" in shown
    assert page.page.evaluate(CROSSED) == 0
    tops = page.page.evaluate(
        "() => new Set([...document.querySelectorAll('.anyshape-button')].map((b) => b.offsetTop)).size"
    )
    assert tops <= 2
    gained = "0.92x, 2 min lost so far"  # red, as the size is that is slower
    page.wait_for_line(4, f"{gained}, partly fast: 1 of 4 sizes, no C++ compiler was found", begins=True)
    assert page.page.locator(".anyshape-gain").inner_text() == gained
    assert [rows.nth(i).locator("td").nth(6).inner_text() for i in range(4)] == ["1.4x", "1.4x", "0.8x", "–"]
    for red in (".anyshape-gain", ".anyshape-badge", ".anyshape-table tr:nth-child(3) td:nth-child(7)"):
        assert page.page.locator(f"{red}.anyshape-loss").count() == 1, red
    assert page.page.locator(".anyshape-table td.anyshape-loss").count() == 1
    page.set("Comfy.Locale", "zh")
    page.page.locator(PANEL, has_text="尺寸缓存").wait_for()
    assert page.page.evaluate(HIDDEN) == []
    assert max(page.page.evaluate(LINES)) <= (3 if narrow else 2)  # its words are longer
    assert page.errors == []
