"""Tells the user something: in the log, and on the node if the server can show it."""

import logging

from comfy_api.latest import io
from server import PromptServer

from ..accel.attempt import attempt, failed

log = logging.getLogger(__name__)


def node_id(node: type[io.ComfyNode]) -> str | None:
    """The id of ``node`` in the workflow that runs it; None where a script calls it, which has no workflow."""
    return node.hidden.unique_id if node.hidden else None


def say(message: str, node_id: str | None, level: int = logging.WARNING) -> None:
    """Logs ``message`` and shows it under the node. Does nothing for an empty message."""
    if not message:
        return
    log.log(level, "AnyShape: %s", message)
    if node_id is not None and getattr(PromptServer, "instance", None) is not None:
        attempt(
            lambda: PromptServer.instance.send_progress_text(message, node_id), failed("server", "a node's message")
        )
