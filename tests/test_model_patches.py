"""ComfyUI's nodes that hang a network into a transformer, or guide one: eager's picture, and how fast."""

import pytest
import torch

from tools import architectures
from tools.driving import compiled
from tools.oracles import error, fallbacks, shapes
from tools.patching import CHANGED

pytestmark = [
    pytest.mark.usefixtures("clean_stats"),
    pytest.mark.skipif(architectures.is_older(), reason="it has few of these nodes"),
]
NAMES = (
    "QwenImageDiffsynthControlnet", "ZImageFunControlnet", "ZImageFunControlnet 2", "WanUni3CControlnetApply",
    "AnimaLLLiteApply", "AnimaLLLiteApply, a range", "USOStyleReference", "NAGuidance", "NAGuidance, UNet",
    "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiT, Wan", "LTXVSpatioTemporalGuidance", "LTXVModalityGuidance",
    "CFGOverride",
)  # fmt: skip
SIZES = (128, 192, 128)


def test_every_node_is_here(pack):
    from tools.model_patches import NODES

    assert set(NODES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_as_without_us(models, name):
    check(models, name, 0.0, "tape")


@pytest.mark.parametrize("name", ["QwenImageDiffsynthControlnet", "ZImageFunControlnet", "WanUni3CControlnetApply"])
def test_two_of_a_kind(models, name):
    """The second one writes into what the first one gave back, which nobody else has any more."""
    check(models, name, 0.0, "tape", times=2)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_graphs_left")
@pytest.mark.parametrize("name", NAMES)
def test_from_graphs(models, name):
    """In bf16; a patch that is called runs between the pieces of a graph."""
    check(models, name, 0.05, "graph", dtype=torch.bfloat16, device="cuda")


def check(models, name, close, state, times=1, **where):
    """Two sizes, and the first one again. close: how far from eager's pictures. times: how often the node is there."""
    from tools.architectures import patchers
    from tools.model_patches import NODES

    kind, apply, run = NODES[name]
    patcher = patchers.make(kind, **where)
    plain, fast = patcher, compiled(patcher)
    try:
        for _ in range(times):
            plain, fast = apply(plain), apply(fast)
    except (ImportError, AttributeError) as missing:
        pytest.skip(f"this ComfyUI has no such node: {missing}")
    for seed, width in enumerate(SIZES):
        at = dict(width=width, height=128, steps=3, seed=seed, tokens=24) | run
        wanted, out, without = (parts(models.sample(each, **at)) for each in (plain, fast, patcher))
        assert max(map(error, out, wanted)) <= close, fallbacks()
        assert max(map(error, wanted, without)) > CHANGED
    assert {shape["state"] for shape in shapes()} == {state} and not fallbacks()


def parts(out):
    """A latent, or those of pictures and sound."""
    return [out] if isinstance(out, torch.Tensor) else out.unbind()
