"""The key of a call: the smallest description that decides which captured graph fits it."""

import functools
import zlib
from dataclasses import dataclass, field

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
    """Calls with equal keys have equal programs: a graph captured for one may be replayed for the other.

    Weights are not part of it. They decide whether a captured graph is still valid (``weights.fingerprint``), not
    which one fits.
    """

    device: torch.device
    inputs: tuple[TensorSpec, ...]  # in the order of the call's inputs, absent ones left out
    # how they are nested (how many residuals a ControlNet gave), and plain values that decide the program
    structure: tuple[tuple[str, int | str], ...] = ()
    # of a run that skips blocks: "full" | "skipped", and the forward that ComfyUI makes in this one's place
    step: str = field(default="", compare=False)
    instead_of: "ShapeKey | None" = field(default=None, compare=False)

    @property
    def own(self) -> str:
        """That of ComfyUI's forward, by which its time is known."""
        return str(self.instead_of or self)

    def __str__(self) -> str:
        """What a person wants to see, and a check sum of the rest where that is not as usual."""
        return _shown(self, self.device.type == "cpu" and torch.cuda.is_available())


@functools.lru_cache(maxsize=512)  # asked for at each call, and most are of a size that ran before
def _shown(key: ShapeKey, beside_gpu: bool) -> str:
    """``str`` of the key. beside_gpu: it is of the processor, where there is a GPU as well."""
    dtype, hidden = key.inputs[0].dtype, []
    parts = []
    for spec in key.inputs:
        text = f"{spec.name}[{'x'.join(map(str, spec.shape))}]"
        if spec.name == "timesteps" or spec.name.startswith("control."):
            usual = spec.name == "timesteps" and spec.shape == key.inputs[0].shape[:1]
            hidden += [] if usual and spec.dtype in (dtype, torch.float32) else [f"{text} {spec.dtype}"]
        else:
            parts.append(text if spec.dtype == dtype else f"{text}:{_short(spec.dtype)}")
    for name, value in key.structure:
        if value == "None":
            hidden.append(name)
        elif name == "control" or (name.startswith("control.") and name.endswith(" strides")):
            hidden.append(f"{name} {value}")
        else:
            parts.append(f"{name}{'*' if isinstance(value, int) else '='}{value}")
    parts.append(_short(dtype))
    if hidden:
        parts.append(f"#{zlib.crc32(repr(hidden).encode()):08x}")
    if key.device.index or beside_gpu:
        parts.append(f"on {key.device}")
    return " ".join(parts)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_key(inputs: dict[str, Tensor], structure: dict[str, int | str] | None = None) -> ShapeKey:
    """Returns the key of a call with these inputs. The first input decides the device."""
    first = next(iter(inputs.values()))
    specs = tuple(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in inputs.items())
    return ShapeKey(first.device, specs, tuple((structure or {}).items()))
