"""What the lines of a kernel are made of: variables, and the conditions under which they are asked for."""

from dataclasses import dataclass

import torch

from .index import Index

Indices = tuple[Index, ...]
FLOATS = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32"}
# what is stored and never read
ROUNDED = {torch.int8: "tl.int8", torch.float8_e4m3fn: "tl.float8e4nv", torch.float8_e5m2: "tl.float8e5"}
STORED = FLOATS | ROUNDED


class NoKernel(Exception):
    """This group is not one kernel; the text says why."""


@dataclass(frozen=True)
class Term:
    """A variable of the kernel and the axes it varies along, "r" and "c"."""

    name: str
    axes: frozenset[str]


@dataclass(frozen=True)
class Mask:
    """Where a value is asked for at all: conditions that were named."""

    conditions: tuple[Term, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The conditions' variables."""
        return tuple(condition.name for condition in self.conditions)

    @property
    def axes(self) -> frozenset[str]:
        """What any of them varies along."""
        return frozenset().union(*(condition.axes for condition in self.conditions))

    def of_rows(self) -> "Mask | None":
        """What it says of whole rows, where it asks for parts of them; None if that cannot be told.

        A condition on columns says nothing about which rows there are. One on both at once may.
        """
        if any({"r", "c"} <= condition.axes for condition in self.conditions):
            return None
        return Mask(tuple(condition for condition in self.conditions if "c" not in condition.axes))

    def along(self, axes: frozenset[str]) -> "Mask":
        """What it says of a value that varies along ``axes`` alone, whose memory may end where it is not asked for."""
        return Mask(tuple(each for each in self.conditions if not each.axes or each.axes & axes))


EVERYWHERE = Mask()


def where(axes: frozenset[str], mask: Mask) -> str:
    """The condition of a load that varies along ``axes``."""
    conditions = [f"{axis}mask" for axis in sorted(axes)] + list(mask.names)
    return f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
