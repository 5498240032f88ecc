"""The wording of the text reports and of the chart; the browser uses the same (web/anyshape/format.js)."""

from collections.abc import Iterable
from typing import Any

FAST, PARTLY, AS_COMFYUI = "fast", "partly fast", "as ComfyUI"
OF_NODES = {"AnyShapeCompileVAE": "vae", "AnyShapeCompileControlNet": "controlnet"}  # of others it is the MODEL's file


def speed(shape: dict[str, Any], device: str) -> str:
    """How a size runs, in the words of users; on a CPU nothing is gained."""
    if shape["state"] == "eager" or device == "cpu":
        return AS_COMFYUI
    return PARTLY if shape["reason"] else FAST


def speed_of_all(shapes: Iterable[dict[str, Any]], device: str) -> str:
    """How several sizes run; "" of none."""
    found = {speed(shape, device) for shape in shapes}
    return PARTLY if len(found) > 1 else next(iter(found), "")


def size(width: int, height: int, frames: int = 1) -> str:
    """Of an image 1024x1152, of a video 832x480x33."""
    return f"{width}x{height}" + (f"x{frames}" if frames > 1 else "")


def figure(value: float | None, digits: int) -> str:
    """A dash where nothing was measured."""
    return f"{value:.{digits}f}" if value else "-"


def files(snapshot: dict[str, Any]) -> dict[str, str]:
    """name of an entry -> the file that its model is from, where a node knows it."""
    kinds = {model["name"]: model["kind"] for model in snapshot["models"]}
    return {
        name: node["file"]
        for node in snapshot["nodes"] if "file" in node
        for name in node["models"] if kinds.get(name) == OF_NODES.get(node["type"], "model")
    }  # fmt: skip


def title(name: str, known: dict[str, str]) -> str:
    """What an entry is called: "file (name)", or its name; known: of ``files``."""
    return f"{known[name]} ({name})" if name in known else name


def place(name: str, snapshot: dict[str, Any], known: dict[str, str]) -> str:
    """The same of where something ran slower: an entry, or all of a class, which may have a file in common."""
    entries = [model["name"] for model in snapshot["models"]]
    found = {known.get(one, "") for one in entries if one == name or one.startswith(f"{name} #")}
    return title(name, {name: found.pop()} if len(found) == 1 and found != {""} else {})
