"""Linear layers whose weights stay packed in blocks, 8 bits and a scale for each 32 numbers, as GGUF files have them.

As the packs do it that load such files: the weight is a tensor of a class of its own, which tells the sizes that it has
when it is unpacked, and the layer unpacks it in each forward. Call ``tools.embed.use_comfyui()`` first.
"""

from typing import Any

import comfy.model_management
import comfy.ops
import torch
from torch import Tensor, nn

BLOCK = 32  # numbers with one scale
BYTES = 2 + BLOCK  # a scale of 16 bits, then the numbers


class Packed(Tensor):
    """Bytes, with the sizes of what they stand for. Whatever torch makes of one is of this class too.

    As with ComfyUI-GGUF's, none is made without the sizes; torch makes its own past ``__init__``.
    """

    def __new__(cls, *args: Any, unpacked: torch.Size, **kwargs: Any) -> "Packed":
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, unpacked: torch.Size, **kwargs: Any) -> None:
        super().__init__()
        self.unpacked = unpacked

    def to(self, *args: Any, **kwargs: Any) -> "Packed":
        """As a tensor's, with the note."""
        out = super().to(*args, **kwargs)
        out.unpacked = getattr(self, "unpacked", None)
        return out

    def clone(self, *args: Any, **kwargs: Any) -> "Packed":
        """Itself: it is never changed."""
        return self

    detach = clone

    @property
    def shape(self) -> torch.Size:
        """The sizes that others reckon with."""
        return getattr(self, "unpacked", None) or self.size()


class Lora:
    """As ComfyUI's LoRAAdapter. weights: up [rows, rank] and down [rank, columns], wherever they were loaded to."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        self.loaded_keys, self.weights = {"up", "down"}, (up, down)

    def put_on(self, weight: Tensor, strength: float) -> Tensor:
        """``weight`` with its product added."""
        up, down = [comfy.model_management.cast_to_device(w, weight.device, torch.float32) for w in self.weights]
        weight += (strength * (up @ down)).type(weight.dtype)
        return weight


class PackedLinear(comfy.ops.manual_cast.Linear):
    """A linear layer with a packed weight, which notes what patches it. apart: it is unpacked by numpy.

    patches: factors, and lists of (strength, ``Lora``), with a name.
    """

    apart = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The weight is unpacked, used, and thrown away."""
        weight = self.weight.to(x.device)
        unpacked = _unpacked_apart(weight) if self.apart else _unpacked(weight, x.dtype)
        for patch in getattr(self.weight, "patches", ()):
            if isinstance(patch, float):
                unpacked = unpacked * patch
                continue
            unpacked = Tensor(unpacked)
            for strength, lora in patch[0]:
                unpacked = lora.put_on(unpacked, strength)
        weight = comfy.ops.cast_to(unpacked, x.dtype, x.device, non_blocking=False, copy=False)
        out = nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))
        return Tensor(out) if isinstance(out, Packed) else out


def pack(weight: Tensor) -> Packed:
    """A weight's bytes."""
    blocks = weight.detach().float().reshape(-1, BLOCK)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half().clamp(min=1e-4)
    numbers = (blocks / scale.float()).round().clamp(-127, 127).to(torch.int8)
    raw = torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], 1).reshape(len(weight), -1)
    return Packed(raw, unpacked=weight.shape)


def use(model: nn.Module, apart: bool = False) -> int:
    """Packs the weights of the model's linear layers; how many."""
    found = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer.weight.shape[1] % BLOCK == 0]
    for layer in found:
        layer.__class__, layer.apart = PackedLinear, apart
        layer.weight = nn.Parameter(pack(layer.weight), requires_grad=False)
    return len(found)


def put_lora(
    model: nn.Module, seed: int, strength: float = 1.0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """Notes a LoRA at every packed weight, as ComfyUI-GGUF does; none where it has no strength.

    device, dtype: of the LoRA.
    """
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: (torch.randn(*shape, generator=generator) * 0.2).to(device, dtype)  # noqa: E731
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Packed):
            lora = Lora(randn(weight.shape[0], 4), randn(4, weight.shape[1]))
            weight.patches = [([(strength, lora)], path)] if strength else []


def _unpacked(packed: Packed, dtype: torch.dtype) -> Tensor:
    rows = packed.data.reshape((-1, packed.data.shape[-1])).view(torch.uint8)
    scale, numbers = torch.split(rows.reshape(-1, BYTES), [2, BLOCK], dim=1)
    return (scale.view(torch.float16).to(dtype) * numbers.view(torch.int8)).reshape(packed.unpacked)


def _unpacked_apart(packed: Packed) -> Tensor:
    rows = Tensor(packed).cpu().numpy().reshape(-1, BYTES)
    scale = rows[:, :2].copy().view("float16").astype("float32")
    return torch.from_numpy(scale * rows[:, 2:].copy().view("int8")).reshape(packed.unpacked)
