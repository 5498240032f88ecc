"""What the server gives the web extension: routes, events, texts, also while models run; the extension's pure part."""

import asyncio
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
import torch

from tools.api_format import node
from tools.comfy_server import ComfyServer
from tools.driving import SHORT_RUN, compiled
from tools.on_gpu import SMALL, forward
from tools.oracles import STATS_KEYS, error, shapes
from tools.paths import ROOT

WEB = ROOT / "web"
SCRIPTS = sorted(WEB.rglob("*.js"))


# Routes -----------------------------------------------------------------------------------------------------------


def post(server: ComfyServer, body: bytes | str = b"", **headers: str) -> requests.Response:
    return server.http.post(f"{server.url}/anyshape/clear", data=body, headers=headers)


@pytest.mark.parametrize("body", [b"", b"  ", b"{}", b'{"graphs": false}', b'{"graphs": true}'])
def test_clear_gives_the_stats_that_are_left(server, body) -> None:
    answer = post(server, body)
    assert answer.status_code == 200 and set(answer.json()) == STATS_KEYS[""]
    assert not [model for model in answer.json()["models"] if model["shapes"]]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"grahps": true}', ["'grahps'", "graphs"]),
        (b'{"graphs": 1}', ["graphs", "1", "true or false"]),
        (b'{"graphs": null}', ["graphs is null;"]),
        (b'{"graphs": {"a": [true, "x"]}}', ['graphs is {"a": [true, "x"]};']),
        (b"[]", ["of type array;", "object"]),
        (b"7", ["of type number;", "object"]),
        (b'"x"', ["of type string;", "object"]),
        (b"null", ["of type null;", "object"]),
        (b"false", ["of type boolean;", "object"]),
        (b"{", ["not JSON", "object"]),
        (b"\xff\xfe\xfa", ["not JSON"]),
        (b"[" * 200, ["not JSON"]),
        (b" " * 300 + b"{", ["256 bytes", "graphs"]),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else None,
)
def test_clear_refuses_what_it_does_not_know(server, body, words) -> None:
    answer = post(server, body)
    assert answer.status_code == 400 and answer.headers["Content-Type"].startswith("application/json")
    assert [word for word in words if word not in answer.json()["error"]] == []


@pytest.mark.parametrize("path", ["/anyshape/clear", "/api/anyshape/clear"])
def test_another_site_is_refused(server, path) -> None:
    headers = {"Origin": "https://example.org"}
    assert server.http.post(server.url + path, headers=headers).status_code == 403


def test_clear_is_a_post(server) -> None:
    assert server.http.get(f"{server.url}/anyshape/clear").status_code in (404, 405)


def test_stats_as_text(server) -> None:
    answer = server.get("/anyshape/stats", format="text")
    assert answer.headers["Content-Type"].startswith("text/plain") and answer.text
    for query, words in (({"format": "xml"}, ["'xml'", "json, text"]), ({"x": "1"}, ["'x'", "format"])):
        refused = server.http.get(f"{server.url}/anyshape/stats", params=query)
        assert refused.status_code == 400
        assert [word for word in words if word not in refused.json()["error"]] == []


# Clearing while models run ----------------------------------------------------------------------------------------


class Forgetful(dict):
    """Forgets everything right after each look for a key: what another thread's ``clear`` may do at worst."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self.clear()
        return found

    def get(self, key: object, default: Any = None) -> Any:
        found = super().get(key, default)
        self.clear()
        return found


def test_clearing_in_the_middle_of_a_call(clean_stats) -> None:
    from anyshape.accel.stats import Stats

    model = Stats().model("UNet", "model")
    model.shapes = Forgetful()
    for _ in range(3):
        shape = model.shape("k", 512, 768, 2)
        model.shapes["k"] = shape  # as if it had not been forgotten, so that the next look finds it
        assert (shape.key, shape.width, shape.height, shape.batch) == ("k", 512, 768, 2)


def test_clearing_between_steps_changes_no_picture(models, fresh) -> None:
    """Counters and graphs go in mid-run; the rest of the run is what it would have been."""
    from anyshape.accel import graphs, stats
    from anyshape.accel.call import Settings
    from anyshape.accel.comfy.attach import compile_model

    compiled, _ = compile_model(fresh, Settings())
    settings = SHORT_RUN | {"steps": 4}
    reference = models.sample(compiled, **settings)
    stop = threading.Event()

    def clear() -> None:
        while not stop.wait(0.01):
            graphs.clear()
            stats.STATS.clear()

    clearing = threading.Thread(target=clear)
    clearing.start()
    again = models.sample(compiled, **settings)
    stop.set()
    clearing.join()
    assert (again == reference).all()
    assert not stats.snapshot()["fallbacks"]


@pytest.mark.gpu
def test_graphs_may_be_cleared_while_they_are_replayed(models, clean_stats, no_graphs_left) -> None:
    """From another thread, as the panel does: each step is right, and at the end all memory is given back."""
    from anyshape.accel import graphs, stats

    patcher = models.unet("sd15", torch.float16, **SMALL)
    fast, stop, cleared = compiled(patcher), threading.Event(), []

    def clear() -> None:
        while not stop.wait(0.02):
            graphs.clear()
            cleared.append(True)

    forward(fast, 512, 512)  # compiles
    clearing = threading.Thread(target=clear)
    clearing.start()
    for index in range(60):
        args = ((512, 512), (544, 408), (728, 720))[index % 3] + (2, 77, index)
        for _ in range(2):  # capture, replay
            assert error(forward(fast, *args), forward(patcher, *args)) < 5e-3, args
    stop.set()
    clearing.join()
    graphs.clear()
    now = stats.snapshot()
    assert cleared and now["graphs"]["used_bytes"] == 0 and not now["fallbacks"]
    assert all(shape["state"] == "graph" for shape in shapes()) and any(shape["replays"] for shape in shapes())


# Events -----------------------------------------------------------------------------------------------------------


async def _events(server: ComfyServer, flow: dict[str, Any]) -> list[dict[str, Any]]:
    """What a browser gets of ours from a prompt's start until a second after its end."""
    found = []
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.url}/ws?clientId=watching") as socket:
        run = asyncio.get_running_loop().run_in_executor(None, server.run, flow)
        while True:
            try:
                message = await socket.receive(timeout=1.0)
            except asyncio.TimeoutError:
                if run.done():
                    return found
            else:  # a preview is binary
                content = message.json() if message.type is aiohttp.WSMsgType.TEXT else {"type": ""}
                found += [content["data"]] if content["type"] == "anyshape.stats" else []


def test_what_changes_is_pushed_and_nothing_twice(server) -> None:
    """First the VAE's node, then nothing for as long as a plain model is sampled, at last the decoder's call."""
    flow = {
        "loader": node("AnyShapeDemoLoader"),
        "text": node("AnyShapeDemoPrompt", text_encoder=["loader", 2], text="rocket"),
        "vae": node("AnyShapeCompileVAE", vae=["loader", 1], enabled=True),
        "latent": node("EmptyLatentImage", width=256, height=256, batch_size=1),
        "sampler": node(
            "KSampler", model=["loader", 0], positive=["text", 0], negative=["text", 0], latent_image=["latent", 0],
            seed=1, steps=6, cfg=2.0, sampler_name="euler", scheduler="simple", denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="pushed"),
    }  # fmt: skip
    events = asyncio.run(_events(server, flow))
    assert events and events[-1] == server.get("/anyshape/stats").json()
    assert all(event != later for event, later in zip(events, events[1:], strict=False))
    assert ["ready"] == [one["state"] for one in events[-1]["nodes"] if one["id"] == "vae"]


# The files --------------------------------------------------------------------------------------------------------


def test_every_node_with_a_model_has_a_line_on_the_page(pack) -> None:
    """All but Shape Cache Info, which has the tables."""
    wanted = {one.define_schema().node_id for one in pack.nodes.NODES} - {"AnyShapeShapeCacheInfo"}
    listed = re.search(r"TYPES = new Set\(\[(.*?)\]\)", (WEB / "anyshape/badges.js").read_text(), re.DOTALL)
    assert set(re.findall(r'"(\w+)"', listed[1])) == wanted


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, str]:
    """Every text of a nested dict by the path that leads to it."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return found


def texts(language: str) -> dict[str, str]:
    """Without the reasons, which English has in accel/reasons: tests/test_reasons.py."""
    tree = json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))
    return leaves({"anyshape": {name: part for name, part in tree["anyshape"].items() if name != "reasons"}})


def test_both_languages_have_the_same_texts_and_places() -> None:
    english, chinese = texts("en"), texts("zh")
    assert english.keys() == chinese.keys()
    places = {key: set(re.findall(r"{(\w+)}", text)) for key, text in english.items()}
    assert {key: set(re.findall(r"{(\w+)}", text)) for key, text in chinese.items()} == places | {
        "anyshape.counts.times.one": {"n"}
    }
    unchanged = {"anyshape.columns.memory.title", "anyshape.kinds.vae", "anyshape.kinds.controlnet"}
    assert not [k for k in english if k not in unchanged and not re.search(r"[\u4e00-\u9fff：，；（]", chinese[k])]


def test_every_text_that_a_script_asks_for_is_there() -> None:
    known = {*texts("en"), "anyshape.reasons"}
    asked = {
        name
        for path in SCRIPTS
        for name in re.findall(r"\b(?:texts|words\(\)|words)\.([a-z_]+(?:\.[a-z_]+)*)\b(?!\()", path.read_text())
        if name != "js"
    }
    missing = [name for name in asked if not any(f"{key}.".startswith(f"anyshape.{name}.") for key in known)]
    assert len(asked) > 10 and not missing


def test_scripts_use_what_the_server_serves(server) -> None:
    """Every import leads to a file, ours or the frontend's."""
    for path in SCRIPTS:
        address = f"{server.url}/extensions/AnyShape/{path.relative_to(WEB).as_posix()}"
        for name in re.findall(r'from "([^"]+)"', path.read_text()):
            target = requests.compat.urljoin(address, name)
            ours = target.startswith(f"{server.url}/extensions/AnyShape/")
            assert ours or target.removeprefix(server.url) in ("/scripts/app.js", "/scripts/api.js"), (path, name)
            assert not ours or server.http.get(target).status_code == 200, (path, name)


def test_the_pure_part(tmp_path: Path) -> None:
    """tests/web, run by Node.js's own test runner."""
    if not shutil.which("node"):
        pytest.skip("needs Node.js")
    for part in ("web/anyshape", "tests/web", "locales"):
        shutil.copytree(ROOT / part, tmp_path / part)
    (tmp_path / "package.json").write_text(json.dumps({"type": "module"}))
    tests = [str(path) for path in (tmp_path / "tests/web").glob("*.test.js")]
    done = subprocess.run(["node", "--test", *tests], capture_output=True, text=True, cwd=tmp_path)
    assert tests and done.returncode == 0, done.stdout + done.stderr
