"""Tells the browser which model a node has, so that the node can show how that model runs."""

import re
from collections.abc import Callable
from typing import Any

from comfy_api.latest import io
from comfy_execution.utils import get_executing_context

from ..accel.attempt import attempt, failed
from ..accel.comfy.entries import Names
from ..accel.stats import STATS, NodeStats
from .messages import node_id

# What a node needs for it: its id, which workflow that is in, and the prompt, in which a loader names the model's file.
HIDDEN = [io.Hidden.unique_id, io.Hidden.extra_pnginfo, io.Hidden.prompt]
FOLLOWED = ("model", "vae", "control_net", "unet")  # inputs through which a model comes from its loader
FILE = re.compile(r"([^\\/]+)\.(?:safetensors|sft|ckpt|pth?|bin|gguf)", re.IGNORECASE)
MOST_NODES = 256  # between a node and its model's loader


def note(
    node: type[io.ComfyNode], names: Names | None, message: str = "", enabled: bool = True,
    sizes: dict[str, int] | None = None, instead: Callable[[], str] = str, patcher: Any = None, **settings: Any,
) -> None:  # fmt: skip
    """Notes what ``node``, which is being executed, gave: see ``accel.comfy.entries`` for ``names``.

    sizes, instead: as ``NodeStats`` has them. patcher: of the model that the node got. settings: its inputs that are
    no links.
    """
    state = "off" if not enabled else "eager" if names is None else "ready"
    more = {"settings": settings, "sizes": sizes or {}, "instead": instead}
    attempt(lambda: _note(node, state, message, names or list, patcher, more), failed("server", "a node's badge"))


def _note(node: type[io.ComfyNode], state: str, message: str, names: Names, patcher: Any, more: dict[str, Any]) -> None:
    if (found := node_id(node)) is None:
        return
    kind, workflow = node.define_schema().node_id, workflow_of(node.hidden.extra_pnginfo)
    file = file_of(node.hidden.prompt, str(found)) or loaded_from(patcher)
    STATS.node(NodeStats(str(found), workflow, kind, state, message, names, file=file, prompt=running(), **more))


def running() -> str:
    """The id of the prompt that runs in this thread."""
    context = get_executing_context()
    return context.prompt_id if context else ""


def file_of(prompt: object, node_id: str) -> str:
    """The name of the model's file, by the loader that ``node_id`` has its model from; "" if none is named."""
    for _ in range(MOST_NODES):
        node = prompt.get(node_id) if isinstance(prompt, dict) else None
        inputs = node.get("inputs", {}) if isinstance(node, dict) else {}
        source = next((link for name in FOLLOWED if isinstance(link := inputs.get(name), list) and link), None)
        if source is None:
            named = (FILE.search(value) for value in inputs.values() if isinstance(value, str))
            return next((match[1] for match in named if match), "")
        node_id = str(source[0])
    return ""


def loaded_from(patcher: Any) -> str:
    """The name of the file that ComfyUI would load this model from again; "" where it does not know."""
    _, args, *_ = getattr(patcher, "cached_patcher_init", None) or (None, ())
    named = (FILE.search(value) for value in args if isinstance(value, str))
    return next((match[1] for match in named if match), "")


def workflow_of(extra: object) -> str:
    """The id of the workflow that the browser sent along; scripts may send none, or anything."""
    workflow = extra.get("workflow") if isinstance(extra, dict) else None
    return str(workflow.get("id") or "") if isinstance(workflow, dict) else ""
