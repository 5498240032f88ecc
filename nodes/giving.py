"""Gives a compile node's outputs: tells the user, notes them for the node's line in the browser, passes them on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from ..accel.attempt import attempt, failed
from ..accel.comfy.entries import Names
from ..accel.comfy.surroundings import INTERRUPTS
from . import badge
from .messages import node_id, say


@dataclass(frozen=True)
class Part:
    """What became of a MODEL, a VAE or a CONTROL_NET."""

    value: Any  # what goes out
    names: Names | None  # of its entries in the stats; None: it is not compiled
    message: str = ""  # what the user should know; "" if nothing
    enabled: bool = True  # False: it passes through because the user said so
    instead: Callable[[], str] = str  # as ``NodeStats`` has it
    patcher: Any = None  # of the model that the node got


def part_of(value: Any, what: str, make: Callable[[], Part]) -> Part:
    """Returns ``make()``, or ``value`` unchanged if that fails, because another pack's MODEL may be something else."""
    if value is None:
        return Part(value, None)
    made, failure = attempt(make, failed(type(value).__name__, what), INTERRUPTS)
    return made or Part(value, None, failure)


def switched(
    value: Any, enabled: bool, verify: bool, what: str, work: Callable[..., tuple[Any, str]],
    names: Callable[[Any], Names | None],
) -> Part:  # fmt: skip
    """What a node with a switch makes of a VAE or a CONTROL_NET. work: of ``lazy``; names: of ``entries``."""
    if not enabled:
        return Part(value, None, enabled=False)

    def made() -> Part:
        compiled, message = work(value, verify)
        return Part(compiled, names(compiled), message, patcher=getattr(value, "patcher", None))

    return part_of(value, what, made)


def give(node: type[io.ComfyNode], *parts: Part | None, **settings: Any) -> io.NodeOutput:
    """Returns the outputs of ``node``, one per part; None where nothing is connected. settings: see ``badge.note``."""
    given = [part for part in parts if part is not None]
    found = [part.names for part in given if part.names]
    message = "\n".join(part.message for part in given if part.message)
    say(message, node_id(node))
    badge.note(
        node, (lambda: [name for names in found for name in names()]) if found else None, message,
        any(part.enabled for part in given), instead=given[0].instead, patcher=given[0].patcher, **settings,
    )  # fmt: skip
    return io.NodeOutput(*(part.value if part else None for part in parts))
