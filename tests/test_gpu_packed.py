"""Packed weights (GGUF) on a real GPU, with a LoRA that lies in main memory and is put on them at each call."""

import pytest
import torch

from tools.driving import compiled
from tools.on_gpu import small
from tools.oracles import error, fallbacks, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left", "exact_float32")]

SIZES = [(512, 512, 1), (544, 408, 2), (728, 720, 1), (512, 512, 1)]
CLOSE = 2.5e-2
CHANGED = 0.1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lora_comes_and_goes(models, device):
    """Where it is copied to the GPU at each call there is no graph, and a note says so; else there is one."""
    from anyshape.accel.reasons import say

    from tools import packed

    patcher = small(models, "flux", torch.bfloat16)
    models.sample(patcher, 256, 256, steps=1)  # its weights are on the GPU from here on
    model = patcher.model.diffusion_model
    assert packed.use(model) > 20
    fast, plain = compiled(patcher), {}
    for strength in (0.0, 1.0, 0.5, 0.0):
        packed.put_lora(model, 3, strength, device)
        for seed, (width, height, batch) in enumerate(SIZES):
            at = dict(width=width, height=height, batch=batch, steps=4, seed=seed)
            wanted = models.sample(patcher, **at)
            assert error(models.sample(fast, **at), wanted) < CLOSE
            before = plain.setdefault(seed, wanted)
            assert (error(wanted, before) > CHANGED) == bool(strength)
        said = {(shape["state"], shape["note"]) for shape in shapes()}
        apart = strength and device == "cpu"
        assert said == ({("tape", say("patches_fetched"))} if apart else {("graph", "")})
    assert not fallbacks()
