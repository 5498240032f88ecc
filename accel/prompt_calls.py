"""Counts what each of the latest prompts called, for the line that sums it up."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_PROMPTS = 8  # that have not been summed up
MAX_SIZES = 256  # of one prompt: Warm Up may list more


@dataclass
class Prompt:
    """One prompt, from its first call on. Numbers begin at 1; the latest prompt has the highest."""

    id: str
    number: int
    workflow: str  # the browser's id of it; "" if it came without one, from a script
    before: int  # kernels that had been compiled before it
    kernels: int | None = None  # that it compiled, once it is over
    calls: dict[int, tuple[Any, int]] = field(default_factory=dict)  # of each size, with its ``ShapeStats``

    def count(self, shape: Any) -> None:
        """Counts a call at this size."""
        _, calls = self.calls.get(id(shape), (shape, 0))
        if calls or len(self.calls) < MAX_SIZES:
            self.calls[id(shape)] = shape, calls + 1

    def take_back(self, shape: Any) -> None:
        """One call at this size was none."""
        _, calls = self.calls.pop(id(shape), (shape, 0))
        if calls > 1:
            self.calls[id(shape)] = shape, calls - 1

    def close(self, compiled: int) -> None:
        """It is over; compiled: how many kernels by now."""
        if self.kernels is None:
            self.kernels = max(0, compiled - self.before)  # models that are long gone count no more

    def sizes(self) -> list[dict[str, Any]]:
        """Of the stats, with the prompt's own number of calls."""
        return [shape.as_dict() | {"calls": calls} for shape, calls in list(self.calls.values())]


class Prompts:
    """The prompts of this process. compiled: gives how many kernels it has compiled so far."""

    def __init__(self, compiled: Callable[[], int]) -> None:
        self._compiled = compiled
        self._running: Callable[[], str] = str
        self._workflow: Callable[[str], str] = lambda _: ""
        self.count = 0  # how many have called something
        self._open: dict[str, Prompt] = {}  # not summed up yet, the latest last

    def follow(self, running: Callable[[], str], workflow: Callable[[str], str]) -> None:
        """running: gives the id of this thread's prompt, "" outside of prompts. workflow: that of a prompt's id."""
        self._running, self._workflow = running, workflow

    def called(self, shape: Any) -> None:
        """Notes a call at ``shape``, a ``ShapeStats``, in the prompt that runs in this thread."""
        prompt = self.current()
        if prompt is None:
            shape.prompt = 0
        else:
            shape.used_by(prompt.number, prompt.workflow)
            prompt.count(shape)

    def took_back(self, shape: Any) -> None:
        """The latest call at ``shape`` was none."""
        prompt = self.current()
        if prompt is not None:
            prompt.take_back(shape)

    def current(self) -> Prompt | None:
        """The prompt that runs in this thread; None outside of prompts."""
        found = self._running()
        if not found:
            return None
        if found not in self._open:
            for before in list(self._open.values())[-1:]:
                before.close(self._compiled())
            self.count += 1
            self._open[found] = Prompt(found, self.count, self._workflow(found), self._compiled())
            for oldest in list(self._open)[:-MAX_PROMPTS]:
                self._open.pop(oldest, None)
        return self._open[found]

    def pending(self) -> list[str]:
        """The ids of prompts that have not been summed up."""
        return list(self._open)

    def end(self, prompt_id: str) -> Prompt | None:
        """The prompt, which is over; it is forgotten here."""
        prompt = self._open.pop(prompt_id, None)
        if prompt is not None:
            prompt.close(self._compiled())
        return prompt
