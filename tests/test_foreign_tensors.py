"""Tensors that another pack's code in a model has, a LoRA's, say: in objects, in closures, in lists of modules.

A replay reads them where they lie, and another tensor in the place of one makes another recording.
"""

import sys
import types

import pytest
import torch
from torch import nn

from tools.driving import compiled
from tools.oracles import error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats", "fusing")
RUN = {"width": 64, "height": 64, "steps": 2, "tokens": 8}
CLOSE = 1e-5  # relative L2 in fp32
APART = 1e-3
PACK = "custom_nodes.a_pack"
PAIRS, LISTS = ["object", "hook"], ["modules", "in its place"]  # ways in which a pack has tensors


class Pair:
    """A LoRA of one layer."""

    def __init__(self, width: int) -> None:
        self.down, self.up = 0.1 * torch.randn(4, width), 0.1 * torch.randn(width, 4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.down.T @ self.up.T


class Several(nn.Module):
    """LoRAs in a list, which torch does not know as parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.loras = [nn.Linear(width, width, bias=False).requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(lora(x) for lora in self.loras)


class Around(nn.Module):
    """A layer of a pack's in the place of ComfyUI's."""

    def __init__(self, layer: nn.Module, extra: nn.Module) -> None:
        super().__init__()
        self.layer, self.extra = layer, extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return out + self.extra(out)


@pytest.fixture(autouse=True)
def pack_of_another(monkeypatch):
    monkeypatch.setitem(sys.modules, PACK, types.ModuleType(PACK))
    for kind in (Pair, Several, Around):
        monkeypatch.setattr(kind, "__module__", PACK)


def put(block: nn.Module, way: str) -> Pair | Several:
    """Has a block's attention give more than it does. Gives what computes that."""
    layer = block.attention.out
    extra = (Pair if way in PAIRS else Several)(layer.weight.shape[0])
    if way == "hook":
        layer.register_forward_hook(lambda module, args, out: out + extra(out))
    elif way == "in its place":
        block.attention.out = Around(layer, extra)
    else:
        own = layer.forward
        layer.forward = lambda x: (lambda out: out + extra(out))(own(x))
    return extra


@pytest.fixture(params=PAIRS + LISTS)
def made(tiny, request):
    """(A model, what the pack has put into each of its blocks)."""
    patcher = tiny("ZImage", fresh=True)
    torch.manual_seed(1)
    return patcher, [put(block, request.param) for block in patcher.model.diffusion_model.layers]


def tensor_of(extra):
    return extra.up if isinstance(extra, Pair) else extra.loras[0].weight


def assert_same(models, fast, patcher):
    wanted = models.sample(patcher, **RUN)
    assert error(models.sample(fast, **RUN), wanted) < CLOSE
    return wanted


def test_the_whole_is_recorded(models, made, recordings):
    patcher, extras = made
    fast = compiled(patcher)
    before = assert_same(models, fast, patcher)
    assert shapes()[0]["state"] == "tape" and not shapes()[0]["note"] and not fallbacks()
    for extra in extras:
        tensor_of(extra).mul_(3.0)  # in its place
    assert error(assert_same(models, fast, patcher), before) > APART
    assert len(recordings) == 1


def test_another_tensor(models, made, recordings):
    """As an attribute, as the memory of a tensor, in a list: what was recorded before serves no more."""
    patcher, extras = made
    fast, pictures = compiled(patcher), []
    for turn in range(3):
        pictures.append(assert_same(models, fast, patcher))
        assert len(recordings) == turn + 1 and not fallbacks()
        for extra in extras:
            new = 0.1 * torch.randn(tensor_of(extra).shape, generator=torch.Generator().manual_seed(turn))
            if turn:
                tensor_of(extra).data = new
            elif isinstance(extra, Pair):
                extra.up = new
            else:
                extra.loras[0] = nn.Linear(*new.shape, bias=False).requires_grad_(False)
    pictures.append(assert_same(models, fast, patcher))
    assert all(error(one, other) > APART for one, other in zip(pictures, pictures[1:], strict=False))


@pytest.mark.parametrize("made", LISTS, indirect=True)
def test_one_more_and_one_less(models, made):
    patcher, extras = made
    fast, first = compiled(patcher), assert_same(models, compiled(patcher), patcher)
    for extra in extras:
        extra.loras.append(nn.Linear(*extra.loras[0].weight.shape, bias=False).requires_grad_(False))
    assert error(assert_same(models, fast, patcher), first) > APART
    for extra in extras:
        del extra.loras[1]
    assert error(assert_same(models, fast, patcher), first) < CLOSE and not fallbacks()


@pytest.mark.parametrize("made", PAIRS, indirect=True)
@pytest.mark.parametrize("what", ["write", "keep"])
def test_code_that_writes_there(models, made, what):
    """What a replay would not do is not recorded."""
    patcher, extras = made

    def computes(self: Pair, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.down.T @ self.up.T
        if what == "write":
            self.up.mul_(0.9)
        else:
            self.up = self.up * 0.9
        return out

    first = [extra.up.clone() for extra in extras]
    pictures = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pair, "__call__", computes)
        for model in (patcher, compiled(patcher)):
            for extra, up in zip(extras, first, strict=True):
                extra.up = up.clone()
            pictures.append([models.sample(model, **RUN) for _ in range(2)])
    assert all(error(ours, wanted) < CLOSE for ours, wanted in zip(*reversed(pictures), strict=True))
    assert error(*pictures[0]) > APART
