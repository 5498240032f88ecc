"""Handles a prompt when it is queued, by ComfyUI's own hook, from browsers and scripts alike.

A script says otherwise with ``"extra_data": {"anyshape": {"accelerate": false}}`` (or true). A failure of ours never
costs a prompt: it is counted and logged, and the prompt goes on as it came.
"""

import logging
from typing import Any

from server import PromptServer

from ..accel.attempt import attempt, failed
from ..accel.stats import STATS
from . import automatic, preferences
from .ahead import AHEAD, AT_START, KEY

log = logging.getLogger(__name__)

WHERE = "Accelerate every model"
ACCELERATE = "accelerate"  # in KEY of a prompt's extra_data
MAX_TOLD = 1000


def register() -> None:
    """Adds the handler to the running server; does nothing where there is none (tests in process)."""
    server = getattr(PromptServer, "instance", None)
    if server is not None:
        Queued(server)


class Queued:
    """ComfyUI's handler for prompts, in the server's loop."""

    def __init__(self, server: PromptServer) -> None:
        self._server = server
        self._told: set[str] = set()
        AHEAD.server = server
        preferences.follow_users(server)
        server.add_on_prompt_handler(self)

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """The queued prompt as it shall run; ``data`` is what was posted."""
        changed, _ = attempt(lambda: self._changed(data), failed("server", WHERE))
        return changed or data

    def _changed(self, data: dict[str, Any]) -> dict[str, Any] | None:
        prompt = data.get("prompt")
        if not isinstance(prompt, dict):
            return None
        wanted, extra = preferences.of_prompt(self._server), data.get("extra_data")
        own = (extra.get(KEY) if isinstance(extra, dict) else None) or {}
        if wanted.at_start and isinstance(extra or {}, dict) and isinstance(own, dict):
            data = data | {"extra_data": {**(extra or {}), KEY: {AT_START: True, **own}}}
        return self._accelerated(data, wanted) if _asked(own, wanted.automatic) else data

    def _accelerated(self, data: dict[str, Any], wanted: preferences.Preferences) -> dict[str, Any]:
        result = automatic.accelerate(data["prompt"], wanted.choice)
        for reason in result.reasons:
            STATS.fallback(WHERE, reason)
        self._tell([*(f"added {id}" for id in result.added), *result.reasons])
        return data | {"prompt": result.prompt}

    def _tell(self, lines: list[str]) -> None:
        """In the log, each once."""
        new = [line for line in dict.fromkeys(lines) if line not in self._told]
        if new and len(self._told) < MAX_TOLD:
            self._told.update(new)
            log.info("AnyShape: accelerate every model: %s", "; ".join(new))


def _asked(own: object, default: bool) -> bool:
    """Whether this prompt is to be accelerated."""
    said = own.get(ACCELERATE) if isinstance(own, dict) else None
    return said if isinstance(said, bool) else default
