"""The stats to every open browser, over ComfyUI's websocket: while prompts run, and only when they have changed."""

from typing import Any

from server import PromptServer

from ..accel import stats
from ..accel.attempt import attempt, failed
from . import sizes
from .ahead import AHEAD

EVENT = "anyshape.stats"
SECONDS = 0.5  # between two looks


class Live:
    """Looks at the counters from a queued prompt on until the queue is empty. All of it in the server's loop."""

    def __init__(self, server: PromptServer) -> None:
        self._server = server
        self._sent: dict[str, Any] = {}
        self._watching = False
        server.add_on_prompt_handler(self._on_prompt)

    def _on_prompt(self, prompt: dict[str, Any]) -> dict[str, Any]:
        if not self._watching:
            self._watching = True
            self._server.loop.call_later(SECONDS, self._look)
        return prompt

    def _look(self) -> None:
        busy = self._server.prompt_queue.get_tasks_remaining() > 0  # before the look, so that the last one sees the end
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
        """Sends the stats if anybody listens and they are not what was sent before."""
        now = stats.snapshot() if self._server.sockets else self._sent
        if now != self._sent:
            self._sent = now
            self._server.send_sync(EVENT, now)
