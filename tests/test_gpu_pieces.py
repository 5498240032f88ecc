"""Graphs in pieces on a real GPU: patches of other packs, called between them, with both of torch's allocators."""

import os
import subprocess
import sys

import pytest
import torch

from tools.adapters import Adapter, attending, counting, tripled, widths
from tools.driving import compiled
from tools.gpu_captures import FLOATS, MIB, capture, in_use
from tools.on_gpu import small
from tools.oracles import error, fallbacks, shapes
from tools.patching import with_patch
from tools.paths import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left", "exact_float32")]

SIZES = [(512, 512, 1), (544, 408, 2), (728, 720, 1), (512, 512, 1)]
CLOSE = {"sd15": 1e-2, "flux": 2.5e-2}


def assert_close(models, name, eager, fast, **changes):
    out, wanted = (models.sample(each, **changes) for each in (fast, eager))
    assert error(out, wanted) < CLOSE[name]


def test_patches_run_between_the_pieces(models):
    """Sizes and batches in turns, with another graph of the same pool in between."""
    patcher, called, expected = small(models, "sd15"), [], []
    plain = compiled(patcher)
    eager, fast = with_patch(patcher, counting(expected)), with_patch(compiled(patcher), counting(called))
    for seed, (width, height, batch) in enumerate(SIZES * 2):
        at = dict(width=width, height=height, batch=batch, steps=4, seed=seed)
        assert_close(models, "sd15", eager, fast, **at)
        assert called == expected
        assert_close(models, "sd15", patcher, plain, **at)
    assert {shape["state"] for shape in shapes()} == {"graph"} and not fallbacks()


def test_a_tensor_that_a_patch_gets_twice_is_one_tensor(models):
    patcher, called, expected = small(models, "sd15"), [], []
    eager, fast = with_patch(patcher, tripled(expected)), with_patch(compiled(patcher), tripled(called))
    for seed, (width, height, batch) in enumerate(SIZES):
        assert_close(models, "sd15", eager, fast, width=width, height=height, batch=batch, steps=4, seed=seed)
    assert called == expected and all(expected)
    assert {shape["state"] for shape in shapes()} == {"graph"} and not fallbacks()


def test_an_adapter_needs_no_pieces(models, recordings):
    """Its layers are on the tape and its range of steps is a guard: whole graphs, of the latest image alone."""
    from anyshape.accel import stats

    patcher, taken = small(models, "sd15", torch.float32), []
    adapter = Adapter(widths(models, patcher)).to("cuda")
    fast = compiled(patcher)
    graphs, made = [], []
    for image in range(4):
        patch = attending(adapter, image, start=8.0, end=0.5)
        for seed, (width, height, batch) in enumerate(SIZES):
            at = dict(width=width, height=height, batch=batch, steps=8, seed=seed)
            assert_close(models, "sd15", with_patch(patcher, patch), with_patch(fast, patch), **at)
        graphs.append(stats.snapshot()["graphs"]["used_bytes"])
        made.append(len(recordings))
        taken.append(in_use() - graphs[-1])
    assert {(shape["state"], shape["note"]) for shape in shapes()} == {("graph", "")} and not fallbacks()
    assert taken[-1] - taken[1] <= 32 * MIB and graphs[-1] <= graphs[0] + 32 * MIB
    assert made[-1] == made[0]  # another image is no other recording


def test_another_packs_attention_runs_between_the_pieces(models):
    def attention(patcher):
        calls = []

        def override(function, q, k, v, heads, *args, **kwargs):
            calls.append(1)
            return function(q, k, v * (1 + len(calls) / 1000), heads, *args, **kwargs)

        patcher.model_options["transformer_options"]["optimized_attention_override"] = override

    patcher = small(models, "flux", torch.bfloat16)
    eager, fast = with_patch(patcher, attention), with_patch(compiled(patcher), attention)
    for seed, (width, height, batch) in enumerate(SIZES):
        assert_close(models, "flux", eager, fast, width=width, height=height, batch=batch, steps=4, seed=seed)
    assert {shape["state"] for shape in shapes()} == {"graph"}


def test_the_noise_level_is_read_once_per_forward(models, monkeypatch):
    """However often patches ask: each reading would wait for the GPU. In the first forward they are not known yet."""
    from anyshape.accel.tape.noise_level import NoiseLevel

    made, readings, called = NoiseLevel.made, [], []

    def counted(tensor, source, host):
        return made(tensor, source, lambda: readings.append(getattr(host, "__name__", "")) or host())

    patcher = compiled(small(models, "sd15"))
    monkeypatch.setattr(NoiseLevel, "made", staticmethod(counted))
    models.sample(with_patch(patcher, counting(called)), 512, 512, steps=6)
    assert readings.count("cpu") == 5 < len(called) / 2 and shapes()[-1]["replays"] > 2


def test_what_a_patch_keeps_stays_as_it_was(models):
    kept = []
    fast = with_patch(compiled(small(models, "sd15")), counting([], lambda q: kept.append((q, q.clone()))))
    for seed in range(2):
        models.sample(fast, 512, 512, steps=3, seed=seed)
    assert shapes()[-1]["replays"] and all(torch.equal(tensor, copy) for tensor, copy in kept)


def test_memory_that_patches_take_and_free_in_between(models):
    """It is not the graph's, whose later pieces find what earlier ones made. Nothing grows from replay to replay."""
    patcher = small(models, "sd15")

    def noted(q):
        taken = [torch.full_like(q, float("nan")) for _ in range(8)]
        del taken

    eager, fast = with_patch(patcher, counting([])), with_patch(compiled(patcher), counting([], noted))
    before = 0
    for seed in range(6):
        assert_close(models, "sd15", eager, fast, width=544, height=408, steps=4, seed=seed)
        if seed == 1:
            before = in_use()
    assert in_use() - before <= 4 * MIB and shapes()[-1]["replays"] > 10


def test_a_replay_that_a_patch_breaks_off(models):
    """Its result has another form at one step. Others' graphs go on, and no memory is lost."""
    calls = []

    def odd(patcher):
        def patch(n, k, v, options):
            calls.append(1)
            return (list if len(calls) in (40, 90) else tuple)((n * 1.01, k, v))

        patcher.set_model_attn2_patch(patch)

    patcher = small(models, "sd15")
    plain, eager, fast = compiled(patcher), with_patch(patcher, odd), with_patch(compiled(patcher), odd)
    wanted = models.sample(eager, 512, 512, steps=4)
    for _ in range(6):
        assert error(models.sample(fast, 512, 512, steps=4), wanted) < CLOSE["sd15"]
        assert_close(models, "sd15", patcher, plain, width=512, height=512, steps=4)
    assert len(calls) > 90 and shapes()[0]["replays"]


def test_pieces_count_in_the_budget(monkeypatch):
    """What one piece makes for a later one, and a second graph that uses the same memory."""
    from anyshape.accel import graphs, stats
    from anyshape.accel.allocator import addresses_are_promised
    from anyshape.accel.tape.pieces import Memory, captured_here

    def forward(inputs, blow_up):
        x = inputs["x"]
        wide, got = x.expand(blow_up, -1) * 2.0, torch.empty_like(x)
        if (graph := captured_here()) is not None:
            place, read = Memory(got), Memory(wide)
            graph.cut(lambda: place.write(read.tensor().sum(0).mul_(3)))
        else:
            got.copy_(wide.sum(0).mul_(3))
        return got + wide[blow_up - 1]

    monkeypatch.setattr(graphs, "_CACHES", {})
    monkeypatch.setattr(graphs, "STATS", stats.Stats())
    cache = graphs.cache(torch.device("cuda", torch.cuda.current_device()))
    capture(cache, torch.ones(FLOATS, device="cuda"), run=forward, blow_up=2)
    cache.clear()
    before = in_use()
    names = [capture(cache, torch.ones(16 * FLOATS + n, device="cuda"), run=forward, blow_up=8) for n in (0, 1024)]
    assert addresses_are_promised() or cache._capturer.pool_bytes > 100 * MIB
    for _ in range(3):
        for name in names:
            x = torch.rand(name.key.inputs[0].shape, device="cuda")
            assert torch.allclose(cache.replay(name, 0, {"x": x}), 50 * x)
    del x
    assert abs(in_use() - before - cache.used_bytes) <= 48 * MIB
    cache.clear()
    assert in_use() - before <= 8 * MIB


def test_cuda_malloc_async():
    """All of it with ComfyUI's default allocator on many cards."""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == environment["PYTORCH_CUDA_ALLOC_CONF"]:
        pytest.skip("it runs already")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", __file__],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
