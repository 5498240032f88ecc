"""Skip Blocks where it must not, or cannot: models that it is not for, and faults of our own. On the CPU.

Whatever fails, the picture is that of a run without it, and the run says why.
"""

import pytest
import torch

from tools import embed
from tools.driving import SMALL_UNET, UNETS, compiled, sample_tiny, skip_with_message, skipping
from tools.oracles import counted, error, fallbacks, last_run
from tools.skip_driving import BLOCKS, PLANNED, RUN, STEPS

embed.bare_pack()

from anyshape.accel.reasons import say  # noqa: E402 - the package exists from the line above on

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-5


# Models and inputs that it is not for -----------------------------------------------------------------------------


def test_a_model_without_repeated_blocks_passes_through(models):
    flux = models.flux(
        torch.float32, hidden_size=64, num_heads=2, depth=1, depth_single_blocks=1, context_in_dim=32, vec_in_dim=16,
        axes_dim=[8, 12, 12],
    )  # fmt: skip
    out, message = skip_with_message(flux)
    assert message == "Flux has no repeated blocks: no blocks are skipped, and it runs as without this node"
    assert not out.wrappers and fallbacks()[-1]["reason"] == message


def test_a_patch_that_is_called_between_the_blocks(pack, one_thread):
    """As DiffSynth's ControlNets stand there: the run says that, and not how much work each block is."""
    from tools.architectures import patchers

    patcher, calls = patchers.make("QwenImage", blocks=BLOCKS), []

    def counting(args):
        calls.append(1)
        return args | {"img": args["img"] * (1 + len(calls) / 1000)}

    patcher.set_model_patch(counting, "double_block")
    wanted = sample_tiny(patcher, "QwenImage", steps=STEPS)
    calls.clear()
    assert torch.equal(sample_tiny(skipping(patcher), "QwenImage", steps=STEPS), wanted)
    assert any("patch is called between its blocks" in reason for reason in last_run()["resets"])


def test_a_depth_that_the_model_does_not_have(models):
    patcher = models.unet("sd15", torch.float32, **UNETS["sd15"])
    assert skip_with_message(patcher, depth="10")[1] == ""
    _, message = skip_with_message(patcher, depth="11")
    assert message == "depth is 11, but this model has 0 to 10, so auto is used"


# Faults of our own ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wanted(models, patcher):
    """What a fresh model gives without it."""
    return models.sample(patcher, **RUN)


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        ("halves.Halves._is_right", "compiled"),
        ("tape.program.Program.run", "eager"),
        ("tape.program.Program.run", "compiled"),
    ],
)
def test_a_failure_of_ours_costs_speed_and_no_picture(models, fresh, wanted, monkeypatch, fault, mode):
    """No step is skipped then, and the run says why. Of cutting: see ``test_faults``."""
    monkeypatch.setattr(f"anyshape.accel.{fault}", lambda *args: 1 / 0)
    skip = skipping(fresh)
    assert torch.equal(models.sample(compiled(skip) if mode == "compiled" else skip, **RUN), wanted)
    assert last_run()["skipped"] == 0 and last_run()["full"] == STEPS
    (reason,) = last_run()["resets"]
    assert "ZeroDivisionError" in reason or any("ZeroDivisionError" in f["reason"] for f in fallbacks())


def test_a_skipped_step_that_fails_runs_in_full(models, fresh, wanted, monkeypatch):
    """And every step after it."""
    from anyshape.accel.skip.features import FAILED, UNRECORDED
    from anyshape.accel.tape.program import Program

    skip, own = skipping(fresh), Program.run
    assert error(models.sample(skip, **RUN), wanted) > 1e-3
    # of the latent, the time step and the prompt; a skipped step has its feature besides
    monkeypatch.setattr(Program, "run", lambda self, given, bound: own(self, given) if len(given) == 3 else 1 / 0)
    assert torch.equal(models.sample(skip, **RUN), wanted)
    assert last_run()["skipped"] == 0 and set(last_run()["resets"]) == {FAILED, UNRECORDED}


def test_another_packs_patch_that_fails_at_a_skipped_step_is_no_fault_of_ours(models, fresh):
    """The user sees its error, once, and the model's later runs are on the tape as before."""
    from anyshape.accel import stats

    fast, calls, fails = compiled(skipping(fresh)), [0], []

    def patch(h, options):
        calls[0] += 1
        if fails:
            raise RuntimeError("the patch has failed")
        return h

    fast.set_model_input_block_patch(patch)
    for _ in range(2):  # that it counts is found out in the first run
        models.sample(fast, **RUN)
    stats.STATS.clear()
    with pytest.raises(RuntimeError, match="the patch has failed"):
        models.sample(fast, callback=lambda *_: fails.append(True), **RUN)  # the second step, which is skipped
    assert not [each for each in fallbacks() if "the tape failed" in each["reason"]]
    run = last_run()
    taken = sum(shape["calls"] for model in stats.snapshot()["models"] for shape in model["shapes"])
    assert run["full"] + run["skipped"] == 1 and taken == 2  # the second step failed, and counts once
    fails.clear()
    stats.STATS.clear()
    models.sample(fast, **RUN)
    assert last_run()["skipped"] == 6 and not [each for each in fallbacks() if "tape failed" in each["reason"]]


def test_what_compile_model_could_not_do_is_no_fallback_without_it(models, monkeypatch, fresh):
    from anyshape.accel import stats
    from anyshape.accel.tape.program import Program

    with monkeypatch.context() as broken:
        broken.setattr(Program, "run", lambda *args: 1 / 0)
        models.sample(compiled(fresh), **RUN)
    assert fallbacks()
    stats.STATS.clear()
    models.sample(skipping(fresh), **RUN)
    assert fallbacks() == [] and last_run()["skipped"] == 6


@pytest.mark.parametrize("counts", [False, True])
def test_a_replaced_forward(models, fresh, counts):
    """Another node's object patch on the UNet's forward, which names none of its arguments.

    It is recorded as it is, unless it keeps something: then every step is in full.
    """
    calls, own = [], fresh.model.diffusion_model._forward

    def louder(*args, **kwargs):
        return own(*args, **kwargs) * 1.1

    def counting(*args, **kwargs):
        calls.append(1)
        return louder(*args, **kwargs)

    patched = fresh.clone()
    patched.add_object_patch("diffusion_model._forward", counting if counts else louder)
    out = models.sample(skipping(patched), **RUN)
    if counts:
        assert len(calls) == STEPS and torch.equal(out, models.sample(patched, **RUN))
        newcomer, unrecorded = last_run()["resets"]  # in the first step, which changes the patch, and in all others
        assert last_run()["skipped"] == 0 and newcomer == say("newcomer") and "could not be recorded" in unrecorded
        return
    assert counted() == PLANNED
    same = models.unet("sd15", torch.float32, **SMALL_UNET)
    for parameter in same.model.diffusion_model.out[2].parameters():
        parameter.mul_(1.1)
    assert error(out, models.sample(skipping(same), **RUN)) < CLOSE < error(out, models.sample(skipping(fresh), **RUN))
