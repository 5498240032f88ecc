"""Skip Blocks on a real GPU: with graphs, at odd sizes, without waiting for the GPU, and its memory given back."""

import gc
from collections import Counter

import pytest
import torch

from tools.driving import compiled, sample_tiny, skipping
from tools.on_gpu import SMALL
from tools.oracles import counted, error, expect, last_run, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left")]

SIZES = [(960, 720), (728, 720), (544, 408), (512, 512)]


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.parametrize("forecast", ["order1", "off"])
def test_compiled_and_captured_is_the_same_run_as_eager(models, name, forecast):
    """Steps full and skipped, each from its own graph, at odd sizes: the latent of the same run in eager."""

    patcher = models.unet(name, torch.float16, **SMALL)
    eager = skipping(patcher, forecast=forecast)
    fast = compiled(eager)
    models.sample(fast, 512, 512, steps=9)
    with expect(recompiles=0, fallbacks=0):
        outs = [models.sample(fast, width, height, steps=12) for width, height in SIZES]
    assert {s["state"] for s in shapes()} == {"graph"}
    assert sum(s["replays"] for s in shapes()) >= len(SIZES) * (3 + 7)
    for out, (width, height) in zip(outs, SIZES, strict=True):
        with expect(fallbacks=0):  # without Compile Model no graph is missed
            assert error(out, models.sample(eager, width, height, steps=12)) < 2e-2, (width, height)
        assert counted() == {"full": 4, "skipped": 8, "resets": {}}


def test_a_run_in_full_is_eager_to_the_bit(models):
    patcher = models.unet("sdxl", torch.float16, **SMALL)
    with torch.backends.cudnn.flags(deterministic=True):  # or two runs of eager differ, too
        for width, height in SIZES:
            models.sample(patcher, width, height, steps=3)  # as the first one of a size does
            outs = [models.sample(p, width, height, steps=3) for p in (patcher, skipping(patcher, interval=1))]
            assert torch.equal(*outs), (width, height)


def test_no_step_waits_for_the_gpu(models):
    """The sampler runs ahead of the GPU as it does without the node; once, before the first step, sigmas are read."""
    patcher = models.unet("sd15", torch.float16, **SMALL)
    plain, ours = (_synchronisations(models, p) for p in (patcher, skipping(patcher)))
    assert len(ours) <= len(plain) + 1, Counter(ours) - Counter(plain)


def _synchronisations(models, patcher):
    """Where the host waits in a second run."""
    import warnings

    models.sample(patcher, 256, 256, steps=12)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            models.sample(patcher, 256, 256, steps=12)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


def test_features_are_given_back(models):
    patcher = models.unet("sdxl", torch.float16, **SMALL)
    fast = skipping(patcher)
    models.sample(fast, 512, 512, steps=12)
    gc.collect()
    before = torch.cuda.memory_allocated()
    models.sample(fast, 512, 512, steps=12)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert last_run()["bytes"] > 0


@pytest.mark.parametrize("name", ["Flux", "ZImage", "WAN21_T2V"])
def test_a_transformer_in_two_programs(name):
    """Each with a graph of its own, at sizes that follow one another; the latent of the same run without graphs."""
    from tools.architectures import patchers

    def sample(patcher, height, width):
        return sample_tiny(patcher, name, height=height, width=width, steps=12)

    patcher = patchers.make(name, torch.bfloat16, "cuda", blocks=6)
    sizes, fast = [(16, 20), (23, 18), (16, 20)], compiled(skipping(patcher))
    outs = [sample(fast, *size) for size in sizes]
    assert counted() == {"full": 4, "skipped": 8, "resets": {}}
    assert {s["state"] for s in shapes()} == {"graph"} and len(shapes()) == 4
    assert torch.equal(outs[0], outs[2])
    for out, size in zip(outs, sizes, strict=True):
        assert error(out, sample(skipping(patcher), *size)) < 0.1, size
