"""Why something does not run faster: each reason once, in two forms.

The long form is a sentence for tooltips, lists and the log. The short one is for a node's line and a table's cell, and
begins with what helps. Elsewhere a reason is its long text, perhaps within a longer one; ``found_in`` recognises it
there, so that the screen can show the short form, or another language: locales/<language>/main.json has the same keys.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import machine, models

_NAME = re.compile(r"\{(\w+)\}")
_PLACE = re.compile(r" \(([^()\s]+:\d+|at an unknown place)\)")  # of the code that is the reason; behind any of them


@dataclass(frozen=True)
class Reason:
    """A reason, with ``{names}`` in the place of what differs from case to case."""

    key: str
    short: str
    long: str

    def __call__(self, **values: Any) -> str:
        """The long form."""
        return self.long.format(**values)

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """What the long form looks like in a text. A name at its end takes the rest."""
        fixed = _NAME.split(self.long)  # text, name, text, name, ..., text
        parts = [f"(?P<{part}>.*?)" if index % 2 else re.escape(part) for index, part in enumerate(fixed)]
        if not fixed[-1]:
            parts[-2] = parts[-2].replace(".*?", ".*")
        start = (
            "" if fixed[0] else r"\A"
        )  # a name at its beginning takes all before; looked for once, not at each place
        return re.compile(start + "".join(parts), re.DOTALL)


class Found(NamedTuple):
    """A reason in a text, and what stands for its names; ``place`` too, where a line of code is named behind it."""

    reason: Reason
    values: dict[str, str]

    @property
    def short(self) -> str:
        """The short form."""
        return self.reason.short.format(**self.values)

    def as_dict(self) -> dict[str, Any]:
        """The contract's entry."""
        return {"key": self.reason.key, "short": self.short, "values": self.values}


REASONS = {key: Reason(key, *forms) for key, forms in (machine.REASONS | models.REASONS).items()}

# What may stand around a reason and says no more than the state of the node or the size does.
_WRAPPERS = (
    "this model runs in eager, as without this node", "It runs in eager, as without this node",
    "It runs as without this node", "operations run unfused", "without a graph",
)  # fmt: skip

# Those with the most text of their own first: one may be a part of another.
_BY_LENGTH = sorted(REASONS.values(), key=lambda reason: -len(_NAME.sub("", reason.long)))


def say(key: str, **values: Any) -> str:
    """The long form of a reason."""
    return REASONS[key](**values)


def found_in(text: str) -> tuple[Found, ...]:
    """The reasons that ``text`` is made of, in its order; none if none is known."""
    found = _spans(text)
    return tuple(found[span] for span in sorted(found))


def says_all(text: str) -> bool:
    """Whether ``text`` says nothing but its reasons: no size, no place in a list that would be lost without it."""
    for begin, end in sorted(_spans(text), reverse=True):
        place = _PLACE.match(text, end)
        text = text[:begin] + text[place.end() if place else end :]
    for wrapper in _WRAPPERS:
        text = text.replace(wrapper, "")
    return not text.strip(" ;:.")


@functools.lru_cache(maxsize=1024)
def _spans(text: str) -> dict[tuple[int, int], Found]:
    found: dict[tuple[int, int], Found] = {}
    for reason in _BY_LENGTH:
        match = reason.pattern.search(text)
        if match and not any(match.start() < end and begin < match.end() for begin, end in found):
            place = _PLACE.match(text, match.end())
            found[match.span()] = Found(reason, match.groupdict() | ({"place": place[1]} if place else {}))
    return found


def short(text: str) -> str:
    """The short form of what ``text`` says; ``text`` itself where it is none of the reasons."""
    return "; ".join(dict.fromkeys(one.short for one in found_in(text))) or text


def told_in(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """The contract's entries: each known text of the stats once, and the reasons that it is made of."""
    return [
        {"text": text, "all": says_all(text), "said": [one.as_dict() for one in found]}
        for text in _texts(snapshot)
        if (found := found_in(text))
    ]


def _texts(snapshot: dict[str, Any]) -> dict[str, None]:
    """Everything in the stats that may be a reason; of a node's message each line."""
    shapes = [shape for model in snapshot["models"] for shape in model["shapes"]]
    texts = [shape[name] for shape in shapes for name in ("reason", "note")]
    texts += [sentence for model in snapshot["models"] for sentence in model["inexact"]]
    texts += [fallback["reason"] for fallback in snapshot["fallbacks"]]
    texts += [reason for run in snapshot["skip"] for reason in run["resets"]]
    texts += [line for node in snapshot["nodes"] for line in node["message"].splitlines()]
    texts += [node["instead"] for node in snapshot["nodes"] if "instead" in node]
    return dict.fromkeys(texts)
