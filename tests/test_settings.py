"""The pack's page in ComfyUI's settings, as a person uses it, and what it changes.

``test_older_comfyui`` runs what depends on the front end on the older one, too.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tools.api_format import node, text_to_image
from tools.comfy_server import ComfyServer

pytest.importorskip("playwright", reason="the Python package playwright is not installed: make setup")

from tools.opened_pages import OpenedPages  # noqa: E402 - it imports playwright
from tools.web_page import OURS, WebPage  # noqa: E402

PANEL = ".anyshape-panel"
SPLITTER = "warning: WARNING: Invalid layout total size"  # of a newer front end, for each tab of the sidebar
KEEPS_TEXTS = "() => Number(__COMFYUI_FRONTEND_VERSION__.split('.')[1]) < 48"  # of those that were tried
IDS = [f"AnyShape.{name}" for name in ("Automatic", "Exceptions", "GraphBudget", "SizesAtStart", "Language")]
DEFAULTS = dict(zip(IDS, (False, "", 2048, False, "ComfyUI"), strict=True))
NAMES = {
    "en": [
        "Accelerate every model in every workflow", "Except", "GPU memory for CUDA graphs, MB",
        "Warm up the sizes of the last session", "Language of lines, panel and reasons",
    ],
    "zh": [
        "加速所有工作流中的所有模型", "例外", "CUDA 图可用的显存（MB）", "预热上次会话的尺寸",
        "状态行、面板和原因的语言",
    ],
}  # fmt: skip


def flow() -> dict[str, dict[str, Any]]:
    """Text to image on the demo model, without a node of ours."""
    return text_to_image("1 2 3 4 5 6", (64, 72, 1))


PLACES = {"1": (120, 160), "2": (120, 330), "3": (120, 600), "4": (740, 160), "5": (1070, 160), "6": (1260, 160)}


@pytest.fixture(scope="module")
def chinese(opened_pages: OpenedPages, server: ComfyServer) -> Iterator[WebPage]:
    """A page that is Chinese from the start, with our settings as a new user's, which they are afterwards, too."""
    server.http.post(f"{server.url}/api/settings", json=DEFAULTS).raise_for_status()
    page = opened_pages.page(server, "zh")
    page.load_workflow(flow(), PLACES)
    yield page
    server.http.post(f"{server.url}/api/settings", json=DEFAULTS | {"Comfy.Locale": "en"}).raise_for_status()


@pytest.fixture(scope="module")
def shared(opened_pages: OpenedPages, server: ComfyServer) -> Iterator[WebPage]:
    """One English page for several tests: the front end takes three seconds to load."""
    yield opened_pages.page(server)
    server.http.post(f"{server.url}/api/settings", json=DEFAULTS).raise_for_status()


@pytest.fixture
def page(shared: WebPage) -> WebPage:
    """That page with the workflow, the panel closed and our settings as a new user's."""
    for name, value in DEFAULTS.items():
        shared.set(name, value)
    if shared.page.locator(PANEL).count():
        shared.page.locator(OURS).click()
        shared.page.locator(PANEL).wait_for(state="detached")
    shared.load_workflow(flow(), PLACES)
    return shared


def open_settings(page: WebPage) -> None:
    """The dialog, at our page."""
    page.page.keyboard.press("Control+,")
    page.page.locator("[role=dialog]").get_by_text("AnyShape", exact=True).first.click()
    field(page, IDS[0]).wait_for()


def field(page: WebPage, name: str) -> Any:
    return page.page.locator(f'[id="{name}"]').first


def wait_for_names(page: WebPage, wanted: list[str]) -> None:
    page.page.wait_for_function(
        "([ids, names]) => ids.every((id, i) => document.getElementById(`${id}-label`)?.innerText.trim() === names[i])",
        arg=[IDS, wanted],
    )


def stored(server: ComfyServer) -> dict[str, Any]:
    return {name: server.get("/settings").json().get(name) for name in IDS}


def test_every_model_is_accelerated_and_the_page_stays_calm(page, server) -> None:
    """By a click in the settings; the graph stays as it is, and no message of the page is about our nodes."""
    said: list[str] = []
    page.page.on("console", lambda one: said.append(f"{one.type}: {one.text}"))
    before = page.ids()
    page.run(server)
    open_settings(page)
    wait_for_names(page, NAMES["en"])
    page.shot(f"settings-{server.comfyui.name}")
    with page.page.expect_response(lambda answer: "/settings/AnyShape.Automatic" in answer.url):
        page.page.locator(f'[id="{IDS[0]}"]:is(button), [id="{IDS[0]}"] input').first.click(force=True)
    assert stored(server)[IDS[0]] is True
    page.page.keyboard.press("Escape")
    page.page.locator("[role=dialog]").first.wait_for(state="hidden")
    page.page.evaluate("() => { app.graph.getNodeById(4).widgets.find((one) => one.name === 'seed').value = 6; }")
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()
    said.clear()
    entry = page.run(server)
    assert {id for id in entry["prompt"][2] if id.startswith("anyshape-")} == {"anyshape-model-1-0", "anyshape-vae-1-1"}
    saved = entry["prompt"][3]["extra_pnginfo"]["workflow"]["nodes"]
    assert page.ids() == before and {str(one["id"]) for one in saved} == {str(id) for id in before}
    page.page.locator(OURS).click()
    page.page.locator(f"{PANEL} tr[data-state=tape]", has_text="64×72").first.wait_for()
    assert [one for one in said if not one.startswith(("log", "info", "debug", SPLITTER))] == []
    assert page.errors == [] and page.page.locator(".p-toast-message-error").count() == 0


def test_what_is_said_under_a_node_is_chinese(chinese, server) -> None:
    """The server's text is English; after the next prompt, which has it said again, too.

    In newer front ends it ends with the prompt; the line's tooltip has the same.
    """
    page, asked = chinese, flow() | {"9": node("AnyShapeWarmUp", model=["1", 0], shapes="80x88, no size")}
    asked["4"]["inputs"]["model"] = ["9", 0]
    page.load_workflow(asked, PLACES | {"9": (420, 400)})
    name, what = ("$$node-text-preview", "value") if page.page.evaluate(KEEPS_TEXTS) else ("anyshape", "element.title")
    read = f"app.graph.getNodeById(9).widgets.find((one) => one.name === '{name}')?.{what}"
    for seed in (1, 2):
        page.set_widgets(4, {"seed": seed})
        page.run(server)
        page.page.wait_for_function(f"() => {read}?.includes('请在“预热”之前连接“编译模型”：没有可预热的')")
    assert "line 1: 'no size' - write 1024x1152" in page.page.evaluate(f"() => {read}")  # what has no Chinese stays
    assert page.errors == []


def test_the_page_is_chinese_and_changes_with_the_language(chinese) -> None:
    """Without loading it again, as ComfyUI's own pages do."""
    for language in ("zh", "en"):
        chinese.set("Comfy.Locale", language)
        open_settings(chinese)
        wait_for_names(chinese, NAMES[language])
        chinese.page.keyboard.press("Escape")
        chinese.page.locator("[role=dialog]").first.wait_for(state="hidden")
    assert chinese.errors == []


def test_what_skip_blocks_gains_is_not_called_chance(page, server) -> None:
    """By *Compare*, on a CPU: a part of the work is left out."""
    asked = flow() | {"9": node("AnyShapeSkipBlocks", model=["1", 0], interval=3, preset="balanced")}
    asked["4"]["inputs"] |= {"model": ["9", 0], "steps": 9}  # of 8 and fewer nothing is skipped
    page.load_workflow(asked, PLACES | {"9": (420, 400)})
    page.page.locator(OURS).click()
    page.page.locator("[data-action=compare]").click()
    text = page.page.wait_for_function(
        "() => { const text = document.querySelector('.anyshape-compare').textContent;"
        " return text.includes('First runs') && text; }",
        timeout=120_000,
    ).json_value()
    assert text.startswith("Without AnyShape ") and "chance" not in text and "nothing is gained" not in text


def test_new_nodes_take_the_budget_and_saved_ones_keep_theirs(page) -> None:
    page.set(IDS[2], 512)
    budget = "id => app.graph.getNodeById(id).widgets.find((one) => one.name === 'graph_budget_mb').value"
    added = page.add_node("Accelerate", 410, 400)
    assert page.page.evaluate(budget, added) == 512
    page.set_widgets(added, {"graph_budget_mb": 64})
    page.page.evaluate("async () => { await app.loadGraphData(app.graph.serialize()); }")
    assert page.page.evaluate(budget, added) == 64


def test_the_language_of_what_we_say(page) -> None:
    """Of the panel and the lines; titles follow ComfyUI's. At once, and back again."""
    added = page.create_node("AnyShapeAccelerate", 410, 400)
    page.wait_for_line(added, "not run yet")
    page.page.locator(OURS).click()
    page.set(IDS[4], "zh")
    page.wait_for_line(added, "尚未运行")
    begun = {"file": "rockets", "sizes": 2}
    page.page.evaluate("detail => app.api.dispatchEvent(new CustomEvent('anyshape.ahead', { detail }))", begun)
    page.page.get_by_text("正在预热上次会话的 2 个尺寸（rockets）").first.wait_for()
    page.page.locator(PANEL, has_text="尺寸缓存").wait_for()
    assert page.page.evaluate("id => app.graph.getNodeById(id).title", added) == "Accelerate (AnyShape)"
    page.set(IDS[4], DEFAULTS[IDS[4]])
    page.wait_for_line(added, "not run yet")
    assert page.errors == []


def test_warm_up_these(page, server) -> None:
    """The panel's button, there if the workflow has a Warm Up: its list is what the panel shows, and runs."""
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()
    page.set(IDS[0], True)
    page.run(server)
    page.page.locator(OURS).click()
    page.page.locator(f"{PANEL} tr[data-state=tape]", has_text="64×72").first.wait_for()
    button = page.page.locator("[data-action=warm]")
    assert not button.is_visible()
    added = page.create_node("AnyShapeWarmUp", 410, 400)
    button.click()
    page.page.get_by_text("Written into Warm Up's list.").wait_for()
    listed = "id => app.graph.getNodeById(id).widgets.find((one) => one.name === 'shapes').value"
    assert page.page.evaluate(listed, added) == "64x72"
    page.set_widgets(added, {"shapes": "72x64"})
    page.set_widgets(3, {"width": 72})  # the latent
    page.run(server)  # at 72x72
    page.page.locator(f"{PANEL} [data-scope=prompt]").click()
    page.page.locator(f"{PANEL} tr", has_text="72×72").first.wait_for()
    button.click()
    assert page.page.evaluate(listed, added) == "72x72"  # no more than the panel shows
    page.page.locator(f"{PANEL} [data-scope=all]").click()  # as it was, for the files after this one
    assert page.errors == []
