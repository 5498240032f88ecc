"""What users see and touch: the real front end in a real browser, before the real server, on the demo model.

Pictures of the page lie in .cache/screenshots afterwards.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tools.api_format import node, to_api
from tools.paths import ROOT

pytest.importorskip("playwright", reason="the Python package playwright is not installed: make setup")

from tools import page_session  # noqa: E402 - it imports playwright
from tools.page_session import EMPTY, PANEL, PLACES, SIZE, VIDEO, WAN, Built, flow  # noqa: E402
from tools.web_page import OURS, WebPage, shows  # noqa: E402

STATS = "**/api/anyshape/stats"


@pytest.fixture(scope="module")
def built(opened_pages, server) -> Built:
    """One page for all: the tests follow one another as a person's session does."""
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()
    return Built(opened_pages.page(server), server)


def test_nodes_say_that_they_have_not_run(built) -> None:
    assert built.page.badge(built.model) == built.page.badge(built.vae) == "not run yet"


def test_the_panel_opens_by_keyboard(built) -> None:
    page = built.page.page
    page.locator(OURS).focus()
    page.keyboard.press("Enter")
    page.locator(PANEL).wait_for()
    shows(built.page.page.locator(PANEL), EMPTY)
    shows(page.locator(f"{PANEL} .anyshape-gain"), "On a CPU nothing is gained")
    page.locator(f"{PANEL} button").first.focus()
    reached = []
    for _ in range(3):
        reached.append(page.evaluate("() => document.activeElement.dataset.action"))
        page.keyboard.press("Tab")
    assert reached == ["clear", "free", "copy"]


def test_a_run_is_shown_without_a_reload(built) -> None:
    page, moved = built.page, "() => [...document.querySelectorAll('.anyshape-buttons')].map((b) => b.offsetTop)"
    sizes, tops = [page.size_of(one) for one in (built.model, built.vae, built.info)], page.page.evaluate(moved)
    page.page.evaluate(page_session.SHIFTS)
    page.run(built.server)
    page.wait_for_line(built.model, f"as ComfyUI: {SIZE} ×2, on a CPU")
    page.wait_for_line(built.vae, f"as ComfyUI: {SIZE} ×2, on a CPU")
    (unet,) = [model for model in built.stats()["models"] if model["kind"] == "model" and model["shapes"]]
    row = page.page.locator(f"{PANEL} tr[data-state=tape]", has_text=SIZE).nth(0)
    row.wait_for()
    page.page.wait_for_function(
        "([panel, calls]) => [...document.querySelectorAll(panel + ' tr[data-state]')]"
        ".some((row) => row.cells[3].textContent === calls)",
        arg=[PANEL, str(unet["shapes"][0]["calls"])],
    )
    shows(page.page.locator(".anyshape-info"), SIZE)
    assert [page.size_of(one) for one in (built.model, built.vae, built.info)] == sizes
    assert page.page.evaluate(moved) == tops
    assert page.page.evaluate("() => window.shifted") == []


def test_updates_are_pushed_not_polled(built) -> None:
    """Runs at other sizes make at most two events a second and no request for the stats."""
    page = built.page.page
    page.evaluate(
        "() => { window.seen = []; app.api.addEventListener('anyshape.stats', () => seen.push(performance.now())); }"
    )
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for width, height, batch in ((200, 264, 1), (256, 192, 1)):
        built.page.set_widgets(4, {"width": width, "height": height, "batch_size": batch})
        built.page.run(built.server)
    built.page.wait_for_line(built.model, "as ComfyUI: 256×192, on a CPU")  # of the latest prompt alone
    page.wait_for_timeout(600)  # the server looks every half second
    times = page.evaluate("() => window.seen")
    assert times and (len(times) - 2) * 500 <= times[-1] - times[0]  # a busy page takes one late, and the next in time
    assert not [url for url in asked if "anyshape" in url]
    built.page.shot("panel")


def test_switching_the_vae_off(built) -> None:
    before = sum(s["calls"] for model in built.stats()["models"] if model["kind"] == "vae" for s in model["shapes"])
    built.page.click_widget(built.vae, "enabled")
    built.page.run(built.server)
    built.page.wait_for_line(built.vae, "off: as without this node")
    after = sum(s["calls"] for model in built.stats()["models"] if model["kind"] == "vae" for s in model["shapes"])
    assert after == before > 0
    built.page.click_widget(built.vae, "enabled")


def test_a_step_down_is_shown_with_its_reason(built) -> None:
    """A layer that keeps something from call to call: the panel says what ran instead, and why."""
    counting = built.page.create_node("AnyShapeTestCountingLayer", 740, 540)
    built.link(1, counting)
    built.link(counting, built.model)
    built.page.run(built.server)
    stats = built.stats()
    shorts = {told["text"]: told["said"][0]["short"] for told in stats["reasons"]}
    reasons = {step["reason"] for step in stats["fallbacks"]}
    assert any("keeps state" in shorts[reason] for reason in reasons)
    # whose code it is; ComfyUI names a pack's module by the path of its folder, which is nobody else's business
    assert any("time_embed.forward of other_pack" in reason for reason in reasons)
    assert "custom_nodes" not in json.dumps(stats)
    for reason in reasons:  # in few words, once; all of it where the mouse rests
        shows(built.page.page.locator(PANEL), shorts[reason])
        assert built.panel().count(shorts[reason]) == 1
        assert built.page.page.locator(f'{PANEL} li[title="{reason}"]', has_text=shorts[reason]).count() == 1
    built.link(1, built.model)
    built.page.run(built.server)


def test_the_report_is_copied(built) -> None:
    page = built.page.page
    page.locator("[data-action=copy]").click()
    page.get_by_text("The report is in the clipboard.").wait_for()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == built.server.get("/anyshape/stats", format="text").text and "136x120" in copied


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_are_readable(built, theme) -> None:
    built.page.set("Comfy.ColorPalette", theme)
    built.page.page.wait_for_timeout(300)
    for selector in (f"{PANEL} h2", f"{PANEL} tr[data-state] td", ".anyshape-badge", ".anyshape-button"):
        assert page_session.contrast(built.page.page, selector) > 4.5, selector
    built.page.shot(theme)


def test_chinese_and_back(built) -> None:
    page = built.page.page
    built.page.set("Comfy.Locale", "zh")
    page.locator(PANEL, has_text="尺寸缓存").wait_for()
    (model,) = page.evaluate("() => app.graph.nodes.filter((n) => n.type === 'AnyShapeCompileModel').map((n) => n.id)")
    built.page.wait_for_line(model, "与 ComfyUI 相同：256×192，在 CPU 上")
    shows(page.locator(".anyshape-info"), SIZE)
    shows(page.locator(PANEL), "清空")
    assert EMPTY not in built.panel()
    built.page.shot("chinese")
    built.page.set("Comfy.Locale", "en")
    page.locator(PANEL, has_text="Shape cache").wait_for()


def test_nodes_2_0(built) -> None:
    """The frontend's other kind of nodes, made of elements instead of a canvas."""
    built.page.set("Comfy.VueNodes.Enabled", True)
    shown = built.page.page.locator(".lg-node .anyshape-badge", has_text="as ComfyUI")
    shown.first.wait_for()
    shows(built.page.page.locator(".lg-node .anyshape-info"), SIZE)
    built.page.shot("nodes-2.0")
    built.page.set("Comfy.VueNodes.Enabled", False)


def test_clearing_by_the_keyboard(built) -> None:
    built.page.page.locator("[data-action=clear]").focus()
    built.page.page.keyboard.press("Enter")
    built.page.page.get_by_text("Cleared.").wait_for()
    shows(built.page.page.locator(PANEL), EMPTY)
    assert not [model for model in built.stats()["models"] if model["shapes"]]


def test_nothing_is_saved_or_sent_of_it(built) -> None:
    """A workflow saved with the pack opens without it, and ComfyUI's cache does not see the badges."""
    saved, sent = built.page.page.evaluate("async () => [app.graph.serialize(), (await app.graphToPrompt()).output]")
    (ours,) = [one for one in saved["nodes"] if one["type"] == "AnyShapeCompileModel"]
    assert ours["widgets_values"] == ["auto", 2048, True]
    assert "anyshape" not in sent[str(ours["id"])]["inputs"]


def test_our_scripts_complain_of_nothing(built) -> None:
    """The last test of the session above."""
    assert built.page.errors == []


@pytest.fixture(scope="module")
def page(opened_pages, server) -> WebPage:
    """The same page for the tests below, each of which opens its workflow: the front end loads for seconds."""
    return opened_pages.page(server)


def test_a_video_what_is_less_exact_and_a_step_down_are_shown(page, server) -> None:
    """Figures that a machine without a GPU has not: they come as the server's news do."""
    stats = server.get("/anyshape/stats").json()
    stats |= {"models": [WAN], "fallbacks": [{"where": "WAN21", "reason": "a patch draws random numbers", "count": 2}]}
    news = "(stats) => { app.api.dispatchEvent(new CustomEvent('anyshape.stats', { detail: stats })) }"
    page.load_workflow(flow() | {"8": node("AnyShapeShapeCacheInfo")}, PLACES | {"8": (1000, 500)})
    page.page.locator(OURS).click()
    page.page.evaluate(news, stats)
    row = page.page.locator(f"{PANEL} tr[data-state=tape]")
    row.wait_for()
    page.shot("video")
    assert row.locator("td").first.inner_text().replace("\u200b", "") == "1024×1152×121"
    assert row.locator("td").nth(5).get_attribute("title") == "ComfyUI's own forward: 813 ms"
    assert not page.page.evaluate("(row) => row.cells[0].scrollWidth > row.cells[0].clientWidth", row.element_handle())
    for text in (VIDEO["note"], f"WAN21: {WAN['inexact'][0]}", "WAN21, 2 times: a patch draws random numbers"):
        shows(page.page.locator(PANEL), text)
    assert page.errors == []


def test_a_server_without_data_is_no_error(page) -> None:
    """One of another version, found when the connection is there again: its figures take the place of those before."""
    page_session.answering(STATS, json={})(page.page)
    page.page.evaluate("() => { app.api.dispatchEvent(new CustomEvent('reconnected')) }")
    shows(page.page.locator(PANEL), EMPTY)
    shows(page.page.locator(".anyshape-info"), EMPTY)
    assert page.size_of(8)[1] > 200
    assert page.errors == []
    page.page.unroute(STATS)
    page.page.locator(OURS).click()  # the panel covers the canvas
    page.page.locator(PANEL).wait_for(state="detached")


def test_a_silent_server_and_a_frontend_without_a_sidebar_break_nothing(browser, server) -> None:
    """The panel is a tab of the bottom panel then."""
    script = {"content_type": "application/javascript", "body": page_session.OLDER}

    def prepare(page: Any) -> None:
        page_session.answering("**/scripts/app.js", **script)(page)
        page_session.answering("**/api/anyshape/**", status=500, body="no")(page)

    page = WebPage(browser, server, prepare)
    page.load_workflow(page_session.compiled_flow("82", 2048), PLACES | {"82": (410, 160)})
    assert page.page.locator(OURS).count() == 0
    page.page.evaluate("() => app.extensionManager.command.execute('Workspace.ToggleBottomPanel')")
    page.page.get_by_role("tab", name="Shape cache").click()
    shows(page.page.locator(PANEL), EMPTY)
    page.page.locator("[data-action=clear]").click()
    page.page.get_by_text("That did not work: HTTP 500").wait_for()
    assert page.badge(82) == "not run yet"
    assert [error for error in page.errors if "500" not in error] == []
    page.close()


def test_every_node_is_found_and_warm_up_says_what_it_warmed(page, server) -> None:
    """But for those that ``built`` has found."""
    page.load_workflow(page_session.compiled_flow("82", 2048), PLACES | {"82": (410, 160)})
    warm = page.add_node("Warm Up", 740, 480)
    others = [page.add_node("Skip Blocks", 410, 400), page.add_node("Compile ControlNet", 1170, 480)]
    page.set_widgets(warm, {"shapes": "64x64\n96x64"})
    for source, output, target, place in ((82, 0, warm, 0), (warm, 0, 5, 0)):
        page.connect(source, output, target, place)
    page.run(server)
    page.wait_for_line(warm, "2 of 2 sizes ready")
    assert [page.badge(one) for one in others] == ["not run yet"] * 2
    page.shot("warm-up")
    assert page.errors == []


def test_a_node_that_comfyui_does_not_run_again_has_its_line_too(page, server) -> None:
    """The same workflow opened a second time has another id, and its Compile Model comes from ComfyUI's cache."""
    # a number that no workflow of the other tests has
    page.load_workflow(page_session.compiled_flow("80", 1024), PLACES | {"80": (410, 160)})
    page.run(server)
    page.wait_for_line(80, f"as ComfyUI: {SIZE} ×2, on a CPU")
    page.page.evaluate("async () => { const { id, ...same } = app.graph.serialize(); await app.loadGraphData(same); }")
    assert page.badge(80) == "not run yet"
    page.run(server)
    page.wait_for_line(80, f"as ComfyUI: {SIZE} ×2, on a CPU")
    assert page.errors == []


def test_a_script_is_not_shown_on_a_workflow_that_never_ran(page, server) -> None:
    """Its node has the same number and class."""
    compiled = page_session.compiled_flow("81", 960)
    page.load_workflow(compiled, PLACES | {"81": (410, 160)})
    page.page.evaluate(
        "() => app.api.addEventListener('anyshape.stats', ({ detail }) => {"
        " window.heard ||= detail.nodes.some((one) => one.id === '81' && one.state === 'ready'); })"
    )
    with ThreadPoolExecutor(1) as thread:  # the browser has a loop in this one
        thread.submit(server.run, compiled).result()
    page.page.wait_for_function("() => window.heard")
    page.drawn()
    assert page.badge(81) == "not run yet"
    page.run(server)
    page.wait_for_line(81, f"as ComfyUI: {SIZE} ×2, on a CPU")  # from ComfyUI's cache
    assert page.errors == []


@pytest.mark.parametrize(
    ("output", "offered"),
    [(0, ["AnyShapeCompileModel", "AnyShapeAccelerate", "AnyShapeSkipBlocks"]), (1, ["AnyShapeCompileVAE"])],
)
def test_a_dropped_link_is_offered_our_nodes(page, output, offered) -> None:
    """Once each, and the one that is chosen gets the link."""
    page.load_workflow(flow(), PLACES)
    before = page.ids()
    page.drop_link(1, output, 420, 300)
    menu = page.page.locator(".litecontextmenu .litemenu-entry")
    menu.first.wait_for()
    shown = [entry for entry in menu.all_inner_texts() if entry.startswith("AnyShape")]
    assert shown == offered
    menu.get_by_text(offered[0], exact=True).click()
    page.page.wait_for_function("n => app.graph.nodes.length > n", arg=len(before))
    (added,) = page.ids() - before
    link = "id => { const node = app.graph.getNodeById(id); return [node.type, node.getInputLink(0)?.origin_slot]; }"
    assert page.page.evaluate(link, added) == [offered[0], output]
    assert page.errors == []


def test_an_example_opens_from_the_template_browser(page, server) -> None:
    """With its picture; the front end makes the same prompt of each example as tools.api_format does."""
    known = server.object_info()
    page.page.evaluate("() => { app.extensionManager.command.execute('Comfy.BrowseTemplates') }")
    page.page.get_by_text("AnyShape", exact=True).last.click()
    card = page.page.locator("[data-testid='template-workflow-Comparison SDXL - with and without AnyShape']")
    card.wait_for(state="attached")
    card.scroll_into_view_if_needed()  # its picture is loaded where it can be seen
    card.locator("img").first.wait_for()
    page.page.wait_for_function("card => card.querySelector('img').naturalWidth === 640", arg=card.element_handle())
    page.shot("templates")
    card.click()
    page.page.wait_for_function("() => app.graph.nodes.some((node) => node.type === 'AnyShapeShapeCacheInfo')")
    for path in [*ROOT.glob("example_workflows/*.json"), *ROOT.glob("demo/example_workflows/*.json")]:
        saved = json.loads(path.read_text(encoding="utf-8"))
        made = page.page.evaluate(
            "async (saved) => { await app.loadGraphData(saved); return (await app.graphToPrompt()).output; }", saved
        )
        given = {name: page_session.known_inputs(one, known) for name, one in made.items()}
        assert given == {name: one["inputs"] for name, one in to_api(saved, known).items()}, path.stem
