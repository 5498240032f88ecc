"""Warms up the sizes of the last session when their model is first used in a new process, if the user wishes it.

A size's first call takes the same time now or later, so nothing may come before the first picture. When
a prompt has succeeded and the queue is empty, a prompt of ours runs that user's nodes up to the sampler's MODEL, which
ComfyUI has in its cache, and Warm Up after it. It contains all nodes of the user's prompt, because ComfyUI's cache
drops what the latest prompt lacks. Before each size it checks the queue, and ends if anybody waits; the rest is done at
the next quiet moment. Each model is done once per process, and not again if it was cancelled.
"""

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from comfy.cli_args import args
from server import PromptServer

from ..accel.attempt import attempt, failed
from ..accel.size_list import Outcome, Shape
from . import automatic, sizes
from .badge import file_of
from .prompt_graph import Prompt

log = logging.getLogger(__name__)

KEY, AT_START = "anyshape", "sizes_at_start"  # in a prompt's extra_data
ID = f"{automatic.PREFIX}warm-up"  # of our node in that prompt
EVENT = "anyshape.ahead"  # to the browser whose prompt it follows
TITLE = "AnyShape: sizes of the last session"


@dataclass
class Ahead:
    """What is left to do. Its methods are called in the server's loop, but for those that Warm Up calls."""

    server: PromptServer | None = None  # None: no server, and nothing is done ahead
    _left: dict[str, list[Shape]] = field(default_factory=dict)  # by the model's file; none: it is done
    _file: str = ""  # of the prompt of ours that is queued or runs
    _prompt_id: str = ""

    def in_a_quiet_moment(self) -> bool:
        """Called when the queue is empty. Returns whether a prompt of ours is in it now."""
        if self.server is None:
            return False
        if self._prompt_id:  # it has no pictures, and the user did not queue it
            self.server.prompt_queue.delete_history_item(self._prompt_id)
            self._prompt_id = ""
        queued, _ = attempt(self._queue_next, failed("server", "warming up the sizes of the last session"))
        return bool(queued)

    def _queue_next(self) -> bool:
        latest = list(self.server.prompt_queue.get_history(max_items=1).values())
        if not latest or args.cache_none or (latest[0].get("status") or {}).get("status_str") != "success":
            return False
        _, _, prompt, extra, *_ = latest[0]["prompt"]
        if (extra.get(KEY) or {}).get(AT_START) is not True:
            return False
        for target in automatic.sampled(prompt):
            file = file_of(prompt, target.link[0])
            left = self._left.setdefault(file, sizes.KEPT.last(file) if file else [])
            left = [shape for shape in left if not sizes.has_run(file, shape)]
            self._left[file] = []  # unless it gives way
            if left:
                self._queue(file, left, prompt | {ID: _warm_up(target, left)}, extra)
                return True
        return False

    def _queue(self, file: str, left: list[Shape], prompt: Prompt, extra: dict[str, Any]) -> None:
        self._file, self._prompt_id = file, str(uuid.uuid4())
        number = self.server.number
        self.server.number += 1
        extra = {**extra, "create_time": int(time.time() * 1000)}
        self.server.prompt_queue.put((number, self._prompt_id, prompt, extra, [ID], {}))
        if client := extra.get("client_id"):
            self.server.send_sync(EVENT, {"file": file, "sizes": len(left)}, client)
        log.info("AnyShape: warming up %s at the sizes of the last session: %s", file, ", ".join(map(str, left)))

    def gives_way(self, node_id: str | None) -> bool:
        """Whether Warm Up, as this node, should end before its next size."""
        return node_id == ID and self.server.prompt_queue.get_tasks_remaining() > 1  # one of them is this one

    def ended(self, node_id: str | None, outcome: Outcome) -> None:
        """Notes that Warm Up, as this node, has done what it could."""
        if node_id == ID:
            self._left[self._file] = list(outcome.left)


AHEAD = Ahead()


def _warm_up(target: automatic.Sampled, left: list[Shape]) -> dict[str, Any]:
    """Our node as a user would connect it. Without the VAE: it has no graphs, and its kernels are compiled by now."""
    links = {"model": target.link, "positive": target.positive, "negative": target.negative}
    inputs = {name: list(link) for name, link in links.items() if link}
    cfg = "auto" if target.cfg is None else "on" if target.cfg > 1 else "off"
    inputs |= {"shapes": "\n".join(map(str, left)), "cfg": cfg, "preset": "none"}
    return {"class_type": automatic.WARM_UP, "inputs": inputs, "_meta": {"title": TITLE}}
