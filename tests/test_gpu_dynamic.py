"""DynamicVRAM on a real GPU: weights that come and go under programs and graphs, and a card that is too small.

Each case is a process of its own (``tools.dynamic_cases``): comfy-aimdo must be loaded before ComfyUI.
"""

import importlib.util
import json
import statistics
from typing import Any

import pytest
import torch

from tools.dynamic_cases import in_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("comfy_aimdo") is None, reason="there is no comfy-aimdo"),
]

CLOSE = 2e-2  # relative L2 of a latent after four steps in bfloat16
GIB = 1 << 30
GRAPHS = 2 * GIB  # the budget of a new node


def case(scenario: str, **options: Any) -> dict[str, Any]:
    found = in_process(scenario, **options)
    print("RESULT", json.dumps(found))
    return found


def only_streamed(found: dict[str, Any]) -> bool:
    return all(
        reason.startswith(("weights streamed:", "the model's weights did not fit")) for reason in found["fallbacks"]
    )


def test_a_model_that_fits_runs_on_the_users_own_patcher():
    found = case("fit", share=1.0)
    assert max(found["errors"]) < CLOSE and found["states"] == ["graph"] and found["fallbacks"] == {}
    assert found["recorded"] == 1
    eager, ours = found["peak"]
    assert ours - eager <= found["graphs"] + GIB // 2  # no second copy, which would be 5 GB
    assert min(found["s"][1:]) <= min(found["eager_s"][1:])


def test_exact_is_the_same_picture_to_the_bit():
    found = case("fit", share=1.0, mode="exact")
    assert set(found["errors"]) == {0.0} and found["states"] == ["graph"] and found["fallbacks"] == {}


@pytest.mark.parametrize("share, name", [(0.0, ""), (0.3, ""), (0.7, ""), (0.3, "sdxl"), (0.7, "sdxl")])
def test_a_model_that_does_not_fit_is_fetched_step_by_step(share, name):
    """It keeps as many weights on the card as without us, and is no slower where copies are all that it waits for."""
    found = case("fit", share=share, graphs=0, name=name, turns=10)
    assert max(found["errors"]) < CLOSE and only_streamed(found)
    assert found["states"] == ["tape"] and found["graphs"] == 0
    # with 0.7 of it all weights may be there, until recording pushes some out; not tried a third time
    assert found["recorded"] <= (2 if share == 0.7 else 0) + 1 and len(set(found["begun"][2:])) == 1
    assert found["loaded"][1] >= 0.95 * found["loaded"][0] and found["loaded"][0] < 0.95 * found["size"]
    assert min(found["s"]) <= min(found["eager_s"])
    assert found["peak"][1] - found["peak"][0] <= found["graphs"] + GIB // 2


def test_weights_of_several_layers_at_once():
    found = case("together", share=0.3)
    assert max(found["errors"]) < CLOSE and only_streamed(found) and found["states"] == ["tape"]


def test_blocks_that_do_not_fit():
    """Of a forward that cannot be recorded whole, whose blocks ComfyUI fetches ahead."""
    run = {"width": 1280, "height": 704, "frames": 33}
    found = case("fit", share=0.5, graphs=0, name="minimax-int8", turns=4, run=run, num_layers=10)
    assert max(found["errors"]) < 0.1 and only_streamed(found) and found["states"] == ["tape"]
    assert found["loaded"][1] >= 0.95 * found["loaded"][0] and min(found["s"]) <= min(found["eager_s"])


def test_a_model_that_fits_without_its_graphs():
    """Whatever gives way, the picture is right, and each reason says what."""
    found = case("fit", share=1.0, graphs=0)
    assert max(found["errors"]) < CLOSE
    known = ("weights streamed:", "the model's weights", "no graph could be", "out of memory")
    assert all(reason.startswith(known) for reason in found["fallbacks"]), found["fallbacks"]
    assert found["recorded"] <= 3


@pytest.mark.parametrize(
    "name, changes, size, near",
    [("zimage", {"n_layers": 12}, 4, CLOSE), ("zimage-int8", {"n_layers": 12}, 2, 0.1), ("sdxl", {}, 4, CLOSE)],
)
def test_weights_that_went_and_came_back(name, changes, size, near):
    """A UNet's convolutions lie channels last while it is sampled."""
    found = case("evict", name=name, **changes)
    assert found["freed"] > size * GIB and found["error"] < near
    assert found["same"] == [True, True] and (found["recorded"], found["captured"]) == (0, 0)
    assert found["states"] == ["graph"] and found["fallbacks"] == {}


def test_a_vae():
    found = case("vae")
    assert found["message"] == "" and found["freed"] > 0 and found["error"] < CLOSE and found["same"]
    assert found["recorded"] == 1 and found["states"] == ["tape"] and found["fallbacks"] == {}


def test_a_patch_with_a_network():
    """Its pages are asked for with the model's, go and come back, and the model runs without it in between."""
    found = case("networks", node="AnimaLLLiteApply", name="anima")
    assert max(*found["errors"], found["far"]) < CLOSE < found["apart"] and len(set(found["errors"][1:])) == 1
    assert found["states"] == ["graph"] and found["fallbacks"] == {} and found["recorded"] == 0
    assert min(found["s"]) < 0.8 * found["eager_s"]


@pytest.mark.parametrize("layers, state", [(12, "eager"), (30, "tape")])
def test_a_network_that_does_not_fit_beside_its_model(layers, state):
    """With fewer layers than its own table supposes, its patch is called, and what that gives must be kept."""
    found = case("short", node="ZImageFunControlnet", name="zimage", share=0.3, n_layers=layers)
    assert max(found["errors"]) < CLOSE and only_streamed(found) and found["states"] == [state]
    assert min(found["s"]) <= 1.02 * min(found["eager_s"])


def test_two_models_by_turns():
    found = case("switch", times=30)
    assert max(found["errors"]) < CLOSE and found["same"] == [True, True]
    assert found["recorded"] == 0 and only_streamed(found)
    assert found["s"] <= 1.02 * found["eager_s"]
    eager, ours = found["peak"]
    assert ours - eager <= GRAPHS  # no more memory than ComfyUI alone and the graphs' budget


def test_a_lora_on_and_off():
    found = case("lora")
    assert found["apart"] > 5 * CLOSE / 2 and max(found["errors"]) < CLOSE
    assert (found["first"], found["recorded"], found["captured"]) == (1, 0, 0)
    assert found["states"] == ["graph"] and found["fallbacks"] == {}


def test_a_lora_on_and_off_of_quantised_weights():
    """A load with other LoRAs writes other scales into the same memory. Eager's own int8 layers round by 0.05 or so."""
    found = case("lora", name="zimage-int8", amount=0.05)
    assert found["apart"] > 0.5 and max(found["errors"]) < 0.1
    assert (found["first"], found["recorded"], found["captured"]) == (1, 0, 0) and found["states"] == ["graph"]


@pytest.mark.parametrize("name, amount, near", [("zimage", 0.01, CLOSE), ("zimage-int8", 0.05, 0.1)])
def test_a_plain_patcher_was_unloaded(name, amount, near):
    found = case("untold", name=name, amount=amount)
    assert max(found["errors"]) < near
    assert found["states"] == ["graph"] and found["fallbacks"] == {}


def test_sizes_by_turns_of_quantised_weights():
    """The int8 products of comfy-kitchen free the memory that they keep for a stream when they need more."""
    found = case("sizes")
    assert max(found["errors"]) < 0.1 and found["states"] == ["graph"] and found["fallbacks"] == {}


def test_warm_up_of_quantised_weights():
    """Later sizes cost earlier ones their graphs, which are captured once more."""
    found = case("warm")
    assert (found["ready"], found["held"]) == (3, 3) and found["fallbacks"] == {}, found["report"]


def test_a_lora_on_and_off_without_graphs():
    """Convolutions are filled again at each load, and laid out for each run. Programs read them as they lie."""
    found = case("lora", name="sd15", amount=0.1, graph_budget_mb=0)
    assert found["apart"] > 5 * CLOSE / 2 and max(found["errors"]) < CLOSE
    assert (found["first"], found["recorded"], found["captured"]) == (1, 0, 0) and found["states"] == ["tape"]


@pytest.mark.parametrize("model", [{}, {"name": "sdxl"}], ids=["row", "U"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_weights_of_skipped_blocks_are_not_fetched(share, model):
    """Of 12 steps 4 are full: the others take the time of what is left of the model, a small part of its weights."""
    found = case("skip", share=share, **model)
    step = statistics.median(found["eager_step_s"])
    for run in found["runs"]:
        assert run["message"] == "" and (run["full"], run["skipped"], run["resets"]) == (4, 8, {})
        assert 0 < run["far"] < 1 and min(run["s"]) < 0.6 * min(found["eager_s"])
        assert statistics.median(run["step_s"]) < 0.4 * step  # two thirds are skipped
        assert run["peak"] - found["peak"] < GIB // 2
    assert found["states"] == ["tape"] and only_streamed(found)


SD35 = {"name": "sd35l", "depth": 24, "context_embedder_config": {
    "target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536},
}}  # fmt: skip


@pytest.mark.parametrize(
    "given, near",
    # Z-Image: a row alone is rounded in other ways, which CFG 4 multiplies. Eager's own two ways are 0.029 apart.
    [({"n_layers": 12}, 2 * CLOSE), ({"name": "sdxl", "behind": True}, CLOSE), (SD35, CLOSE)],
    ids=["behind the node", "U", "no wrappers"],
)
def test_a_prompt_on_two_gpus(given, near):
    """ComfyUI's MultiGPU CFG Split: the second GPU has another model, which another thread calls."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = case("split", **given)
    assert found["whole"] < near and max(found["errors"]) < near
    assert found["engines"] == 2 and found["states"] == ["graph"] and found["fallbacks"] == {}
    assert min(found["s"][1:]) <= min(found["eager_s"])


def test_skipped_blocks_on_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = case("split", n_layers=12, behind=True, skipping=True)
    assert found["engines"] == 2 and found["fallbacks"] == {} and max(found["errors"]) < 1
    assert min(found["s"][1:]) <= 0.6 * min(found["eager_s"])
