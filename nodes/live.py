"""Sends the stats to every open browser over ComfyUI's websocket: while prompts run, and only if they have changed."""

from typing import Any

from server import PromptServer

from ..accel import preparing, stats
from ..accel.attempt import attempt, failed
from . import prompts, sizes
from .ahead import AHEAD

EVENT = "anyshape.stats"
SECONDS = 0.5  # between two looks
LONG = 2.0  # seconds of preparing from which on a node says so itself


class Live:
    """Checks the counters from a queued prompt until the queue is empty. All of it runs in the server's loop."""

    def __init__(self, server: PromptServer) -> None:
        self._server = server
        self._sent: dict[str, Any] = {}
        self._watching = False
        self._ended = ""  # the id of the latest prompt whose end was noted
        server.add_on_prompt_handler(self._on_prompt)

    def _on_prompt(self, prompt: dict[str, Any]) -> dict[str, Any]:
        if not self._watching:
            self._watching = True
            self._server.loop.call_later(SECONDS, self._look)
        return prompt

    def _look(self) -> None:
        queue = self._server.prompt_queue
        busy = queue.get_tasks_remaining() > 0  # before the look, so that the last one sees the end
        attempt(lambda: prompts.conclude(queue), failed("server", "summing a prompt up"))
        ended, _ = attempt(lambda: prompts.note_ends(queue, self._ended), failed("server", "a prompt's end"))
        self._ended = ended or self._ended
        attempt(self._tell, failed("server", "a node's message"))
        attempt(self.push, failed("server", "sending the stats to the browser"))
        if not busy:
            self._keep_sizes()
            busy = AHEAD.in_a_quiet_moment()
        self._watching = busy
        if busy:
            self._server.loop.call_later(SECONDS, self._look)

    def _keep_sizes(self) -> None:
        """Before anything is warmed up; the disk is for another thread."""
        judge = failed("server", "keeping the sizes of this session")
        news, _ = attempt(sizes.collect, judge)
        if news:
            self._server.loop.run_in_executor(None, attempt, sizes.KEPT.save, judge)

    def push(self) -> None:
        """Sends the stats if anybody listens and they have changed. The browser's clock runs by itself."""
        if not self._server.sockets:
            return
        now = stats.snapshot()
        if _without_clock(now) != _without_clock(self._sent):
            self._sent = now
            self._server.send_sync(EVENT, now)

    def _tell(self) -> None:
        """Under each node of a model that is being prepared: for how long. The page takes the text away at the end."""
        work = preparing.snapshot()
        nodes: list[str] = []
        if work and work["seconds"] >= LONG:
            known = [node for node in stats.STATS.nodes() if work["model"] in node.names()]
            there = prompts.running_nodes(self._server.prompt_queue)  # other workflows have other nodes of these ids
            nodes = list(dict.fromkeys(node.id for node in known if there.get(node.id) == node.type))
        for node in nodes:
            self._server.send_progress_text(f"preparing {work['size']}: {int(work['seconds'])} s", node)


def _without_clock(now: dict[str, Any]) -> dict[str, Any]:
    return now | {"preparing": {name: value for name, value in now.get("preparing", {}).items() if name != "seconds"}}
