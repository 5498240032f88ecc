"""The pack in the real ComfyUI server: it loads, and errors are readable; the nodes are in ``test_nodes.py``."""

import pytest

from tools.comfy_server import PromptError, prompt_seconds
from tools.embed import has_cuda


def image_flow(**save: object) -> dict:
    return {
        "image": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 40, "batch_size": 2, "color": 255}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["image", 0], "filename_prefix": "test", **save}},
    }


def test_no_import_failures(server) -> None:
    assert "IMPORT FAILED" not in server.log()


def test_weights_are_not_streamed_on_a_cpu(server) -> None:
    """comfy-aimdo is installed, as newer ComfyUI asks; whether it is used ComfyUI decides."""
    assert ("DynamicVRAM support detected and enabled" in server.log()) <= has_cuda()


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
