"""Layers of other packs that start Triton kernels of their own, on a GPU: in graphs, at any size."""

import pytest
import torch
import triton
import triton.language as tl
from torch import nn

from tools.driving import compiled, sample_tiny
from tools.oracles import error, fallbacks, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats")]

NAME = "ZImage"
SIZES = ((32, 32), (40, 24), (24, 56), (32, 32))  # of latents
NEAR = 0.02  # in bfloat16, where fused kernels round otherwise within a block


@triton.autotune(configs=[triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["n"])
@triton.jit
def halved(x, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, mask=place < n) * 0.5, mask=place < n)


class Layer(nn.Module):
    """In the place of a linear layer: of twice the weight, halved by a kernel that torch knows nothing of."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x):
        found = nn.functional.linear(x, self.weight * 2, self.bias if self.bias is None else self.bias * 2)
        out = torch.empty_like(found)
        halved[lambda meta: (triton.cdiv(found.numel(), meta["BLOCK"]),)](found, out, found.numel())
        return out


def make():
    from tools.architectures import patchers

    patcher = patchers.make(NAME, torch.bfloat16, "cuda", blocks=4)
    for name, part in list(patcher.model.diffusion_model.named_modules()):
        for own, layer in list(part.named_children()):
            if isinstance(layer, nn.Linear) and ("feed_forward" in name or "attention" in name):
                setattr(part, own, Layer(layer))
    return patcher


def check(plain, fast):
    for seed, (height, width) in enumerate(SIZES):
        run = {"name": NAME, "seed": seed, "height": height, "width": width, "steps": 4}
        assert error(sample_tiny(fast, **run), sample_tiny(plain, **run)) < NEAR, (height, width, fallbacks())


def test_in_graphs_at_any_size():
    plain, ours = make(), make()
    fast = compiled(ours)
    check(plain, fast)
    assert {shape["state"] for shape in shapes()} == {"graph"} and not fallbacks()
    before = sample_tiny(plain, NAME, height=32, width=32)
    for patcher in (plain, ours):  # graphs read the old one's memory
        layer = patcher.model.diffusion_model.layers[1].feed_forward.w1
        layer.weight = nn.Parameter(layer.weight.data * -1.5, requires_grad=False)
    assert error(sample_tiny(plain, NAME, height=32, width=32), before) > NEAR
    check(plain, fast)
    assert {shape["state"] for shape in shapes()} == {"graph"} and not fallbacks()
