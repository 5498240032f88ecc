"""A small model with another pack's layers, which compute past torch: for the tests of those."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from tools import patching
from tools.driving import sample_tiny
from tools.oracles import error, fallbacks

NAME = "ZImage"
SIZES = ((8, 8), (10, 6), (6, 14), (8, 12), (8, 8))  # of latents
CLOSE = 1e-5  # relative L2 in fp32
Patcher = Any  # comfy.model_patcher.ModelPatcher; ComfyUI is imported when the tests' fixtures say so
Kind = Callable[[nn.Linear], nn.Module]


def past_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product, as a pack's own kernel gives it."""
    return patching.past_torch(lambda: nn.functional.linear(x, weight, bias))


class Layer(nn.Module):
    """A pack's, in the place of a linear layer of the model's."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return past_torch(x, self.weight, self.bias)


def swap(patcher: Patcher, kind: Kind, where: Sequence[str] = ("feed_forward",)) -> Patcher:
    """The model with what ``kind`` makes of its linear layers, in parts whose names contain a word of ``where``."""
    for name, part in list(patcher.model.diffusion_model.named_modules()):
        for own, layer in list(part.named_children()):
            if isinstance(layer, nn.Linear) and any(word in name for word in where):
                setattr(part, own, kind(layer))
    return patcher


def make(kind: Kind, where: Sequence[str] = ("feed_forward",)) -> Patcher:
    """A tiny model with such layers."""
    from tools.architectures import patchers

    return swap(patchers.make(NAME, blocks=4), kind, where)


def check(
    plain: Patcher, fast: Patcher, sizes: Sequence[tuple[int, int]] = SIZES, near: float = 0.0, **run: Any
) -> None:
    """Each size, at which the two differ by no more than ``near``. run: of ``sample_tiny``."""
    for seed, (height, width) in enumerate(sizes):
        given = {"name": NAME, "seed": seed, "height": height, "width": width, "steps": 2} | run
        assert error(sample_tiny(fast, **given), sample_tiny(plain, **given)) <= near, (height, width, fallbacks())


def layer_calls(patcher: Patcher) -> tuple[int, int]:
    """How many steps of a recording are calls of layers; how many blocks were copied."""
    from anyshape.accel.tape.layer_calls import LayerCall
    from anyshape.accel.tapes import Tapes

    found: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        record = Tapes.record

        def recording(*args: Any, **kwargs: Any) -> Any:
            out, take, tape = record(*args, **kwargs)
            found.append((sum(isinstance(each.func, LayerCall) for each in tape.operations), take.copies))
            return out, take, tape

        patch.setattr(Tapes, "record", recording)
        sample_tiny(patcher, NAME, height=16, width=16)
    return found[-1]
