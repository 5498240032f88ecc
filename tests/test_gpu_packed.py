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


@pytest.mark.parametrize("device, budget", [("cpu", 2048), ("cpu", 0), ("cuda", 2048)])
def test_a_lora_comes_and_goes(models, device, budget):
    """It stays on the GPU where the budget allows it. Otherwise there is no graph with it, and a note says so."""
    from anyshape.accel import graphs
    from anyshape.accel.reasons import say
    from anyshape.accel.tape.binding import _COPIES

    from tools import packed

    patcher = small(models, "flux", torch.bfloat16)
    models.sample(patcher, 256, 256, steps=1)  # its weights are on the GPU from here on
    model = patcher.model.diffusion_model
    assert packed.use(model) > 20
    fast, plain, made = compiled(patcher, graph_budget_mb=budget), {}, []
    for strength in (0.0, 1.0, 0.5, 0.0):
        packed.put_lora(model, 3, strength, device)
        for seed, (width, height, batch) in enumerate(SIZES):
            at = dict(width=width, height=height, batch=batch, steps=4, seed=seed)
            wanted = models.sample(patcher, **at)
            assert error(models.sample(fast, **at), wanted) < CLOSE
            before = plain.setdefault(seed, wanted)
            assert (error(wanted, before) > CHANGED) == bool(strength)
        states, notes = ({shape[what] for shape in shapes()} for what in ("state", "note"))
        assert states == {"graph" if budget else "tape"}
        assert all("LoRA" in note for note in notes) == bool(strength and not budget)
        if strength:
            sizes = {copy.data_ptr(): copy.nbytes for copy in list(_COPIES.values())}
            wanted = sum(tensor.nbytes for layer in model.modules() for tensor in _tensors_of(layer))
            made.append(sum(sizes.values()) // wanted if device == "cpu" and budget else len(sizes))
    if device == "cpu" and budget:  # one for all sizes; graphs hold what was there before, for it may come again
        assert made[0] == 1 and made[1] in (1, 2)
    else:
        assert made == [0, 0]
    assert {fallback["reason"] for fallback in fallbacks()} == (set() if budget else {say("no_graphs")})
    assert graphs.cache(next(model.parameters()).device).used_bytes <= budget << 20


def test_a_lora_that_is_written_into_counts_from_the_next_run_on(models):
    """Graphs of two sizes read one copy of it."""
    from tools import packed

    patcher = small(models, "flux", torch.bfloat16)
    models.sample(patcher, 256, 256, steps=1)
    model = patcher.model.diffusion_model
    packed.use(model)
    packed.put_lora(model, 3)
    fast, before = compiled(patcher), []
    tensors = [tensor for layer in model.modules() for tensor in _tensors_of(layer)]
    for times in range(3):
        for seed, (width, height, batch) in enumerate(SIZES[:2]):
            at = dict(width=width, height=height, batch=batch, steps=4, seed=seed)
            out = models.sample(fast, **at)
            assert error(out, models.sample(patcher, **at)) < CLOSE
            assert times == 0 or error(out, before[-2]) > CHANGED
            before.append(out)
        with torch.inference_mode():
            for tensor in tensors:
                tensor.mul_(-2.0 if tensor.shape[0] > tensor.shape[1] else 1.0)
    assert {shape["state"] for shape in shapes()} == {"graph"} and not fallbacks()


def _tensors_of(layer):
    notes = getattr(getattr(layer, "weight", None), "patches", ())
    return [tensor for patches, _ in notes for _, lora in patches for tensor in lora.weights]
