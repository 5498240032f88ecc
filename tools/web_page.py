"""The real front end in a browser, used as a person does: the search box, the mouse, the keyboard.

with chromium() as browser:
    page = WebPage(browser, server)
    page.load_workflow(flow, places)          # flow in ComfyUI's API format
    model = page.add_node("Compile Model", 400, 100)
    page.connect(1, 0, model, 0)
    page.run(server)
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    TimeoutError,
    expect,
    sync_playwright,
)

from tools import browser as installed
from tools.comfy_server import ComfyServer, Workflow
from tools.paths import CACHE

SCREENSHOTS = CACHE / "screenshots"
VIEW = {"width": 1500, "height": 950}
# Nothing may lie over the canvas when the page opens; the rest is what a new user gets.
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Locale": "en",
    "Comfy.ColorPalette": "dark",
    "Comfy.Minimap.Visible": False,
    "Comfy.VueNodes.Enabled": False,
}
OURS = ":is(.anyshape-tab-button, [data-testid=anyshape-tab-button])"  # the panel's, of older front ends and newer
PATIENCE = (1, 2, 4, 8, 20)  # seconds for what the page may have missed: another try after each
APART = 0.6  # seconds between two clicks that are no double click
# Until then the front end may still open its own first workflow over another one.
OPENED = """() => {
    const { workflow } = app.extensionManager ?? {};
    return !workflow || (workflow.activeWorkflow && app.graph.nodes.length);
}"""
SEARCH = ":is(.comfy-vue-node-search-container, [role=dialog]:has([role=search]))"  # of older front ends and newer
SELECTED = "id => Boolean(app.canvas.selected_nodes?.[id])"
NO_BANNER = "localStorage.setItem('vueNodesBannerDismissed', 'true')"  # the offer of another kind of nodes
READY = "() => window.app?.graph && window.app.extensionManager?.getSidebarTabs?.().length > 1"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=str(installed.find()), args=list(installed.FLAGS))
        yield launched
        launched.close()


def _wanted(settings: dict[str, Any]) -> dict[str, Any]:
    return SETTINGS | {name.replace("_", "."): value for name, value in settings.items()}


def patiently(act: Callable[[], None], wait: Callable[[float], Any]) -> None:
    """Acts until ``wait`` (milliseconds) finds what should come of it. Raises the last wait's ``TimeoutError``."""
    for patience in PATIENCE:  # what comes at all comes in a third of a second
        act()
        try:
            wait(patience * 1_000)
            return
        except TimeoutError:
            if patience == PATIENCE[-1]:
                raise


def shows(place: Locator, text: str) -> None:
    """Waits until the element has the text: what the server sends arrives when it does."""
    expect(place).to_contain_text(text, use_inner_text=True, timeout=20_000)


class WebPage:
    """One open page. ``errors``: what our scripts complained of, and every uncaught error."""

    def __init__(self, browser: Browser, server: ComfyServer, prepare: Any = None, **settings: Any) -> None:
        """prepare(page): what to do before the page is loaded. settings: the frontend's, with _ for the dots."""
        server.http.post(f"{server.url}/api/settings", json=_wanted(settings)).raise_for_status()
        self.context: BrowserContext = browser.new_context(
            viewport=VIEW, permissions=["clipboard-read", "clipboard-write"]
        )
        self.context.set_default_timeout(20_000)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self._clicked = time.monotonic()  # the canvas, the latest time
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._listen)
        self.page.add_init_script(NO_BANNER)
        if prepare:
            prepare(self.page)
        self.page.goto(server.url)
        self.page.wait_for_function(READY)

    def _listen(self, message: ConsoleMessage) -> None:
        ours = "/extensions/AnyShape" in message.location["url"] or message.text.startswith("AnyShape")
        if message.type in ("error", "warning") and ours:
            self.errors.append(message.text)

    def renew(self, **settings: Any) -> "WebPage":
        """As it was when it had just been opened, but for its workflow."""
        self.page.unroute_all()
        self.page.set_viewport_size(VIEW)
        for name, value in _wanted(settings).items():
            self.set(name, value)
        self.page.evaluate("() => { app.extensionManager.sidebarTab.activeSidebarTabId = null }")
        self.errors.clear()
        return self

    def close(self) -> None:
        """Ends the page and its session."""
        self.context.close()

    def shot(self, name: str) -> None:
        """Keeps a picture of the page."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.mouse.move(VIEW["width"] / 2, VIEW["height"] - 60)  # over nothing that has a tooltip
        self.drawn()
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")

    def drawn(self) -> None:
        """Waits until the canvas shows what has changed: in the next frame but one at the latest."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    # The graph ---------------------------------------------------------------------------------------------------

    def load_workflow(self, flow: Workflow, places: dict[str, tuple[int, int]]) -> None:
        """Opens a workflow in ComfyUI's API format with its nodes at ``places`` of the canvas, by node id.

        Then once more in the front end's own format, which gives it an id, as all but such a workflow have.
        """
        self.page.wait_for_function(OPENED)
        self._close_search()
        self.page.evaluate(
            """async ([flow, places]) => {
                await app.loadApiJson(flow, "test");
                Object.entries(places).forEach(([id, place]) => {
                    const node = app.graph.getNodeById(id);
                    node.pos = place;
                    node.setSize(node.computeSize());
                });
                const { id, ...same } = app.graph.serialize();
                await app.loadGraphData(same);
                Object.assign(app.canvas.ds, { scale: 1, offset: [0, 0] });
                app.canvas.setDirty(true, true);
            }""",
            [flow, places],
        )

    def add_node(self, name: str, x: int, y: int) -> int:
        """Adds a node by the search box, which a double click opens, and gives its id."""
        before = self.ids()
        self.search(name, name, x, y).click()
        self.page.wait_for_function("n => app.graph.nodes.length > n", arg=len(before))
        self.page.locator(SEARCH).wait_for(state="hidden")
        (added,) = self.ids() - before
        self._put_down(added, x, y)
        self.page.evaluate("([id, pos]) => { app.graph.getNodeById(id).pos = pos }", [added, [x, y]])
        return added

    def create_node(self, kind: str, x: int, y: int) -> int:
        """Adds a node by its id of the server, without the search box, which costs the browser a second and a half."""
        return self.page.evaluate(
            "([kind, pos]) => { const made = LiteGraph.createNode(kind); made.pos = pos; app.graph.add(made);"
            " return made.id; }",
            [kind, [x, y]],
        )

    def search(self, text: str, title: str, x: int, y: int) -> Locator:
        """Types into the search box, which a double click on the canvas opens; gives the line with this title.

        As a person does, and all of it again where no such line comes: a busy page takes a double click for
        something else, or opens the box so late that the next double click closes it again.
        """
        field = self.page.locator(f"{SEARCH} input").first
        found = self.page.locator(f"{SEARCH} [role=option]", has_text=title).first

        def click() -> None:
            self._close_search()
            self.page.mouse.dblclick(*self._on_page(x, y))
            self._clicked = time.monotonic()

        def is_listed(patience: float) -> None:
            field.fill(text, timeout=patience)
            found.wait_for(timeout=patience)

        patiently(click, is_listed)
        return found

    def _close_search(self) -> None:
        """By the keyboard, where the search box is open."""
        box = self.page.locator(SEARCH)
        if box.count():
            patiently(
                lambda: self.page.keyboard.press("Escape"), lambda left: box.wait_for(state="hidden", timeout=left)
            )

    def _put_down(self, node: int, x: int, y: int) -> None:
        """In a newer front end a node from the search box follows the cursor until a click."""
        held = "id => Boolean(app.graph.getNodeById(id).flags.ghost)"
        if self.page.evaluate(held, node):
            place = self._on_page(x, y)
            self.page.mouse.move(*place, steps=5)
            self.page.wait_for_timeout(100)  # elements in it come along with the next picture
            self.page.mouse.click(*place)
            self._clicked = time.monotonic()
            self.page.wait_for_function(f"id => !({held})(id)", arg=node)

    def select(self, node: int) -> None:
        """Clicks on a node's title, and not so soon that it were the second of a double click.

        As a person does, again where that did not select it.
        """

        def click() -> None:
            self.page.wait_for_timeout(max(0.0, self._clicked + APART - time.monotonic()) * 1e3)
            place = self.page.evaluate("id => [...app.graph.getNodeById(id).pos]", node)
            self.page.mouse.click(*self._on_page(place[0] + 60, place[1] - 15))
            self._clicked = time.monotonic()

        patiently(click, lambda patience: self.page.wait_for_function(SELECTED, arg=node, timeout=patience))

    def connect(self, source: int, output: int, target: int, place: int) -> None:
        """Drags a link from an output to an input."""
        self.page.mouse.move(*self._slot(source, False, output))
        self.page.mouse.down()
        self.page.mouse.move(*self._slot(target, True, place), steps=5)
        self.page.mouse.up()
        linked = self.page.evaluate("([id, i]) => app.graph.getNodeById(id).inputs[i].link", [target, place])
        assert linked is not None, f"no link to input {place} of node {target}"

    def drop_link(self, source: int, output: int, x: int, y: int) -> None:
        """Drags a link from an output to an empty place of the canvas and drops it there, for ComfyUI's menu."""
        self.set("Comfy.LinkRelease.Action", "context menu")  # else Shift, where the front end is a newer one
        self.page.mouse.move(*self._slot(source, False, output))
        self.page.mouse.down()
        self.page.mouse.move(*self._on_page(x, y), steps=5)
        self.page.mouse.up()

    def click_widget(self, node: int, name: str) -> None:
        """Clicks on a node's widget; a switch changes its state."""
        place = self.page.evaluate(
            """([id, name]) => {
                const node = app.graph.getNodeById(id), widget = node.widgets.find((one) => one.name === name);
                return [node.pos[0] + node.size[0] - 40, node.pos[1] + widget.last_y + 10];
            }""",
            [node, name],
        )
        self.page.mouse.click(*self._on_page(*place))

    def set_widgets(self, node: int, values: dict[str, Any]) -> None:
        """Gives a node's widgets other values."""
        self.page.evaluate(
            "([id, values]) => app.graph.getNodeById(id).widgets.forEach("
            "(one) => { if (one.name in values) one.value = values[one.name]; })",
            [node, values],
        )

    def ids(self) -> set[int]:
        """Of all nodes."""
        return set(self.page.evaluate("() => app.graph.nodes.map((node) => node.id)"))

    def size_of(self, node: int) -> list[float]:
        """[width, height] of a node."""
        return self.page.evaluate("id => [...app.graph.getNodeById(id).size]", node)

    def _slot(self, node: int, is_input: bool, index: int) -> tuple[float, float]:
        place = self.page.evaluate(
            "([id, input, i]) => [...app.graph.getNodeById(id).getConnectionPos(input, i)]", [node, is_input, index]
        )
        return self._on_page(*place)

    def _on_page(self, x: float, y: float) -> tuple[float, float]:
        """A place of the canvas, in pixels of the page."""
        return tuple(
            self.page.evaluate(
                """([x, y]) => {
                    const { scale, offset } = app.canvas.ds, box = app.canvas.canvas.getBoundingClientRect();
                    return [(x + offset[0]) * scale + box.left, (y + offset[1]) * scale + box.top];
                }""",
                [x, y],
            )
        )

    # The page ----------------------------------------------------------------------------------------------------

    def set(self, setting: str, value: Any) -> None:
        """Changes a setting, as the dialog of settings does."""
        self.page.evaluate("([id, value]) => app.extensionManager.setting.set(id, value)", [setting, value])

    def badge(self, node: int) -> str:
        """The line that one of our nodes shows of itself."""
        return self.page.evaluate(
            "id => app.graph.getNodeById(id).widgets.find((w) => w.name === 'anyshape').element.textContent", node
        )

    def wait_for_line(self, node: int, text: str, timeout: float = 60, begins: bool = False) -> str:
        """The node's line as soon as it is exactly ``text``, or begins with it; seconds.

        The line of the prompt before stays until the news arrive, and the front end may make its nodes again at any
        time: so a line is never read once.
        """
        read = "(id) => app.graph.getNodeById(id)?.widgets.find((w) => w.name === 'anyshape')?.element.textContent"
        try:
            is_it = "line?.startsWith(text)" if begins else "line === text"
            same = f"([id, text]) => {{ const line = ({read})(id); return {is_it} && line; }}"
            return self.page.wait_for_function(same, arg=[node, text], timeout=timeout * 1e3).json_value()
        except TimeoutError:
            shown = self.page.evaluate(read, node)
            raise AssertionError(f"the line of node {node} is {shown!r}, not {text!r}") from None

    def run(self, server: ComfyServer, timeout: float = 120) -> dict[str, Any]:
        """Queues the workflow by the keyboard and gives the history's entry when it has ended."""
        with self.page.expect_response(lambda answer: answer.url.endswith("/prompt")) as posted:
            self.page.keyboard.press("Control+Enter")
        answer = posted.value.json()
        assert posted.value.ok, json.dumps(answer)
        path, deadline = f"/history/{answer['prompt_id']}", time.monotonic() + timeout
        while not (history := server.get(path).json()):
            assert time.monotonic() < deadline, "the prompt did not end"
            self.page.wait_for_timeout(50)
        return history[answer["prompt_id"]]
