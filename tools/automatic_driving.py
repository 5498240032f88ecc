"""What the tests of "Accelerate every model in every workflow" share: settings, a workflow, and a server's answers."""

import time
from typing import Any

from tools.api_format import text_to_image
from tools.comfy_server import ComfyServer

AUTOMATIC, EXCEPTIONS, BUDGET, AT_START = (
    "AnyShape.Automatic", "AnyShape.Exceptions", "AnyShape.GraphBudget", "AnyShape.SizesAtStart",
)  # fmt: skip
ADDED = {"anyshape-model-1-0", "anyshape-vae-1-1"}  # the nodes that ``flow`` gets


def flow(seed: int = 5, **loader: Any) -> dict[str, Any]:
    """Text to image on the demo model, by ComfyUI's own nodes alone."""
    return text_to_image("1 2 3 4 5 6", (64, 72, 1), saved="automatic", loader=loader, seed=seed, cfg=2.0)


def post(server: ComfyServer, prompt: dict[str, Any], user: str = "", **more: Any) -> dict[str, Any]:
    """Queues a prompt as a script does, and gives the history's entry at its end."""
    headers = {"comfy-user": user} if user else {}
    answer = server.http.post(f"{server.url}/prompt", json={"prompt": prompt, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    path, deadline = f"/history/{answer.json()['prompt_id']}", time.monotonic() + 120
    while not (found := server.get(path).json()):
        assert time.monotonic() < deadline, "the prompt did not end"
        time.sleep(0.05)
    (entry,) = found.values()
    assert entry["status"]["status_str"] == "success", entry["status"]
    return entry


def ours(entry: dict[str, Any]) -> set[str]:
    """The ids of our nodes in the prompt that ran."""
    return {id for id in entry["prompt"][2] if id.startswith("anyshape-")}


def cached(entry: dict[str, Any]) -> set[str]:
    """The ids of the nodes that ComfyUI took out of its cache."""
    return {id for kind, data in entry["status"]["messages"] if kind == "execution_cached" for id in data["nodes"]}
