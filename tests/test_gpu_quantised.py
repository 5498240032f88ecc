"""Every form of quantised weights on a real GPU: recorded, captured, and as ComfyUI's own quantised forward.

comfy-kitchen takes its kernels for this card where it has some, and plain torch otherwise.
"""

import importlib.util

import pytest
import torch

from tools.driving import calls_of, compiled
from tools.on_gpu import SMALL_FLUX
from tools.oracles import expect, fallbacks, shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("clean_stats", "no_graphs_left"),
    pytest.mark.skipif(importlib.util.find_spec("comfy_kitchen") is None, reason="there is no comfy-kitchen"),
]

FORMS = ("int8", "convrot", "fp8", "mxfp8", "nvfp4", "w4a4", "w4a8")  # torch multiplies no two matrices of float8_e5m2
# A second picture: layers of one row are another kernel of the library's, and what several are cut into has gaps.
LATER = {"int8": 2, "fp8": 2}
RUN = {"width": 512, "height": 512, "tokens": 77, "steps": 3}
ANOTHER = {"width": 544, "height": 408, "tokens": 33}
FURTHER = {"width": 448, "height": 360, "tokens": 64}
TWO = {"width": 320, "height": 192, "batch": 2}


@pytest.mark.parametrize("form", FORMS)
def test_a_sampling_run(models, form, monkeypatch):
    from anyshape.accel import verify
    from anyshape.accel.tape import kernel_check

    from bench import zoo
    from tools.architectures import quantised

    if not quantised.has(zoo.FORMS[form]):
        pytest.skip("this ComfyUI has no such weights")
    patcher = zoo.make(f"flux-{form}", torch.bfloat16, **SMALL_FLUX)
    layer = patcher.model.diffusion_model.get_submodule("double_blocks.1.img_attn.qkv")
    assert type(layer.weight).__name__ == "QuantizedTensor"
    models.sample(patcher, **RUN)  # the process's first forward fills what libraries keep
    fast = compiled(patcher)
    outs = [models.sample(fast, **RUN)]
    with expect(recompiles=0, fallbacks=0):
        assert torch.equal(models.sample(fast, **RUN), outs[0])
        outs.append(models.sample(fast, **RUN | ANOTHER))
        checks = calls_of(monkeypatch, kernel_check, "are_right")
        outs.append(models.sample(fast, **RUN | FURTHER))
    assert len(checks) == 1  # its recording was a short one
    with expect(recompiles=LATER.get(form, 0)):
        outs.append(models.sample(fast, **RUN | TWO))
    for out, other in zip(outs, ({}, ANOTHER, FURTHER, TWO), strict=True):
        assert verify.compare(form, out.bfloat16(), models.sample(patcher, **RUN | other).bfloat16()), other
    assert [(s["state"], s["reason"]) for s in shapes()] == [("graph", "")] * 4 and fallbacks() == []


NARROW = {  # two blocks, whose layers are large enough to have int8 weights
    "ltxv-int8": {"num_layers": 2},
    "wan-int8": {"num_layers": 2, "dim": 1024, "num_heads": 8, "ffn_dim": 2816},
}


@pytest.mark.parametrize("name", NARROW)
def test_layers_that_a_model_calls_directly(models, name):
    """Newer ComfyUI hands an int8 layer what GELU is to be taken of, past torch's dispatcher."""
    from anyshape.accel import verify

    from bench import zoo

    patcher = zoo.make(name, torch.bfloat16, **NARROW[name])
    run = {"width": 256, "height": 192, "frames": 9, "tokens": 33, "steps": 4}
    wanted, fast = models.sample(patcher, **run).bfloat16(), compiled(patcher)
    for _ in range(2):
        assert verify.compare(name, models.sample(fast, **run).bfloat16(), wanted)
    assert [(s["state"], s["reason"]) for s in shapes()] == [("graph", "")] and fallbacks() == []
