"""Follows prompts in ComfyUI's queue: which one runs, of which workflow, and a line of results when it has ended."""

import logging
from itertools import takewhile
from typing import Any

from server import PromptServer

from ..accel import gain
from ..accel.prompt_calls import Prompt
from ..accel.stats import STATS
from .ahead import ID as WARM_UP
from .badge import workflow_of

log = logging.getLogger(__name__)

KEY = "anyshape"  # of what is added to a prompt's entry in ComfyUI's history
BROKEN_OFF = {"execution_interrupted": "cancelled", "execution_error": "failed"}  # -> what a node's line says
START, END = "execution_start", ("execution_success", "execution_error", "execution_interrupted")


def workflow(prompt_id: str) -> str:
    """The browser's id of the workflow that a running prompt came from; "" if it came from a script, or from us."""
    server = getattr(PromptServer, "instance", None)
    items = _running_items(server.prompt_queue) if server else []
    theirs = (item for item in items if item[1] == prompt_id and WARM_UP not in item[2])
    return next((workflow_of(item[3].get("extra_pnginfo")) for item in theirs), "")


def running_nodes(queue: Any) -> dict[str, str]:
    """id -> class of the nodes of the prompts that run."""
    return {id: node["class_type"] for item in _running_items(queue) for id, node in item[2].items()}


def _running_items(queue: Any) -> list[tuple]:
    """(number, id, the prompt, extra data, ...) of each prompt that runs."""
    with queue.mutex:
        return list(queue.currently_running.values())


def conclude(queue: Any) -> None:
    """Sums up the prompts that have ended: in the log, and in the history of ``queue``."""
    for prompt_id in STATS.prompts.pending():
        with queue.mutex:
            entry = queue.history.get(prompt_id)
        if entry is None or (prompt := STATS.prompts.end(prompt_id)) is None:
            continue
        line, figures = summary(prompt, _seconds((entry.get("status") or {}).get("messages", [])))
        log.info("AnyShape: prompt %s: %s", prompt_id, line)
        with queue.mutex:
            entry[KEY] = figures | {"text": line}


def note_ends(queue: Any, seen: str) -> str:
    """Notes on the nodes of each prompt that ended after ``seen`` whether it was broken off; the id of the latest."""
    with queue.mutex:
        entries = list(takewhile(lambda item: item[0] != seen, reversed(queue.history.items())))
    for _, entry in reversed(entries):
        _, _, prompt, extra, *_ = entry["prompt"]
        if WARM_UP in prompt:  # the user did not queue it: the nodes' latest prompt is another
            continue
        told = dict((entry.get("status") or {}).get("messages", []))
        ended = next((word for name, word in BROKEN_OFF.items() if name in told), "")
        STATS.ended(workflow_of(extra.get("extra_pnginfo")), prompt.keys(), ended)
    return entries[0][0] if entries else seen


def summary(prompt: Prompt, seconds: float) -> tuple[str, dict[str, Any]]:
    """("12 s, 1.4x, 0 compiled", the same as figures). The factor is there only where it is known."""
    found = gain.total(prompt.sizes())
    factor = found.get("factor")
    parts = [gain.duration(seconds), *([gain.times(factor)] if factor else []), f"{prompt.kernels} compiled"]
    return ", ".join(parts), {"seconds": round(seconds, 2), "factor": factor, "compiled": prompt.kernels}


def _seconds(messages: list[tuple[str, dict[str, Any]]]) -> float:
    """From the prompt's start to its end, by the times that ComfyUI noted."""
    stamps = {name: data["timestamp"] for name, data in messages if isinstance(data, dict) and "timestamp" in data}
    ends = [stamps[name] for name in END if name in stamps]
    return max(0.0, (ends[0] - stamps[START]) / 1e3) if ends and START in stamps else 0.0
