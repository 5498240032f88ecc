"""Accelerate every model in every workflow, on a server of several users: their settings, the last session's sizes."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tools.api_format import node
from tools.automatic_driving import ADDED, AT_START, AUTOMATIC, BUDGET, cached, flow, ours, post
from tools.comfy_server import ComfyServer

FILE, LAST = "rockets", ["64x64", "72x64 batch 2", "no size", 3]
MANY = [f"{8 * n}x64 batch 8" for n in range(9, 17)]
LONG = [f"{8 * n}x512 batch 8" for n in range(25, 37)]  # that take so long that a cancel comes in time
NAMED = {"file": f"folder/{FILE}.safetensors"}  # an input that the demo's loader does not look at


class OfSeveral(ComfyServer):
    """Started once before, as far as the folder of its users says."""

    def _make_base(self) -> Any:
        base = super()._make_base()
        users = {
            "ann": {AUTOMATIC: True, AT_START: True}, "bob": {AUTOMATIC: False}, "eve": {AUTOMATIC: True, BUDGET: 0},
        }  # fmt: skip
        (base / "user" / "users.json").write_text(json.dumps({name: name.title() for name in users}))
        for name, values in users.items():
            (base / "user" / name).mkdir()
            (base / "user" / name / "comfy.settings.json").write_text(json.dumps(values))
        kept = base / "user" / "__anyshape" / "sizes.json"
        kept.parent.mkdir()
        kept.write_text(json.dumps({"version": 1, "models": {FILE: LAST, "many": MANY, "cancelled": LONG}}))
        return base


@pytest.fixture(scope="module")
def of_several() -> Iterator[ComfyServer]:
    with OfSeveral(arguments=("--multi-user",)) as running:
        yield running


def of_models(server: ComfyServer) -> dict[tuple[int, int, int], dict[str, Any]]:
    models = server.get("/anyshape/stats").json()["models"]
    return {(s["width"], s["height"], s["batch"]): s for m in models if m["kind"] == "model" for s in m["shapes"]}


def sizes_of_models(server: ComfyServer) -> set[tuple[int, int, int]]:
    return set(of_models(server))


def workflow(id: str) -> dict[str, Any]:
    """What a browser sends along with a prompt."""
    return {"extra_pnginfo": {"workflow": {"id": id}}}


def wait_for(what: Any, wanted: Any) -> None:
    deadline = time.monotonic() + 60
    while (found := what()) != wanted:
        assert time.monotonic() < deadline, (found, wanted)
        time.sleep(0.05)


def kept(server: ComfyServer) -> dict[str, list[str]]:
    return json.loads((server.base / "user/__anyshape/sizes.json").read_text())["models"]


def test_each_user_has_settings_of_their_own(of_several) -> None:
    """Who posts a prompt is in a header; a script that names nobody has none. No size is warmed up for them."""
    assert ours(post(of_several, flow(**NAMED), "bob")) == set()
    assert ours(post(of_several, flow(**NAMED))) == set()
    assert ours(post(of_several, flow(**NAMED), "nobody")) == set()
    entry = post(of_several, flow(**NAMED), "eve")
    assert ours(entry) == ADDED and entry["prompt"][2]["anyshape-model-1-0"]["inputs"]["graph_budget_mb"] == 0
    wait_for(lambda: kept(of_several).get(FILE), ["64x72"])  # of this session
    assert sizes_of_models(of_several) == {(64, 72, 1)}


def test_the_sizes_of_the_last_session(of_several) -> None:
    """After the first picture, in a prompt of its own that leaves nothing behind; once."""
    entry = post(of_several, flow(seed=7, **NAMED), "ann", extra_data=workflow("w"))
    assert ours(entry) == ADDED
    wait_for(lambda: sizes_of_models(of_several), {(64, 72, 1), (64, 64, 1), (72, 64, 2)})
    wait_for(lambda: of_several.get("/queue").json(), {"queue_running": [], "queue_pending": []})
    assert {size: s["workflows"] for size, s in of_models(of_several).items()} == {
        (64, 72, 1): ["w"], (64, 64, 1): [], (72, 64, 2): []
    }, "what is warmed up ahead is not what the workflow did"  # fmt: skip
    warmed = of_several.get("/anyshape/stats").json()["nodes"]
    (noted,) = [one for one in warmed if one["type"] == "AnyShapeWarmUp"]
    assert noted["file"] == FILE
    wait_for(lambda: list(of_several.get("/history").json())[-1], entry["prompt"][1])
    again = post(of_several, flow(seed=8, **NAMED), "ann")
    assert cached(again) >= ADDED | {"1", "2", "3"}, "the cache of the user's prompt was lost"
    time.sleep(1.5)  # two looks at the queue
    assert of_several.log().count("at the sizes of the last session: 64x64, 72x64 batch 2") == 1
    assert kept(of_several) == {"many": MANY, "cancelled": LONG, FILE: ["64x72"]}, "what was only warmed up counts"


def test_warm_up_knows_the_sizes_of_the_last_session(of_several) -> None:
    made = flow(seed=9, **NAMED)
    made["18"] = node("AnyShapeCompileModel", model=["1", 0], mode="auto", graph_budget_mb=0)
    made["19"] = node("AnyShapeWarmUp", model=["18", 0], shapes="", preset="sizes of the last session")
    made["4"]["inputs"]["model"] = ["19", 0]
    made["10"] = node("PreviewAny", source=["19", 2])
    (report,) = post(of_several, made)["outputs"]["10"]["text"]
    assert "64x64" in report and "72x64" in report and "no size" not in report
    made["1"]["inputs"]["file"] = "unknown.safetensors"
    (report,) = post(of_several, made)["outputs"]["10"]["text"]
    assert report.startswith("no sizes of an earlier session are known for this model")


def warms_up(server: ComfyServer) -> list[bool]:
    """Of each prompt in the queue, whether it is ours."""
    queue = server.get("/queue").json()
    return ["anyshape-warm-up" in one[2] for one in [*queue["queue_running"], *queue["queue_pending"]]]


def test_others_come_first(of_several) -> None:
    """A prompt that is queued while sizes are warmed up waits for one of them at most; then the others are done."""
    sizes = {(8 * n, 64, 8) for n in range(9, 17)}
    post(of_several, flow(seed=10, file="many.safetensors"), "ann")
    wait_for(lambda: warms_up(of_several), [True])
    before = sizes_of_models(of_several)
    post(of_several, flow(seed=11, file="many.safetensors"), "bob")
    after = sizes_of_models(of_several)
    assert len(sizes - before) > 1 and len((after - before) & sizes) <= 1
    post(of_several, flow(seed=12, file="many.safetensors"), "ann")
    wait_for(lambda: sizes - sizes_of_models(of_several), set())


def test_cancel_ends_it_for_this_session(of_several) -> None:
    """The server knows a model by its loader's inputs: another file, another model."""
    sizes = {(8 * n, 512, 8) for n in range(25, 37)}
    of_several.http.post(f"{of_several.url}/anyshape/clear").raise_for_status()
    for seed in (13, 14):
        post(of_several, flow(seed=seed, file="cancelled.safetensors"), "ann", extra_data=workflow("v"))
        if seed == 13:
            # not before: ComfyUI forgets an interrupt that comes while a prompt begins
            wait_for(lambda: bool(sizes & sizes_of_models(of_several)), True)
            assert warms_up(of_several) == [True]
            of_several.interrupt()
        wait_for(lambda: warms_up(of_several), [])
        time.sleep(1.2)  # two looks at the queue
        assert warms_up(of_several) == []
        nodes = [one for one in of_several.get("/anyshape/stats").json()["nodes"] if one["workflow"] == "v"]
        assert nodes and not any("ended" in one for one in nodes), "the user's prompt was not cancelled"
    assert sizes - sizes_of_models(of_several)
