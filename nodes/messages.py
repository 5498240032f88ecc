"""Telling the user something: in the log, and on the node where the server can show it."""

import logging

from server import PromptServer

log = logging.getLogger(__name__)


def say(message: str, node_id: str | None, level: int = logging.WARNING) -> None:
    """Logs ``message`` and shows it under the node. Does nothing for an empty message."""
    if not message:
        return
    log.log(level, "AnyShape: %s", message)
    if node_id is not None and getattr(PromptServer, "instance", None) is not None:
        PromptServer.instance.send_progress_text(message, node_id)
