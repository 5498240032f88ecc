"""What the lines of a kernel are made of: variables, and the conditions under which they are asked for."""

from dataclasses import dataclass

import torch

from .index import Index

Indices = tuple[Index, ...]
FLOATS = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32"}


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

    names: tuple[str, ...] = ()
    axes: frozenset[str] = frozenset()


EVERYWHERE = Mask()


def where(axes: frozenset[str], mask: Mask) -> str:
    """The condition of a load that varies along ``axes``."""
    conditions = [f"{axis}mask" for axis in sorted(axes)] + list(mask.names)
    return f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
