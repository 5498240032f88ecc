"""The pack in the real ComfyUI server: it loads, its nodes are described, its errors are readable."""

import pytest

from tools.comfy_server import ComfyServer, PromptError, prompt_seconds

CONTRACT = {
    "AnyShapeCompileModel": {"inputs": {"model", "mode", "graph_budget_mb", "verify"}, "outputs": ["MODEL"]},
    "AnyShapeCompileVAE": {"inputs": {"vae", "enabled", "verify"}, "outputs": ["VAE"]},
    "AnyShapeSkipBlocks": {
        "inputs": {"model", "interval", "depth", "start_percent", "end_percent", "forecast"},
        "outputs": ["MODEL"],
    },
    "AnyShapeWarmUp": {
        "inputs": {"model", "shapes", "vae", "positive", "negative", "cfg"},
        "outputs": ["MODEL", "VAE", "STRING"],
    },
    "AnyShapeShapeCacheInfo": {"inputs": {"after"}, "outputs": ["STRING", "STRING", "IMAGE"]},
}
STATS_KEYS = {"version", "torch", "device", "models", "graphs", "fallbacks", "skip", "nodes", "artifacts", "fleet"}


def inputs(node: dict) -> dict[str, list]:
    return {**node["input"].get("required", {}), **node["input"].get("optional", {})}


def image_flow(**save: object) -> dict:
    return {
        "image": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 40, "batch_size": 2, "color": 255}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["image", 0], "filename_prefix": "test", **save}},
    }


@pytest.fixture(scope="module")
def nodes(server: ComfyServer) -> dict:
    return {name: node for name, node in server.object_info().items() if node["category"].startswith("AnyShape")}


@pytest.mark.parametrize("node_id", CONTRACT)
def test_contract(nodes, node_id) -> None:
    node = nodes[node_id]
    assert CONTRACT[node_id]["inputs"] <= set(inputs(node))
    assert node["output"] == CONTRACT[node_id]["outputs"]


def test_defaults(nodes) -> None:
    model = inputs(nodes["AnyShapeCompileModel"])
    assert model["mode"][1]["default"] == "auto"
    assert model["graph_budget_mb"][1]["default"] == 2048 and model["graph_budget_mb"][1]["min"] == 0
    assert inputs(nodes["AnyShapeCompileVAE"])["enabled"][1]["default"] is True
    skip = inputs(nodes["AnyShapeSkipBlocks"])
    assert skip["interval"][1]["default"] == 3 and skip["depth"][1]["default"] == "auto"


def test_every_input_has_a_tooltip(nodes) -> None:
    missing = [
        (node_id, name)
        for node_id, node in nodes.items()
        for name, (_, *options) in inputs(node).items()
        if not (options and options[0].get("tooltip"))
    ]
    assert not missing


def test_every_node_is_described(nodes) -> None:
    assert not [node_id for node_id, node in nodes.items() if not node["description"] or not node["display_name"]]


def test_no_import_failures(server) -> None:
    assert "IMPORT FAILED" not in server.log()


def test_stats_route(server) -> None:
    stats = server.get("/anyshape/stats").json()
    assert STATS_KEYS <= set(stats)
    assert stats["version"] == 2


def test_run_view_and_progress(server) -> None:
    seen = []
    entry = server.run(image_flow(), lambda kind, data: seen.append(kind))
    pictures = [server.view(image) for image in entry["outputs"]["save"]["images"]]
    assert [picture.size for picture in pictures] == [(64, 40)] * 2
    assert "executing" in seen and "execution_success" in seen
    assert 0 <= prompt_seconds(entry) < 60


def test_a_refused_workflow_names_the_node(server) -> None:
    with pytest.raises(PromptError, match="save.*SaveImage") as refused:
        server.run(image_flow(images=None))
    assert refused.value.node_id == "save" and refused.value.node_type == "SaveImage"


def test_a_failed_node_is_named(server) -> None:
    flow = image_flow()
    flow["crop"] = {
        "class_type": "ImageFromBatch",
        "inputs": {"image": ["image", 0], "batch_index": 0, "length": 1},
    }
    flow["bad"] = {"class_type": "LoadImage", "inputs": {"image": "missing.png"}}
    flow["save"]["inputs"]["images"] = ["bad", 0]
    with pytest.raises(PromptError, match="LoadImage"):
        server.run(flow)
