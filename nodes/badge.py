"""Telling the browser which model a node has, so that the node can show how that model runs."""

from typing import Any

from comfy_api.latest import io

from ..accel.attempt import attempt, failed
from ..accel.families.entries import Names
from ..accel.stats import STATS, NodeStats
from .messages import node_id

HIDDEN = [io.Hidden.unique_id, io.Hidden.extra_pnginfo]  # what a node needs for it; the latter names the workflow


def note(
    node: type[io.ComfyNode], names: Names | None, message: str = "", enabled: bool = True, **settings: Any
) -> None:
    """Notes what ``node``, which is being executed, gave: see ``accel.families.entries`` for ``names``."""
    state = "off" if not enabled else "eager" if names is None else "ready"
    attempt(lambda: _note(node, state, message, names or list, settings), failed("server", "a node's badge"))


def _note(node: type[io.ComfyNode], state: str, message: str, names: Names, settings: dict[str, Any]) -> None:
    if (found := node_id(node)) is None:
        return
    kind, workflow = node.define_schema().node_id, _workflow(node.hidden.extra_pnginfo)
    STATS.node(NodeStats(str(found), workflow, kind, state, message, names, settings))


def _workflow(extra: object) -> str:
    """The id of the workflow that the browser sent along; scripts may send none, or anything."""
    workflow = extra.get("workflow") if isinstance(extra, dict) else None
    return str(workflow.get("id") or "") if isinstance(workflow, dict) else ""
