"""Weights of a tensor class of another pack's, which its layers unpack in each forward, as GGUF files are run."""

import pytest
import torch

from tools.driving import FLUX_RUN, SMALL_FLUX, compiled, randn
from tools.oracles import error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

RUN = FLUX_RUN | {"steps": 2}
OTHER = RUN | {"width": 160}
CLOSE = 1e-5  # relative L2 in fp32


def flux(models, apart=False):
    from tools import packed

    patcher = models.flux(torch.float32, **SMALL_FLUX)
    assert packed.use(patcher.model.diffusion_model, apart) > 30
    return patcher


@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_unpacked_by_torch_they_are_on_the_tape(models, recordings, mode):
    patcher = flux(models)
    wanted = [models.sample(patcher, **run) for run in (RUN, OTHER)]
    fast = compiled(patcher, mode=mode)
    for _ in range(2):
        for run, eager in zip((RUN, OTHER), wanted, strict=True):
            assert torch.equal(models.sample(fast, **run), eager)
    assert {shape["state"] for shape in shapes()} == {"tape"} and fallbacks() == []
    assert len(recordings) == 2


@pytest.mark.usefixtures("fusing")
def test_with_fused_kernels(models, recordings):
    patcher = flux(models)
    fast = compiled(patcher)
    assert error(models.sample(fast, **RUN), models.sample(patcher, **RUN)) < CLOSE
    assert {shape["state"] for shape in shapes()} == {"tape"} and len(recordings) == 1


def test_another_weight_needs_no_new_recording(models, recordings):
    from tools import packed

    patcher = flux(models)
    fast = compiled(patcher)
    first = models.sample(fast, **RUN)
    layer = patcher.model.diffusion_model.get_submodule("double_blocks.0.img_attn.proj")
    layer.weight = torch.nn.Parameter(packed.pack(randn(*layer.weight.shape, seed=1) * 0.3), requires_grad=False)
    out = models.sample(fast, **RUN)
    assert torch.equal(out, models.sample(patcher, **RUN)) and error(out, first) > 1e-3
    assert len(recordings) == 1


def test_blocks_are_alike_if_their_weights_say_the_same(models):
    from anyshape.accel.tape.blocks import likeness

    blocks = flux(models).model.diffusion_model.single_blocks
    assert len({likeness(block) for block in blocks}) == 1
    blocks[1].linear1.weight.patches = [2.0]
    assert len({likeness(block) for block in blocks}) == 2


@pytest.mark.parametrize("in_mid_run", [False, True])
def test_a_note_at_a_weight_that_its_layer_reads(models, recordings, in_mid_run):
    """As a LoRA is put on packed weights: the model is the same, its weights lie where they lay."""
    patcher = flux(models)
    fast = compiled(patcher)
    plain = models.sample(fast, **RUN)
    weight = patcher.model.diffusion_model.get_submodule("double_blocks.0.img_attn.proj").weight

    def put(*_):
        weight.patches = [2.0]

    weight.patches = []
    assert torch.equal(models.sample(fast, **RUN), plain)
    if in_mid_run:
        out = models.sample(fast, **RUN, callback=put)
        weight.patches = []
        eager = models.sample(patcher, **RUN, callback=put)
    else:
        put()
        out, eager = models.sample(fast, **RUN), models.sample(patcher, **RUN)
    assert torch.equal(out, eager) and error(out, plain) > 1e-3
    weight.patches = []
    assert torch.equal(models.sample(fast, **RUN), plain)


def test_unpacked_apart_from_torch_they_run_as_in_comfyui(models):
    """The picture is ComfyUI's, and the reason names the code that did it."""
    patcher = flux(models, apart=True)
    fast = compiled(patcher)
    wanted = models.sample(patcher, **RUN)
    assert torch.equal(models.sample(fast, **RUN), wanted) and torch.equal(models.sample(fast, **RUN), wanted)
    reasons = [fallback["reason"] for fallback in fallbacks()]
    assert reasons and all("came back" in reason and "tools/packed.py" in reason for reason in reasons), reasons


def test_the_tools_weights_are_what_they_stand_for(pack):
    from tools import packed

    weight = randn(48, 64)
    unpacked = packed._unpacked(packed.pack(weight), torch.float32)
    assert unpacked.shape == weight.shape and error(torch.Tensor(unpacked), weight) < 1e-2
