"""The lines of one kernel: variables, numbers that are arguments, and indices as Triton writes them."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from .index import UNIT, Axis, Digit, Index, Number
from .terms import EVERYWHERE, FLOATS, Indices, Mask, NoKernel, Term
from .values import Size, Value

# Joins within joins compute their parts once for each place that they are asked for: their number doubles with each.
MOST_LINES = 300  # the models and VAEs of ComfyUI 0.30.0 need 114 at most


class KernelLines(ABC):
    """What is written so far. column, tile: see ``codegen``."""

    def __init__(self, column: Axis, tile: Axis | None) -> None:
        self.lines: list[str] = []
        self.integers: list[tuple[Size, ...]] = []  # each the product of sizes
        self.reduces = False
        self.column, self.tile = column, tile
        self.memo: dict[Any, Any] = {}  # what was computed or read, and is computed or read once
        self._names: dict[tuple[str, tuple[Size, ...]], int] = {}
        self._count = 0

    @abstractmethod
    def value(self, value: Value, index: Indices, mask: Mask = EVERYWHERE) -> Term:
        """``value`` at ``index``, in float32."""

    @abstractmethod
    def argument(self, item: Any, output: Value, index: Indices, mask: Mask) -> Term:
        """An argument, a number or a value that is broadcast, for the element of ``output`` at ``index``."""

    def rounded(self, term: Term, dtype: torch.dtype, source: torch.dtype | None = None) -> Term:
        """``term`` as a tensor of ``dtype`` holds it; source: the dtype that it has been rounded to."""
        if dtype == torch.float32 or dtype == source:
            return term
        return self.let(f"{term.name}.to({FLOATS[dtype]}).to(tl.float32)", term.axes)

    def let(self, expression: str, axes: frozenset[str]) -> Term:
        """A new variable. Raises ``NoKernel`` for one too many."""
        if self._count >= MOST_LINES:
            raise NoKernel("a kernel of too many lines")
        name = f"t{self._count}"
        self._count += 1
        self.lines.append(f"{name} = {expression}")
        return Term(name, axes)

    def apart(self, pairs: str, axes: frozenset[str]) -> list[Term]:
        """The first and the second of each pair."""
        self._count += 1
        names = f"t{self._count}a", f"t{self._count}b"
        self.lines.append(f"{', '.join(names)} = tl.split({pairs})")
        return [Term(name, axes) for name in names]

    def axes(self, place: Index) -> frozenset[str]:
        """Along which of a block's axes this index varies."""
        kinds = {axis.kind for axis in place.axes()}
        return frozenset(name for name, kind in (("r", "row"), ("c", "column")) if kind in kinds)

    def text(self, place: Index, owner: str = "") -> str:
        """The index as Triton. owner: whose strides these are; two tensors share none, as they may differ elsewhere."""
        terms = [self._times(self._atom(atom), coefficient, owner) for coefficient, atom in place.terms]
        terms += [self.named(offset) for offset in place.offsets]
        return " + ".join(terms) or "0"

    def _atom(self, atom: Any) -> str:
        if not isinstance(atom, Digit):
            return f"(({self.text(atom.of)}) {'%' if atom.remainder else '//'} {self.named(atom.by)})"
        text, size = atom.axis.name, atom.axis.size
        if atom.div > 1:
            text = f"({text} // {atom.div})"
        whole = atom.mod == 0 or (size.static and atom.div * atom.mod >= size.value)
        return text if whole else f"({text} % {atom.mod})"

    def _times(self, text: str, coefficient: Number, owner: str) -> str:
        return text if coefficient == UNIT else f"{text} * {self.named(coefficient, owner)}"

    def named(self, value: Number, owner: str = "") -> str:
        """A number in the source: its static factor written out, its sizes an argument."""
        if value.static:
            return str(value.factor)
        place = self._names.setdefault((owner, value.sizes), len(self.integers))
        if place == len(self.integers):
            self.integers.append(value.sizes)
        name = f"n{place}"
        return name if value.factor == 1 else f"({name} * {value.factor})"
