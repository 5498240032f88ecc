"""What differs between families whose forward is written by hand: one module each, with the names of ``Family``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from ..ops import FusedOps
from ..reasons import say

CONTROL = "control."  # what names of lists of ControlNet residuals begin with


@dataclass(frozen=True)
class Arguments:
    """One call of a diffusion model's ``_forward``, taken apart by name. Holds the caller's tensors."""

    tensors: dict[str, Any]  # what a graph takes as input, None where absent; "x" and "context" among them
    lists: dict[str, list[Tensor | None]]  # tensors that come in lists (ControlNet residuals), by name
    options: dict[str, Any]  # transformer_options
    original: Callable[[], tuple[Any, ...]]  # what ComfyUI's own forward takes by position, for one call of it
    extra: dict[str, Any] = field(default_factory=dict)  # and by name; of these the fused forward knows nothing
    known: dict[str, Any] = field(default_factory=dict)  # by name too, but known to the fused forward
    plain: dict[str, str] = field(default_factory=dict)  # values that are no tensors and decide the program

    def flat(self) -> dict[str, Tensor]:
        """The call's tensors by name; those of lists as ``<list>.<index>``."""
        named = dict(self.tensors)
        for name, items in self.lists.items():
            named |= {f"{name}.{index}": item for index, item in enumerate(items)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def structure(self) -> dict[str, int | str]:
        """What besides the tensors decides the program: the lengths of the lists and the plain values."""
        return {name.removeprefix(CONTROL): len(items) for name, items in self.lists.items()} | self.plain

    def listed(self, name: str, flat: dict[str, Tensor]) -> list[Tensor | None]:
        """The list ``name``, made of these flat tensors."""
        return [flat.get(f"{name}.{index}") for index in range(len(self.lists[name]))]

    def control(self, flat: dict[str, Tensor]) -> dict[str, list[Tensor | None]] | None:
        """The ControlNet residuals among these flat tensors, or None. New lists: ComfyUI pops from their ends."""
        names = [name for name in self.lists if name.startswith(CONTROL)]
        return {name.removeprefix(CONTROL): self.listed(name, flat) for name in names} or None


def residuals(control: dict[str, list[Tensor | None]] | None) -> dict[str, list[Tensor | None]]:
    """A ControlNet's residuals as ``Arguments.lists``."""
    return {f"{CONTROL}{name}": items for name, items in (control or {}).items()}


def unconsumed(control: dict[str, list[Tensor | None]] | None) -> dict[str, list[Tensor | None]] | None:
    """A ControlNet's residuals in lists of their own: ComfyUI's forward empties those that it gets."""
    return control and {name: list(items) for name, items in control.items()}


def unknown_patches(given: Arguments, known: frozenset[str], where: str) -> str:
    """Why a call with patches of a kind that the mirrored forward does not call needs ComfyUI's own; "" if it has none.

    A newer ComfyUI may call patches that ours would pass over.
    """
    names = sorted(name for name, patches in given.options.get("patches", {}).items() if patches and name not in known)
    return say("unknown_patches", where=where, patches=", ".join(names)) if names else ""


class Plan(Protocol):
    """Which parts of one model may run on fused operations, decided once per sampling run."""

    survey: Any  # layers.Survey

    def constants(self) -> tuple[Tensor | None, ...]:
        """Device memory besides weights that the fused forward reads, once it has run."""


class Family(Protocol):
    """One module of this package. ``forward`` is pure, unless patches of other packs are not."""

    KIND: str  # in the stats
    MODEL: type  # the class whose ``_forward`` is mirrored; subclasses have others
    MIRRORED: tuple[str, ...]  # its methods whose work ``forward`` does itself
    LATENT_TO_PIXELS: int
    Plan: type

    def unsupported(self, model: nn.Module) -> str:
        """Why this ``MODEL`` is not of a form that is mirrored; "" if it is."""

    def arguments(self, *args: Any, **kwargs: Any) -> Arguments:
        """``MODEL._forward``'s arguments, taken apart."""

    def obstacle(self, arguments: Arguments) -> str:
        """Why only ComfyUI's own forward is right for this call, besides what holds for every family; "" if ours is."""

    def forward(
        self, ops: FusedOps, model: nn.Module, plan: Plan, arguments: Arguments, tensors: dict[str, Tensor]
    ) -> Tensor:
        """The fused forward on ``Arguments.flat`` tensors, which may be others than those of ``arguments``."""
