"""How much faster, on the page: behind Skip Blocks, which gains on a CPU too; a real run in a real browser."""

import re

import pytest

from tools.api_format import node, text_to_image

pytest.importorskip("playwright", reason="the Python package playwright is not installed: make setup")

from tools.web_page import OURS, WebPage  # noqa: E402 - it imports playwright

PANEL = ".anyshape-panel"
PLACES = {"1": (120, 160), "2": (120, 330), "3": (120, 600), "4": (420, 160), "9": (420, 420), "10": (740, 160),
          "6": (1070, 160), "7": (1260, 500), "8": (1260, 600)}  # fmt: skip
SKIPPING = {"interval": 3, "depth": "auto", "start_percent": 0.0, "end_percent": 1.0, "forecast": "order1"}
GAIN = r"\d+\.\d+x, [\d.]+ (s|min) (saved|lost so far)"


@pytest.fixture(scope="module")
def page(opened_pages, server) -> WebPage:
    """One page, after one prompt whose size Warm Up has measured on ComfyUI's own forwards."""
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()
    shown = opened_pages.page(server)
    flow = text_to_image("1 2 3 6 7 8", (168, 136, 1), model=["10", 0], vae=["1", 1], steps=12, cfg=2.0)
    flow |= {
        "4": node("AnyShapeCompileModel", model=["1", 0], mode="auto", graph_budget_mb=1024),
        "9": node("AnyShapeSkipBlocks", model=["4", 0], **SKIPPING),
        "10": node("AnyShapeWarmUp", model=["9", 0], shapes="168x136", measure=True),
    }
    shown.load_workflow(flow, PLACES)
    shown.set_widgets(10, {"measure": True})
    shown.page.locator(OURS).click()
    shown.run(server)
    return shown


def title(page: WebPage, node_id: int) -> str:
    return page.page.evaluate(
        "id => app.graph.getNodeById(id).widgets.find((w) => w.name === 'anyshape').element.title", node_id
    )


def settled(page: WebPage, node_id: int, begins: str) -> str:
    """The node's line, as soon as it is of this form."""
    read = "(id) => app.graph.getNodeById(id).widgets.find((w) => w.name === 'anyshape').element.textContent"
    matches = f"([id, form]) => {{ const line = ({read})(id); return new RegExp(form).test(line) && line; }}"
    return page.page.wait_for_function(matches, arg=[node_id, begins], timeout=30_000).json_value()


def test_lines_and_the_first_line_of_the_panel_say_it(page, server) -> None:
    assert re.fullmatch(rf"{GAIN}, 4 full, 8 skipped, depth \d", settled(page, 9, f"^{GAIN}, 4 full, 8 "))
    assert re.search(r"Full steps alone: \d+\.\d+x\. Skipped steps are compared with full steps too", title(page, 9))
    page.wait_for_line(4, "as ComfyUI: 168×136, on a CPU")  # on a CPU Compile Model gains nothing of it
    assert "Full steps" not in title(page, 4) and "On a CPU nothing is gained" in title(page, 4)
    first = page.page.locator(f"{PANEL} .anyshape-gain")
    assert re.fullmatch(GAIN, first.inner_text()) and "Full steps alone" in first.get_attribute("title")
    told = server.get("/anyshape/stats").json()["gain"]
    assert told["factor"] > told["full_steps"] > 0  # a skipped step takes less than a full one
    assert "Skipped steps are compared with full ones of ComfyUI's" in server.get("/anyshape/stats", format="text").text
    page.shot("gain-skipping")


def test_each_factor_says_what_it_compares(page) -> None:
    def helps(kind: str) -> str:
        row = page.page.locator(f"{PANEL} tbody tr", has=page.page.locator("td:nth-child(3)", has_text=f"({kind})"))
        assert re.fullmatch(r"\d+\.\d+x", row.locator("td").nth(6).inner_text())
        return row.locator("td").nth(6).get_attribute("title")

    assert helps("full") == "A full step compared with a full step of ComfyUI's: the same work"
    assert "work that is left out" in helps("skipped")
    page.set("Comfy.Locale", "zh")
    page.page.locator(PANEL, has_text="尺寸缓存").wait_for()
    settled(page, 9, r"^\d+\.\d+x，(节省|目前多用) .*完整 4 次，跳过 8 次")
    assert "只看完整步" in title(page, 9)
    page.set("Comfy.Locale", "en")
    assert page.errors == []
