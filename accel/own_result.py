"""ComfyUI's own result of a call that is recorded: at hand, or made when it is asked for."""

from typing import Any

from .call import Call
from .clock import Clock
from .maker import NotCompared
from .outputs import Output, flat
from .take import Take


class Own:
    """ComfyUI's own result of a first call. like: what it looks like; None or void in a take that is short."""

    def __init__(self, call: Call, take: Take, recorded: Any) -> None:
        self._call, self._take, self.like = call, take, recorded

    def __call__(self) -> Any:
        """The result: what was recorded or, where the take is short, what ComfyUI's forward gives now."""
        if self._take.short:
            clock = Clock(self._call.key.device)
            self.like = clock.run(self._call.eager)
            self._take.clock, self._take.short = clock, False
        return self.like

    def whole(self) -> Output:
        """As a call of this, for a program that goes on. Raises ``NotCompared`` if weights went in that forward."""
        ran, out = self._take.short, flat(self())
        if ran and (why := self._call.taped.hold()):
            raise NotCompared(why)
        return out
