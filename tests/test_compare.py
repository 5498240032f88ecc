"""Compare, the three scopes, what is being prepared, a prompt in a line: the real server and the real page.

Pictures of the page lie in .cache/screenshots afterwards.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tools.api_format import node, text_to_image
from tools.comfy_server import ComfyServer

pytest.importorskip("playwright", reason="the Python package playwright is not installed: make setup")

from tools.web_page import WebPage  # noqa: E402 - it imports playwright

PANEL = ".anyshape-panel"
OURS = {f"AnyShape{name}" for name in ("CompileModel", "CompileVAE", "WarmUp", "ShapeCacheInfo")}
COMPARE = f"{PANEL} .anyshape-compare"


def flow(seed: int = 11, width: int = 72, height: int = 64, steps: int = 4) -> dict[str, dict[str, Any]]:
    """Text to image through all kinds of our nodes, its picture saved. Its size is in no other test."""
    size, sampling = (width, height, 1), {"seed": seed, "steps": steps, "cfg": 2.0}
    return text_to_image("1 2 3 6 7 8", size, model=["10", 0], vae=["10", 1], saved="compared", **sampling) | {
        "4": node("AnyShapeCompileModel", model=["1", 0], mode="auto", graph_budget_mb=1024),
        "5": node("AnyShapeCompileVAE", vae=["1", 1], enabled=True),
        "10": node("AnyShapeWarmUp", model=["4", 0], shapes=f"{width}x{height}", vae=["5", 0]),
        "9": node("AnyShapeShapeCacheInfo", after=["7", 0]),
        "11": node("PreviewAny", source=["9", 0]),
    }


PLACES = {"1": (20, 160), "2": (20, 330), "3": (20, 600), "4": (420, 160), "5": (420, 420), "10": (740, 160),
          "6": (740, 560), "7": (1170, 160), "8": (1170, 260), "9": (1070, 460), "11": (420, 600),
          "12": (20, 460)}  # fmt: skip


@pytest.fixture(scope="module")
def page(opened_pages, server) -> WebPage:
    """One page for the file, with the panel open; each test opens a workflow of its own."""
    shown = opened_pages.page(server)
    shown.page.evaluate("() => { app.extensionManager.sidebarTab.activeSidebarTabId = 'anyshape' }")
    shown.page.locator(PANEL).wait_for()
    return shown


def opened(page: WebPage, workflow: dict[str, dict[str, Any]]) -> None:
    page.load_workflow(workflow, {id: place for id, place in PLACES.items() if id in workflow})


def short(seed: int, width: int, height: int) -> dict[str, dict[str, Any]]:
    """Without Warm Up, and in few steps: a run of one step is not prepared for."""
    changed = flow(seed, width, height, steps=2)
    del changed["10"]
    changed["6"]["inputs"]["model"], changed["7"]["inputs"]["vae"] = ["4", 0], ["5", 0]
    return changed


def history(server: ComfyServer) -> dict[str, Any]:
    return server.get("/history").json()


def await_text(page: WebPage, selector: str, part: str, timeout: float = 120) -> str:
    """The text of an element as soon as it has ``part``."""
    found = page.page.wait_for_function(
        "([selector, part]) => [...document.querySelectorAll(selector)].map((one) => one.textContent)"
        ".find((text) => text.includes(part))",
        arg=[selector, part],
        timeout=timeout * 1e3,
    )
    return found.json_value()


def running(server: ComfyServer) -> bool:
    return bool(server.get("/queue").json()["queue_running"])


def wait_until(found: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


# Compare ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(page, server) -> tuple[str, list[dict[str, Any]], Any, list[str]]:
    """(what the panel says, the four prompts of the history, the graph before and after, what the panel said)."""
    opened(page, flow())
    # but for the room that a picture takes in its node
    serialized = "() => app.graph.serialize().nodes.map(({ size, ...same }) => JSON.stringify(same))"
    known, before = history(server), page.page.evaluate(serialized)
    page.page.evaluate(
        "selector => { window.said = []; new MutationObserver(() => { const text ="
        " document.querySelector(selector).textContent; if (said.at(-1) !== text) said.push(text); })"
        ".observe(document.querySelector(selector), { childList: true, characterData: true, subtree: true }); }",
        COMPARE,
    )
    page.page.locator("[data-action=compare]").click()
    text = await_text(page, COMPARE, "Without AnyShape")
    ran = [entry for prompt_id, entry in history(server).items() if prompt_id not in known]
    page.shot("compare")
    return text, ran, (before, page.page.evaluate(serialized)), page.page.evaluate("() => window.said")


def test_compare_shows_both_times_and_the_difference(compared, server) -> None:
    text, ran, (before, after), said = compared
    assert len(ran) == 4 and before == after
    pictures = [np.asarray(server.view(entry["outputs"]["8"]["images"][0]).convert("RGB"), dtype=int) for entry in ran]
    levels = np.abs(pictures[1] - pictures[3]).max()
    assert f"Largest difference of the pictures: {levels} of 255 levels." in text and levels <= 3
    assert "First runs, with loading and preparing:" in text
    assert text.endswith("\nOn a CPU nothing is gained: the speed is for NVIDIA GPUs.\nThe two times differ by chance.")
    for step, way in enumerate(
        ("without AnyShape, first", "without AnyShape, m", "with AnyShape, f", "with AnyShape, m")
    ):
        assert any(f"run {step + 1} of 4: {way}" in line for line in said), (step, said)
    assert any("Your workflow stays as it is" in line for line in said)


def test_compare_runs_what_it_says(compared) -> None:
    """Without: no node of ours, but for the one that times. Both: nothing from the cache, nothing saved, one seed."""
    _, ran, _, _ = compared
    prompts = [entry["prompt"][2] for entry in ran]
    ours = [{n["class_type"]: n for n in prompt.values() if n["class_type"] in OURS} for prompt in prompts]
    assert ours[0]["AnyShapeCompileModel"]["inputs"]["mode"] == "time auto" and len(ours[0]) == 1
    assert ours[1] == {} and set(ours[2]) == set(ours[3]) == {"AnyShapeCompileModel", "AnyShapeCompileVAE"}
    assert prompts[1]["6"]["inputs"]["model"] == ["1", 0] and prompts[1]["7"]["inputs"]["vae"] == ["1", 1]
    assert prompts[3]["6"]["inputs"]["model"] == ["4", 0] and prompts[3]["7"]["inputs"]["vae"] == ["5", 0]
    for prompt, entry in zip(prompts, ran, strict=True):
        assert prompt["6"]["inputs"]["seed"] == 11 and prompt["8"]["class_type"] == "PreviewImage"
        assert not {"9", "10", "11"} & set(prompt)
        cached = [
            node for name, data in entry["status"]["messages"] if name == "execution_cached" for node in data["nodes"]
        ]
        assert not {"6", "7", "8"} & set(cached)
    loaded = [dict(entry["status"]["messages"])["execution_cached"]["nodes"] for entry in ran[1:]]
    assert all("1" in nodes for nodes in loaded)  # models stay where they are


def test_compare_tells_eagers_time_of_each_size(compared, server) -> None:
    (shape,) = [
        s for model in server.get("/anyshape/stats").json()["models"] if model["kind"] == "model"
        for s in model["shapes"] if (s["width"], s["height"]) == (72, 64)
    ]  # fmt: skip
    assert shape["eager_ms"] > 0 and shape["calls"] == 8  # of the two runs with AnyShape


def test_a_workflow_without_our_nodes_is_compared_with_them_put_in(page, server) -> None:
    """Here its files are no pictures, as of a node of another pack that shows its video under images: no time lost."""
    plain = {number: one for number, one in short(12, 80, 56).items() if number not in ("4", "5", "9", "11")}
    plain["6"]["inputs"]["model"], plain["7"]["inputs"]["vae"] = ["1", 0], ["1", 1]
    opened(page, plain)
    page.page.route("**/view?*", lambda route: route.fulfill(content_type="video/mp4", body=b"\0\0\0\x18ftypmp42"))
    known = history(server)
    page.page.locator("[data-action=compare]").click()
    text = await_text(page, COMPARE, "Without AnyShape")
    page.page.unroute("**/view?*")
    assert "Files that are not pictures and were not compared: 1." in text and "Largest difference" not in text
    prompts = [entry["prompt"][2] for prompt_id, entry in history(server).items() if prompt_id not in known]
    ours = [{one["class_type"] for one in prompt.values() if one["class_type"] in OURS} for prompt in prompts]
    assert ours[:2] == [set(), set()] and ours[2] == ours[3] == {"AnyShapeCompileModel", "AnyShapeCompileVAE"}


def filmed() -> dict[str, dict[str, Any]]:
    """Two frames, saved as an animation and as a video."""
    changed = short(18, 72, 56)
    changed["3"]["inputs"]["batch_size"] = 2
    del changed["9"], changed["11"]
    named, webp = {"filename_prefix": "compared"}, {"fps": 6.0, "lossless": True, "quality": 80, "method": "default"}
    changed["8"] = node("SaveAnimatedWEBP", images=["7", 0], **named, **webp)
    changed["9"] = node("CreateVideo", images=["7", 0], fps=8.0)
    return changed | {"11": node("SaveVideo", video=["9", 0], format="auto", codec="auto", **named)}


def saved(server: ComfyServer) -> set[str]:
    return {path.name for path in (server.base / "output").rglob("*") if path.is_file()}


def test_frames_of_videos_are_compared_and_not_saved(page, server) -> None:
    opened(page, filmed())
    known, before = history(server), saved(server)
    page.page.locator("[data-action=compare]").click()
    text = await_text(page, COMPARE, "Without AnyShape")
    assert "Largest difference of the pictures: " in text and saved(server) == before
    (last,) = [entry for prompt_id, entry in list(history(server).items())[-1:] if prompt_id not in known]
    assert {name: len(shown["images"]) for name, shown in last["outputs"].items()} == {"8 preview": 2, "11 preview": 2}
    assert page.errors == []


def only_ours(changed: dict[str, Any]) -> None:
    del changed["8"]


def refused(changed: dict[str, Any]) -> None:
    changed["12"] = node("LoadImage", image="a picture that is not there.png")
    changed["8"]["inputs"]["images"] = ["12", 0]


def failing(changed: dict[str, Any]) -> None:
    changed["12"] = node("AnyShapeTestFailing", images=["7", 0])
    changed["8"]["inputs"]["images"] = ["12", 0]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (only_ours, "Prompt has no outputs"), (refused, "LoadImage: "),
        (failing, "AnyShapeTestFailing: it fails on purpose"),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_compare_is_said(page, server, change, wanted) -> None:
    changed = flow(12)
    change(changed)
    opened(page, changed)
    page.page.locator("[data-action=compare]").click()
    assert await_text(page, COMPARE, wanted, 30).startswith("That did not work: ")
    assert page.page.locator("[data-action=compare]").is_enabled() and not running(server)
    page.page.keyboard.press("Escape")  # ComfyUI's own dialog


def test_compare_is_in_comfyuis_menu_and_ends_with_cancel(page, server) -> None:
    opened(page, flow(13, 1024, 1024))
    page.page.evaluate("() => { app.extensionManager.sidebarTab.activeSidebarTabId = null }")
    page.page.evaluate("() => { app.extensionManager.command.execute('AnyShape.Compare') }")
    await_text(page, COMPARE, "run 1 of 4")  # in the panel, which has opened
    assert page.page.evaluate(
        "() => app.extensionManager.command.commands.find((one) => one.id === 'AnyShape.Compare').label"
    ).startswith("Compare with and without")
    wait_until(lambda: running(server))

    def ended() -> bool:
        server.interrupt()  # again and again: ComfyUI forgets one that comes while a prompt begins
        return "That did not work" in page.page.locator(COMPARE).inner_text()

    wait_until(ended)
    assert "the comparison was cancelled" in page.page.locator(COMPARE).inner_text()
    queue = server.get("/queue").json()
    assert not queue["queue_running"] and not queue["queue_pending"]


# Scopes -----------------------------------------------------------------------------------------------------------


def sizes(page: WebPage, where: str) -> set[str]:
    rows = page.page.locator(f"{where} tbody tr td:first-child").all_inner_texts()
    return {text.replace("\u200b", "") for text in rows}


def test_tables_are_about_a_prompt_a_workflow_or_everything(page, server) -> None:
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()
    opened(page, short(14, 88, 64))
    page.run(server)
    opened(page, short(15, 104, 64))
    page.wait_for_line(4, "not run yet")
    await_text(page, ".anyshape-info", "Nothing of this has run.")
    page.run(server)
    page.set_widgets(3, {"width": 120})
    page.run(server)
    page.wait_for_line(4, "as ComfyUI: 120×64, on a CPU")
    info, panel = ".anyshape-info", PANEL
    await_text(page, f"{info} td", "120×64")
    assert sizes(page, info) == {"104×64", "120×64"}  # this workflow, from the start
    assert sizes(page, panel) == {"88×64", "104×64", "120×64"}  # everything
    page.page.locator(f"{panel} [data-scope=prompt]").click()
    assert sizes(page, panel) == {"120×64"}
    assert page.page.locator(f"{panel} [data-scope=prompt]").get_attribute("aria-pressed") == "true"
    page.page.locator(f"{panel} [data-scope=workflow]").click()
    assert sizes(page, panel) == {"104×64", "120×64"}
    page.page.locator(f"{panel} [data-scope=all]").click()
    assert page.errors == []
    page.shot("scopes")


# A prompt in a line -----------------------------------------------------------------------------------------------


def test_a_prompt_ends_with_a_line(compared, server) -> None:
    entry = compared[1][-1]
    prompt_id = entry["prompt"][1]
    told = wait_until(lambda: server.history(prompt_id).get("anyshape"), 20)
    stamps = dict(entry["status"]["messages"])
    seconds = (stamps["execution_success"]["timestamp"] - stamps["execution_start"]["timestamp"]) / 1e3
    assert told["seconds"] == pytest.approx(seconds, abs=0.01) and told["compiled"] == 0
    assert told["factor"] is None and told["text"].endswith(" s, 0 compiled")  # on a CPU nothing is gained
    assert f"AnyShape: prompt {prompt_id}: {told['text']}" in server.log()


# Preparing --------------------------------------------------------------------------------------------------------


def seconds(line: str) -> int:
    """Of "preparing 152×144… 12 s"."""
    return int(line.rsplit("… ", 1)[1].removesuffix(" s"))


def test_preparing_is_shown_with_a_clock_and_cancel_ends_it(page, server) -> None:
    """A size whose first forward takes long. What was broken off leaves nothing."""
    slow = short(17, 152, 144)
    slow["12"] = node("AnyShapeTestSlow", model=["1", 0], seconds=20.0)
    slow["4"]["inputs"]["model"] = ["12", 0]
    opened(page, slow)
    page.page.evaluate(
        "() => { window.told = []; app.api.addEventListener('progress_text', ({ detail }) => told.push(detail)); }"
    )
    page.page.keyboard.press("Control+Enter")
    height = page.size_of(4)[1]
    under = "() => app.graph.getNodeById(4).widgets.map((one) => one.name).filter((name) => name.includes('preview'))"
    first = seconds(page.wait_for_line(4, "preparing 152×144… ", begins=True))
    assert await_text(page, f"{PANEL} .anyshape-work", "preparing 152×144")
    row = page.page.locator(f"{PANEL} tr[data-level=preparing]")
    assert [row.locator("td").nth(i).inner_text() for i in (0, 2, 4)] == ["152×144", "preparing", "–"]
    page.page.wait_for_function("() => window.told.some((one) => one.text.startsWith('preparing 152x144: '))")
    assert seconds(page.badge(4)) > first  # its own clock
    assert len(page.page.evaluate(under)) == 1 and page.size_of(4)[1] > height
    assert {one["nodeId"] for one in page.page.evaluate("() => window.told")} == {"4"}
    page.shot("preparing")
    known = server.get("/anyshape/stats").json()["fallbacks"]
    cancelled = time.monotonic()
    server.interrupt()
    wait_until(lambda: not running(server))
    assert time.monotonic() - cancelled < 2
    page.wait_for_line(4, "the latest prompt was cancelled")
    assert page.page.evaluate(under) == [] and page.size_of(4)[1] == height
    page.page.wait_for_function("() => !document.querySelector('tr[data-level=preparing]')")
    assert "preparing" not in page.badge(4)
    now = server.get("/anyshape/stats").json()
    assert now["preparing"] == {} and now["fallbacks"] == known
    assert not [s for model in now["models"] for s in model["shapes"] if s["width"] == 152]
