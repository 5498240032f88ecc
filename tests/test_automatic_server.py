"""Accelerate every model in every workflow, on the real server: pictures, and whose word counts, page's or script's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tools.api_format import node
from tools.automatic_driving import ADDED, AT_START, AUTOMATIC, BUDGET, EXCEPTIONS, cached, flow, ours, post
from tools.comfy_server import ComfyServer


def by_hand(mode: str = "auto") -> dict[str, Any]:
    """``flow`` with a node of ours in it."""
    made = flow()
    made["18"] = node("AnyShapeAccelerate", model=["1", 0], vae=["1", 1], mode=mode, graph_budget_mb=2048)
    made["4"]["inputs"]["model"], made["5"]["inputs"]["vae"] = ["18", 0], ["18", 1]
    return made


def picture(server: ComfyServer, entry: dict[str, Any]) -> np.ndarray:
    (image,) = entry["outputs"]["6"]["images"]
    return np.asarray(server.view(image).convert("RGB"), dtype=int)


def model_calls(server: ComfyServer) -> int:
    models = server.get("/anyshape/stats").json()["models"]
    return sum(s["calls"] for model in models for s in model["shapes"])


@pytest.fixture
def settings(server) -> Iterator[Any]:
    """Sets settings of the shared server's user; afterwards they are as they were."""
    before = server.get("/settings").json()

    def change(values: dict[str, Any]) -> None:
        server.http.post(f"{server.url}/settings", json=values).raise_for_status()

    yield change
    change({name: before.get(name) for name in (AUTOMATIC, EXCEPTIONS, BUDGET, AT_START)})


def test_the_picture_is_that_of_the_nodes(server, settings) -> None:
    """With the setting, without it, and with a node on the canvas; the setting holds from the next prompt on."""
    plain, before = post(server, flow()), model_calls(server)
    assert ours(plain) == set() and model_calls(server) == before
    settings({AUTOMATIC: True, BUDGET: 512})
    entry = post(server, flow())
    assert ours(entry) == ADDED and model_calls(server) > before
    assert entry["prompt"][2]["anyshape-model-1-0"]["inputs"]["graph_budget_mb"] == 512
    again = post(server, flow(seed=6))
    assert cached(again) >= ADDED | {"1", "2", "3"}, "ComfyUI's cache does not hold"
    with_node = post(server, by_hand())
    assert ours(with_node) == set()
    assert np.array_equal(picture(server, entry), picture(server, with_node))
    assert np.abs(picture(server, entry) - picture(server, plain)).max() <= 4
    settings({EXCEPTIONS: "AnyShapeDemoLoader"})
    assert ours(post(server, flow())) == set()
    settings({AUTOMATIC: False, EXCEPTIONS: ""})
    assert ours(post(server, flow())) == set()


def test_a_script_may_say_otherwise(server, settings) -> None:
    assert ours(post(server, flow(), extra_data={"anyshape": {"accelerate": True}})) == ADDED
    settings({AUTOMATIC: True})
    assert ours(post(server, flow(), extra_data={"anyshape": {"accelerate": False}})) == set()
    assert ours(post(server, flow(), extra_data={"anyshape": {"accelerate": "no"}})) == ADDED


def test_a_refused_prompt_names_the_users_nodes_alone(server, settings) -> None:
    wrong = flow()
    del wrong["4"]["inputs"]["latent_image"]
    answers = []
    for on in (False, True):
        settings({AUTOMATIC: on})
        answers.append(server.http.post(f"{server.url}/prompt", json={"prompt": wrong}))
    assert [answer.status_code for answer in answers] == [400, 400]
    plain, accelerated = (answer.json()["node_errors"] for answer in answers)
    assert plain == accelerated and set(plain) == {"4"}


@pytest.mark.parametrize("value", ["yes", 1, None, [], {"a": 1}])
def test_what_the_page_never_writes_means_off(server, settings, value) -> None:
    settings({AUTOMATIC: value, BUDGET: value, EXCEPTIONS: value})
    assert ours(post(server, flow())) == set()


@pytest.mark.parametrize("mode", ["auto", "exact", "off"])
def test_accelerate_does_what_the_three_nodes_do(server, mode) -> None:
    three = flow()
    three["18"] = node("AnyShapeCompileModel", model=["1", 0], mode=mode, graph_budget_mb=2048)
    three["19"] = node("AnyShapeCompileVAE", vae=["1", 1], enabled=mode == "auto")
    three["4"]["inputs"]["model"], three["5"]["inputs"]["vae"] = ["18", 0], ["19", 0]
    one = post(server, by_hand(mode=mode))
    (noted,) = [n for n in server.get("/anyshape/stats").json()["nodes"] if n["type"] == "AnyShapeAccelerate"]
    kinds = {model["name"]: model["kind"] for model in server.get("/anyshape/stats").json()["models"]}
    wanted = {"auto": {"model", "vae"}, "exact": {"model"}, "off": set()}
    assert {kinds[name] for name in noted["models"]} == wanted[mode]
    assert noted["state"] == ("off" if mode == "off" else "ready")
    assert np.array_equal(picture(server, one), picture(server, post(server, three)))
