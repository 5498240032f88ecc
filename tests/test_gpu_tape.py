"""The tape on a real GPU: sampling runs, graphs, weights that move, streams, and a kernel that is wrong.

How kernels round is in ``test_gpu_tape_kernels``.
"""

import gc
import importlib.util

import pytest
import torch

from tools.driving import calls_of, compiled
from tools.on_gpu import SMALL_FLUX, loaded_forward
from tools.oracles import error, expect, fallbacks, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left")]

SMALL = {
    "flux": SMALL_FLUX,
    "sd35l": {
        "depth": 4, "context_embedder_config": {
            "target": "torch.nn.Linear", "params": {"in_features": 128, "out_features": 256},
        },
    },
    "wan": {"dim": 256, "num_heads": 2, "ffn_dim": 512, "num_layers": 3, "text_dim": 128},
}  # fmt: skip
WEIGHTS = {
    "flux": "double_blocks.1.img_attn.qkv", "sd35l": "joint_blocks.1.x_block.mlp.fc1", "wan": "blocks.1.self_attn.v",
}  # fmt: skip
RUNS = {
    "flux": {"width": 544, "height": 408, "tokens": 77, "steps": 3},
    "sd35l": {"width": 544, "height": 400, "tokens": 77, "steps": 3},
    "wan": {"width": 272, "height": 208, "tokens": 77, "frames": 9, "steps": 3},
}
KINDS = tuple(RUNS)
ANOTHER = {"width": 320, "height": 192, "tokens": 33, "batch": 2}  # size, of each of them
FORWARD = (544, 408, 1, 77)  # of Flux
TOLERANCE = 2.5e-2  # relative L2 in bfloat16, as in test_gpu.py


# Sampling runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(models):
    """Models of middle size, which ComfyUI loads and unloads."""
    from bench import zoo

    return {kind: zoo.make(kind, torch.bfloat16, **config) for kind, config in SMALL.items()}


@pytest.fixture
def counts(pack, monkeypatch):
    """() -> (how many forwards were recorded, how many graphs captured)."""
    from anyshape.accel.graphs import GraphCache
    from anyshape.accel.tapes import Tapes

    recorded, captured = calls_of(monkeypatch, Tapes, "record"), calls_of(monkeypatch, GraphCache, "capture")
    return lambda: (len(recorded), len(captured))


@pytest.fixture(autouse=True)
def no_programs_left(request, pack):
    """A model that several tests share begins each of them as if it had never run."""
    yield
    if "small" in request.fixturenames:
        from anyshape.accel.comfy import attach

        for engine in [engine for engines in attach._ENGINES.values() for engine in engines.values()]:
            engine.drop_graphs()
            engine.__post_init__()


def assert_close(out, expected):
    """By the bounds that the product has for a new size."""
    from anyshape.accel import verify

    assert verify.compare("the run", out.bfloat16(), expected.bfloat16())


def states():
    return [(s["state"], s["reason"]) for s in shapes()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampling_run(models, small, counts, kind):
    """The first call is recorded and captured, all others are replays; the same seed gives the same bits."""

    patcher, run = small[kind], RUNS[kind]
    fast = compiled(patcher)
    first = models.sample(fast, **run)
    (shape,) = shapes()
    assert (shape["state"], shape["calls"], shape["replays"]) == ("graph", 3, 2), shape
    with expect(recompiles=0, fallbacks=0):
        assert torch.equal(models.sample(fast, **run), first)
        other = models.sample(fast, **run | ANOTHER)
    assert [(s["calls"], s["replays"]) for s in shapes()] == [(6, 5), (3, 2)]
    assert counts() == (2, 2)
    assert_close(first, models.sample(patcher, **run))
    assert_close(other, models.sample(patcher, **run | ANOTHER))


@pytest.mark.parametrize("kind", KINDS)
def test_a_third_size_is_recorded_without_blocks_that_are_alike(models, small, monkeypatch, kind):
    """The plan was right at two sizes. A size of more than twice the elements of those is compared whole again."""
    from anyshape.accel.tapes import Tapes

    left_out, own = [], Tapes.record

    def record(self, *args, **named):
        found = own(self, *args, **named)
        left_out.append(found[1].left_out)
        return found

    monkeypatch.setattr(Tapes, "record", record)
    fast, run = compiled(small[kind]), RUNS[kind]
    with expect(fallbacks=0):
        for width, height, tokens in ((544, 400, 77), (400, 480, 60), (272, 208, 91), (336, 592, 33), (1088, 800, 77)):
            this = run | {"width": width, "height": height, "tokens": tokens}
            assert_close(models.sample(fast, **this), models.sample(small[kind], **this))
    assert [bool(n) for n in left_out] == [False, False, True, True, False]
    assert states() == [("graph", "")] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_exact_is_eager_to_the_bit(models, small, kind):
    fast, wanted = compiled(small[kind], mode="exact"), models.sample(small[kind], **RUNS[kind])
    for _ in range(2):
        assert torch.equal(models.sample(fast, **RUNS[kind]), wanted)
    assert states() == [("graph", "")] and shapes()[0]["replays"] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_comes_changes_and_goes(models, small, counts, kind):
    """Weights are slots: graphs are captured again, nothing is recorded again."""

    key = f"diffusion_model.{WEIGHTS[kind]}.weight"
    change = torch.randn(small[kind].model.state_dict()[key].shape, generator=torch.Generator().manual_seed(0))

    def loaded(patcher, strength):
        patcher = patcher.clone()
        if strength:
            patcher.add_patches({key: (change,)}, strength)
        return patcher

    fast = compiled(small[kind])
    plain = models.sample(fast, **RUNS[kind])
    with expect(recompiles=0, fallbacks=0):
        for strength in (0.3, 0.1, 0.0, 0.3):
            captured = counts()[1]
            out = models.sample(loaded(fast, strength), **RUNS[kind])
            assert counts()[0] == 1 and counts()[1] > captured
            assert_close(out, models.sample(loaded(small[kind], strength), **RUNS[kind]))
            assert torch.equal(out, plain) if strength == 0 else error(out, plain) > 1e-2
    assert states() == [("graph", "")]


def test_unloaded_and_loaded_again(models, small, counts):
    """Programs and graphs hold no weights of a model that ComfyUI has unloaded."""
    import comfy.model_management as mm

    fast = compiled(small["flux"])
    first = models.sample(fast, **RUNS["flux"])
    held = torch.cuda.memory_allocated()
    mm.unload_all_models()
    gc.collect()
    given_back = held - torch.cuda.memory_allocated()
    assert given_back >= fast.model_size(), (given_back, fast.model_size())
    assert all(weight.device.type == "cpu" for weight in fast.model.parameters())
    assert torch.equal(models.sample(fast, **RUNS["flux"]), first)
    assert counts() == (1, 2) and states() == [("graph", "")]


def test_two_models_in_turn(models, small):

    fast = {kind: compiled(small[kind]) for kind in KINDS}
    first = {kind: models.sample(fast[kind], **RUNS[kind]) for kind in KINDS}
    with expect(recompiles=0, fallbacks=0, evictions=0):
        for kind in (*KINDS, *KINDS):
            assert torch.equal(models.sample(fast[kind], **RUNS[kind]), first[kind]), kind
    assert states() == [("graph", "")] * len(KINDS)


# Budget and memory ------------------------------------------------------------------------------------------------


def test_no_budget_no_graphs(models, small, counts):
    fast = compiled(small["flux"], graph_budget_mb=0)
    outs = [models.sample(fast, **RUNS["flux"]) for _ in range(2)]
    assert torch.equal(*outs) and counts() == (1, 0)
    assert_close(outs[0], models.sample(small["flux"], **RUNS["flux"]))
    ((state, reason),) = states()
    assert state == "tape" and "graph_budget_mb is 0" in reason


def test_a_small_budget(models, small):
    """It holds the largest size alone: smaller ones give way to it."""
    from anyshape.accel import graphs, stats

    patcher, run = small["flux"], {"height": 128, "batch": 4, "tokens": 4096, "steps": 2}
    largest = run | {"width": 1024, "height": 1024}
    models.sample(compiled(patcher, graph_budget_mb=1 << 14), **largest)
    budget = shapes()[-1]["bytes"] // graphs.MIB + 48  # after smaller graphs its memory has more gaps
    graphs.clear()
    fast, evictions = compiled(patcher, graph_budget_mb=budget), stats.snapshot()["graphs"]["evictions"]
    for width in range(128, 640, 64):  # 4 MB of prompts each
        models.sample(fast, width=width, **run)
        assert stats.snapshot()["graphs"]["used_bytes"] <= budget * graphs.MIB
    for _ in range(2):
        out = models.sample(fast, **largest)
    assert_close(out, models.sample(patcher, **largest))
    assert stats.snapshot()["graphs"]["evictions"] > evictions
    assert stats.snapshot()["graphs"]["used_bytes"] <= budget * graphs.MIB
    state = next(s for s in shapes() if s["width"] == 1024)
    assert state["state"] == "graph" and state["replays"] > 0, state["reason"]


@torch.inference_mode()  # as ComfyUI runs prompts: weights that move become tensors of that mode
def test_low_vram(small):
    """Weights on the CPU: ComfyUI's own forward, and graphs again once all of them are back."""
    import comfy.model_management as mm

    patcher = small["flux"]
    fast = compiled(patcher)
    for part in (False, True, False):
        mm.unload_all_models()
        mm.load_models_gpu([fast], force_full_load=True)
        if part:
            fast.partially_unload(fast.offload_device, fast.model_size() // 2)
        assert any(weight.device.type == "cpu" for weight in fast.model.parameters()) == part
        for seed in (1, 2):
            out = loaded_forward(fast, *FORWARD, seed=seed)
            assert error(out, loaded_forward(patcher, *FORWARD, seed=seed)) < TOLERANCE
        ((state, reason),) = states()
        assert (state == "eager" and "low VRAM" in reason) if part else (state, reason) == ("graph", ""), reason


# Streams and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 2048])
@torch.inference_mode()
def test_another_stream(small, budget):
    """Programs and graphs run where the caller does, whichever stream the first call was on."""
    import comfy.model_management as mm

    patcher, stream = small["flux"], torch.cuda.Stream()
    fast = compiled(patcher, graph_budget_mb=budget)
    mm.load_models_gpu([fast])
    other = (320, 192, 2, 33)
    first = loaded_forward(fast, *FORWARD)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outs = [loaded_forward(fast, *FORWARD) for _ in range(3)]
        others = [loaded_forward(fast, *other) for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    others.append(loaded_forward(fast, *other))
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out in outs) and all(torch.equal(out, others[0]) for out in others)
    assert error(first, loaded_forward(patcher, *FORWARD)) < TOLERANCE
    assert error(others[0], loaded_forward(patcher, *other)) < TOLERANCE
    assert {s["state"] for s in shapes()} == {"graph" if budget else "tape"}


def test_work_on_two_streams_is_refused(pack):
    from anyshape.accel.tape.record import Recorder, record

    side = torch.cuda.Stream()

    class OnTwo(torch.nn.Module):
        def forward(self, x):
            x = x * 2.0
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x + 1.0
            torch.cuda.current_stream().wait_stream(side)
            return x + y

    module, x = OnTwo(), torch.randn(1000, device="cuda")
    recorder = Recorder([x], module, x.device)
    out, tape = record(lambda: module(x), recorder)
    assert tape is None and "several CUDA streams" in recorder.refusal
    assert torch.equal(out, x * 2.0 + (x * 2.0 + 1.0))


def test_a_model_on_the_second_gpu(pack):
    """While the first one is current: kernels are compiled and graphs captured on the model's device."""
    from tools.architectures import patchers

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if importlib.util.find_spec("comfy_kitchen"):
        pytest.skip("ComfyUI itself needs the model's GPU to be the current one")
    patcher = patchers.make("Flux", torch.bfloat16, "cuda:1")
    fast = compiled(patcher)
    for seed in range(3):
        out = loaded_forward(fast, *FORWARD, seed=seed)
        assert out.device == torch.device("cuda", 1) and torch.cuda.current_device() == 0
        assert error(out, loaded_forward(patcher, *FORWARD, seed=seed)) < TOLERANCE
    assert states() == [("graph", "")] and shapes()[0]["replays"] == 2


# Faults -----------------------------------------------------------------------------------------------------------


def test_a_kernel_that_computes_nonsense_is_left_out(models, monkeypatch):
    """It is found by name, its operations run by themselves, and all other kernels stay."""
    import comfy.model_management as mm
    from anyshape.accel.comfy import attach
    from anyshape.accel.tape import diagnose
    from anyshape.accel.tape.kernels import Launch

    from tools.on_gpu import inputs
    from tools.recording import recorded

    patcher = models.flux(torch.bfloat16, **SMALL_FLUX)
    mm.load_models_gpu([patcher])
    module, own = patcher.model.diffusion_model, Launch.__call__
    args, named = inputs(patcher, *FORWARD, seed=0)
    call = recorded(module, args, named | {"transformer_options": {}})
    bad = max(call.program.launches, key=lambda launch: launch.outputs[0].numel).source.text

    def spoilt(self, operands, outputs):
        own(self, operands, outputs)
        if self.source.text == bad:
            for out in outputs:
                out.neg_()

    monkeypatch.setattr(Launch, "__call__", spoilt)
    with torch.inference_mode():
        assert diagnose.wrong_kernels(call.tape, call.program, call.inputs, module) == {bad}
    fast = compiled(patcher)
    for seed in range(3):
        out = loaded_forward(fast, *FORWARD, seed=seed)
        assert error(out, loaded_forward(patcher, *FORWARD, seed=seed)) < TOLERANCE
    assert any("wrong result" in each["reason"] for each in fallbacks())
    assert shapes()[-1]["state"] == "graph" and shapes()[-1]["replays"] == 2
    ((take,),) = attach.engines_of(module)[0]._tape._tapes._takes.values()
    left, before = ({launch.source.text for launch in each.launches} for each in (take.program, call.program))
    assert bad in before and bad not in left
    assert len(left & before) > len(before) / 2
