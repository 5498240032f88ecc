"""MiniMax H3 and LTX-2 as ComfyUI samples them: pictures and sound in one nested latent.

One of MiniMax H3's arguments is an object that no guard could compare, so its whole forward is not recorded. Its blocks
are. CPU.
"""

import pytest

from tools.driving import calls_of, compiled, skipping
from tools.oracles import counted, error, shapes
from tools.skip_driving import PLANNED

pytestmark = pytest.mark.usefixtures("pack", "clean_stats", "one_thread")

RUN = {"width": 128, "height": 64, "frames": 9}
SMALL = {
    "hidden_size": 64, "num_layers": 5, "token_refiner_num_layers": 1, "num_attention_heads": 2, "text_dim": 40,
    "attention_head_dim": 32, "ffn_hidden_size": 96, "timestep_input_dim": 32, "time_embed_hidden_size": 64,
    "time_embed_dim": 48, "rope_inv_freq_len": 4,
}  # fmt: skip

SMALL_LTX2 = {
    "num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32,
    "caption_channels": 40, "audio_num_attention_heads": 2, "audio_attention_head_dim": 16,
    "audio_cross_attention_dim": 32, "connector_num_attention_heads": 2, "connector_attention_head_dim": 20,
    "connector_num_layers": 1,
}  # fmt: skip


@pytest.fixture
def made(comfy):
    if not (comfy / "comfy" / "ldm" / "minimax").is_dir():
        pytest.skip("this ComfyUI has no MiniMax H3")
    import torch

    from bench import zoo

    return zoo.make("minimax", torch.float32, **SMALL)


def far(ours, theirs):
    """The larger error of the two parts."""
    return max(error(a, b) for a, b in zip(ours.unbind(), theirs.unbind(), strict=True))


def test_its_blocks_run_on_programs(made, models, fusing):
    wanted = models.sample(made, **RUN, steps=2)
    assert far(models.sample(compiled(made), **RUN, steps=2), wanted) < 1e-5
    (shape,) = shapes()
    assert shape["state"] == "tape" and "a PackedLayout" in shape["note"]


def test_attention_that_counts_its_calls(made, models, fusing):
    """Another pack's. Blocks write into their inputs, so the first recording is in vain; but it has called it."""
    calls = {}

    def counting(model):
        def override(attention, q, k, v, *args, **kwargs):
            calls[model] += 1
            return attention(q, k, v * (1 + calls[model] / 64), *args, **kwargs)

        calls[model] = 0
        model.model_options["transformer_options"]["optimized_attention_override"] = override
        return model

    plain, fast = counting(made.clone()), counting(compiled(made))
    for seed in range(2):
        wanted = models.sample(plain, **RUN, steps=2, seed=seed)
        assert far(models.sample(fast, **RUN, steps=2, seed=seed), wanted) < 1e-5
        assert len(set(calls.values())) == 1
    assert {shape["state"] for shape in shapes()} == {"tape"}


def test_steps_are_skipped(made, models):
    wanted = models.sample(made, **RUN, steps=9)
    for skip in (skipping(made), compiled(skipping(made))):
        out = models.sample(skip, **RUN, steps=9)
        assert 0 < far(out, wanted) < 0.7
        assert counted() == PLANNED
    assert far(models.sample(skipping(made, interval=1), **RUN, steps=9), wanted) == 0.0


def test_blocks_that_are_not_left_out_run_on_programs(made, models, fusing, monkeypatch):
    """In both kinds of steps: what watches the blocks lies around their programs."""
    from anyshape.accel.block_tier import BlockTier

    wanted = models.sample(skipping(made, depth="1"), **RUN, steps=12)
    ran = calls_of(monkeypatch, BlockTier, "_replay")
    out = models.sample(skipping(compiled(made), depth="1"), **RUN, steps=12)
    assert far(out, wanted) < 1e-4 and counted()["skipped"] == 8
    assert {shape["state"] for shape in shapes() if shape["step"] == "skipped"} == {"tape"}
    assert len(ran) >= 4 * 5 + 8 * 2 - 4  # five in a full step, two in a skipped one, but for those that are recorded
    assert not any("forward" in part.__dict__ for part in made.model.diffusion_model.modules())


def test_one_forward_of_it(made):
    """As the benchmarks call it: the nested latent is packed."""
    from bench import step

    case = step.Case(RUN["width"], RUN["height"], frames=RUN["frames"])
    own, fresh = step.inside(made, case, lambda step: (step(), step(step.fresh(1, 0.5))))
    assert own.shape == fresh.shape == (1, 1, 24 * 3 * 4 * 8 + 32 * 2 * 12) and fresh.isfinite().all()


@pytest.fixture
def ltx2(comfy):
    if not (comfy / "comfy" / "ldm" / "lightricks" / "av_model.py").is_file():
        pytest.skip("this ComfyUI has no LTX-2")
    import torch

    from bench import zoo

    return zoo.make("ltx2", torch.float32, **SMALL_LTX2)


def test_ltx2_is_recorded_whole(ltx2, models, fusing, recordings):
    """Its latent is nested too, and both parts are inputs of one tape. A run of another prompt finds it again."""
    fast = compiled(ltx2)
    for width, height, seed in ((128, 64, 0), (192, 96, 1), (192, 96, 2)):
        run = {"width": width, "height": height, "frames": 9, "seed": seed}
        assert far(models.sample(fast, **run, steps=2), models.sample(ltx2, **run, steps=2)) < 1e-5
    found = shapes()
    assert len(recordings) == 2
    assert [(shape["state"], shape["calls"], shape["reason"]) for shape in found] == [("tape", 2, ""), ("tape", 4, "")]


def test_blocks_of_ltx2_are_skipped(ltx2, models):
    wanted = models.sample(ltx2, **RUN, steps=9)
    out = models.sample(compiled(skipping(ltx2)), **RUN, steps=9)
    assert 0 < far(out, wanted) < 0.7 and counted()["skipped"] == 6
    assert far(models.sample(skipping(ltx2, interval=1), **RUN, steps=9), wanted) == 0.0


def test_such_an_argument_keeps_no_other_call_off_the_tape(pack):
    """A call with it and one without are two kinds."""
    import torch
    from anyshape.accel.comfy import taping

    def forward(x, **rest):
        return x

    keys = set()
    for rest in ({}, {"layout": object()}, {"layout": object()}):
        given = taping.take(forward, (torch.zeros(1, 4, 8, 8),), rest)
        keys.add(taping.call_of(None, forward, given, None, None, lambda shape: (64, 64, 1)).key)
    assert len(keys) == 2


def block_of(model, k):
    """(the first block, its arguments in a forward of variant ``k``)."""
    import torch

    from tools import architectures

    seen, block = [], model.blocks[0]
    hook = block.register_forward_pre_hook(lambda block, args, named: seen.append((args, named)), with_kwargs=True)
    args, named = architectures.TABLE["MiniMaxH3"].inputs(k)
    with torch.inference_mode():
        model(*args, **named)
    hook.remove()
    return block, *seen[0]


def test_modulations_and_gates_fuse(made):
    """Written slice by slice, and in place. So do queries and keys, which comfy-kitchen turns where they lie."""
    import torch
    from anyshape.accel.tape import rules
    from anyshape.accel.tape.program import Program
    from anyshape.accel.tape.record import Recorder, record
    from anyshape.accel.tape.reuse import Outlines

    from tools.architectures import patchers
    from tools.architectures.taped import kernels_of

    model, outlines, known = patchers.make("MiniMaxH3").model.diffusion_model, Outlines(), set()
    for k in range(4):
        block, (x, t_emb, segments, rope), named = block_of(model, k)
        given = [x, t_emb, rope]

        def forward(block=block, given=given, segments=segments, named=named):
            return block(given[0].clone(), given[1], segments, given[2], **named)

        out, tape = record(forward, Recorder(given, block, torch.device("cpu")))
        assert tape is not None and len(segments) == 3
        before = [operation for operation in tape.operations if operation.writes is not None]
        rules.apply(tape)
        after = [operation.traits.name for operation in tape.operations if operation.writes is not None]
        assert len(before) == 19 and after == []
        for fuse, bound in ((False, 0.0), (True, 1e-6)):
            program = Program(tape, fuse, outlines=outlines if fuse else None)
            program.bind(block)
            assert error(program.run(given), out) <= bound
        copies = sum(operation.traits.name == "clone" for operation in tape.operations if not operation.opaque)
        # newer ComfyUI makes one copy more; with writes there were 35 calls and 1 kernel
        assert (program.report.calls - copies, program.report.kernels) == (7, 6)
        known |= kernels_of(program)
        assert len(known) == 5
    assert outlines.reused == 3
