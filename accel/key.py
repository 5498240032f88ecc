"""The smallest description of a call that decides which captured graph fits it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """What a graph's static input must agree in with the tensor that is copied into it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ShapeKey:
    """Equal keys, equal programs: a graph captured for one call may be replayed for the other.

    Weights are not part of it. They decide whether a captured graph is still valid (``weights.fingerprint``), not
    which one fits.
    """

    device: torch.device
    inputs: tuple[TensorSpec, ...]  # in the order of the call's inputs, absent ones left out
    # how the family nests them (how many residuals a ControlNet gave), and values that decide its program
    structure: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        shown = [s for s in self.inputs if s.name != "timesteps" and not s.name.startswith("control.")]
        parts = [f"{s.name}[{'x'.join(map(str, s.shape))}]" for s in shown]
        parts += [f"{name}{'*' if isinstance(value, int) else '='}{value}" for name, value in self.structure]
        return f"{' '.join(parts)} {str(self.inputs[0].dtype).removeprefix('torch.')}"


def shape_key(inputs: dict[str, Tensor], structure: dict[str, int | str] | None = None) -> ShapeKey:
    """The key of a call with these inputs; the first one says the device."""
    first = next(iter(inputs.values()))
    specs = tuple(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in inputs.items())
    return ShapeKey(first.device, specs, tuple((structure or {}).items()))
