"""A fault anywhere in the pack, injected at every boundary: the image is eager's, the reason is counted, nothing stays.

On the CPU; ``test_gpu_faults.py`` has kernels, captures, replays and memory.
"""

import pytest
import torch

from tools.driving import ONE_LEVEL_UNET, compile_with_message, compiled, skip_with_message, skipping
from tools.oracles import FUSED, error, fallbacks, last_run, reasons, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32
RUN = {"width": 64, "height": 64, "steps": 2}
LONG_RUN = RUN | {"steps": 9}  # long enough for blocks to be skipped

# Everything that a forward of a compiled model goes through, by module of the pack.
FORWARD = [
    "comfy.taping.take", "comfy.taping.call_of", "comfy.taping.obstacle", "comfy.taping.shape_key",
    "comfy.known_code.Fingerprints.of", "comfy.sampling_state.SamplingState.structure",
    "comfy.sampling_state.SamplingState.weights", "comfy.known_code.foreign_code", "comfy.taping._structure",
    "comfy.session.sampling_state.SamplingState", "weights.WeightWatch.__init__", "weights.WeightWatch.fingerprint",
    "engine.Engine._run", "tape_tier.TapeTier.run", "first_call.FirstCalls._recorded", "tapes.Tapes.find",
    "tapes.Tapes.record", "recorded.Recorder", "recorded.Patches", "recorded.Patches.finish", "foreign.states_of",
    "foreign.Watched.kept", "tape.this_forward.forward", "tape.record.traits", "maker.Program", "tape_tier.bound",
    "first_call.bound", "tape.program.Program.run", "maker.verify.compare", "stats.ModelStats.shape",
    "times.CallTimes.measure", "functions_read.FunctionsRead.hold", "fingerprint.Watch.__init__",
]  # fmt: skip
# The same of a patch of another node, which is called in each forward.
PATCHED = [
    "tape.state.Glance.look", "tape.patches.look_at", "tape.patches.code_of", "tape.patch_call.template",
    "tape.called_patches.perform", "tape.called_patches.LiveCall.record", "tape.called_patches.LiveCall.__call__",
    "tape.patch_call.perform", "tape.patch_call._form",
    "tape.record.Recorder.step", "tape.called_patches.at", "first_call.waits_for_host",
]  # fmt: skip

SKIPPING = [
    "comfy.session._prompts", "comfy.taping.in_full", "comfy.taping.skipped", "skip.features.SkipRun.call",
    "skip.features.SkipRun.close", "tape_tier.TapeTier.run", "tapes.Take.result", "skip.features.SkipRun._why_full",
    "skip.features.SkipRun._store", "skip.features.SkipRun._forecast", "skip.features.History.at",
    "comfy.skipping._depth", "comfy.skipping.SkipRun", "comfy.skipping.summary",
    "skip.settings.SkipSettings.full_steps",
]  # fmt: skip

ENDS = ["comfy.session.Session._close_runs"]  # what runs when sampling is over

# Once it is mended, a fault leaves nothing behind but, where it was the tape's, the tape's retirement.
MENDED = {FORWARD[0]: FUSED, "maker.Program": "eager", "tape.program.Program.run": "eager"}

# What an interrupt breaks off, one place of each: around a forward, before and within the recording, behind it, with a
# program that is being made, run and compared; and of a run that skips, its beginning, its calls and its end.
BROKEN_OFF = [
    "comfy.taping.take", "comfy.sampling_state.SamplingState.weights", "engine.Engine._run",
    "first_call.FirstCalls._recorded", "tape.record.traits", "recorded.Patches.finish", "maker.Program",
    "tape.program.Program.run", "verify.compare",
]  # fmt: skip
SKIPPING_BROKEN_OFF = [
    "comfy.session._prompts", "comfy.skipping._depth", "skip.features.SkipRun.call", "tapes.Take.result",
    "skip.features.SkipRun.close",
]  # fmt: skip


class Injected(Exception):
    """A bug of ours."""


@pytest.fixture
def inject(monkeypatch):
    """Makes a function or class of the pack raise."""

    def do(target, error=Injected):
        def fail(*args, **kwargs):
            raise error("injected")

        monkeypatch.setattr(f"anyshape.accel.{target}", fail)

    return do


@pytest.fixture(scope="module")
def patcher(models):
    """The UNet that the tests of this file share."""
    return models.unet("sd15", torch.float32, **ONE_LEVEL_UNET)


@pytest.fixture
def fresh(models):
    """The same UNet, of the test's own."""
    return models.unet("sd15", torch.float32, **ONE_LEVEL_UNET)


@pytest.fixture(scope="module")
def wanted(models, patcher):
    """What a model with the weights of ``fresh`` gives without us: after the short run, and after the long one."""
    return {"short": models.sample(patcher, **RUN), "long": models.sample(patcher, **LONG_RUN)}


@pytest.mark.parametrize("target", FORWARD + ENDS)
def test_a_fault_in_a_forward(models, fresh, wanted, inject, monkeypatch, target):
    fast = compiled(fresh)
    inject(target)
    assert error(models.sample(fast, **RUN), wanted["short"]) < CLOSE
    assert any("injected" in reason for reason in reasons()), reasons()
    if target in MENDED:
        monkeypatch.undo()
        assert error(models.sample(fast, **RUN), wanted["short"]) < CLOSE
        assert shapes()[-1]["state"] == MENDED[target]


@pytest.mark.parametrize("target", PATCHED)
def test_a_fault_in_a_forward_with_a_patch(models, fresh, inject, target):
    """The patch is called once in each forward all the same, before the fault, with it and after it."""
    outs, logs = [], []
    for each in (fresh, compiled(fresh)):
        log, patched = [], each.clone()

        def patch(h, options, log=log):
            log.append(options["block"])
            return h * (1.1 if float(options["sigmas"][0]) > 1.0 else 0.9)

        patched.set_model_input_block_patch(patch)
        outs.append([models.sample(patched, **RUN | {"seed": 0})])
        if each is not fresh:
            inject(target)
        outs[-1].append(models.sample(patched, **RUN | {"seed": 1, "width": 72}))
        outs[-1].append(models.sample(patched, **RUN | {"seed": 1}))
        logs.append(log)
    assert all(error(out, plain) < CLOSE for plain, out in zip(*outs, strict=True))
    assert any("injected" in reason for reason in reasons()), reasons()


WITHOUT_COMPILE_MODEL = ["comfy.taping.skipped", "skip.features.SkipRun.close"]  # the others with it


@pytest.fixture(scope="module")
def skipped(models, patcher, wanted):
    """What the long run gives with blocks skipped, by whether the model is compiled; another picture than in full."""
    ways = {fast: skipping(compiled(patcher) if fast else patcher, interval=3) for fast in (True, False)}
    outs = {fast: models.sample(model, **LONG_RUN) for fast, model in ways.items()}
    assert all(error(out, wanted["long"]) > 10 * CLOSE for out in outs.values())
    return outs


@pytest.mark.parametrize("target", SKIPPING)
def test_a_fault_in_skip_blocks(models, fresh, wanted, skipped, inject, target):
    """The picture is that of a run in full, or of one that skips as it should."""
    fast = target not in WITHOUT_COMPILE_MODEL
    model = skipping(compiled(fresh) if fast else fresh, interval=3)
    models.sample(model, **LONG_RUN)
    inject(target)
    out = models.sample(model, **LONG_RUN)
    assert min(error(out, wanted["long"]), error(out, skipped[fast])) < CLOSE
    assert any("injected" in reason for reason in reasons()), reasons()


@pytest.mark.parametrize(
    ("target", "fast"),
    [
        ("tape.deep.find", True), ("tape.cut._kept", False), ("tape.rest.Rest.tape", True),
        ("tape.cost.multiplications", False),
    ],
)  # fmt: skip
def test_a_fault_in_cutting(models, fresh, wanted, inject, target, fast):
    """Every step is in full, and the run says why."""
    model = skipping(compiled(fresh) if fast else fresh, interval=3)
    inject(target)
    assert torch.equal(models.sample(model, **LONG_RUN), wanted["long"])
    (reason,) = last_run()["resets"]
    assert "cutting failed, Injected" in reason and last_run()["skipped"] == 0


@pytest.mark.parametrize("target", ["comfy.attach.Session", "comfy.attach.put_around"])
def test_a_fault_in_compile_model(models, fresh, wanted, inject, target):
    """The node hands a model on that runs as without it, and says why."""
    inject(target)
    out, message = compile_with_message(fresh)
    assert "injected" in message and not any(out.wrappers.values()) and message in reasons()
    assert torch.equal(models.sample(out, **RUN), wanted["short"])


@pytest.mark.parametrize("target", ["comfy.skipping._Skipping", "comfy.skipping.blocks.deepest"])
def test_a_fault_in_the_skip_blocks_node(models, fresh, wanted, inject, target):
    inject(target)
    out, message = skip_with_message(fresh)
    assert "injected" in message and not any(out.wrappers.values())
    assert torch.equal(models.sample(out, **RUN), wanted["short"])


@pytest.mark.parametrize("target", BROKEN_OFF + SKIPPING_BROKEN_OFF)
def test_an_interrupt_passes_at_once(models, fresh, wanted, inject, monkeypatch, target):
    """The user presses Cancel, at any boundary: no fallback is tried or counted, and the next prompt is right."""
    from comfy.model_management import InterruptProcessingException

    model = skipping(compiled(fresh), interval=3) if target in SKIPPING_BROKEN_OFF else compiled(fresh)
    inject(target, InterruptProcessingException)
    with pytest.raises(InterruptProcessingException):
        models.sample(model, **LONG_RUN)
    monkeypatch.undo()
    assert not fallbacks()
    assert error(models.sample(compiled(fresh), **RUN), wanted["short"]) < CLOSE
    assert shapes()[-1]["state"] == FUSED


# The VAE ----------------------------------------------------------------------------------------------------------

VAE = [
    "comfy.taping.take", "comfy.taping.call_of", "comfy.sampling_state.SamplingState",
    "comfy.vae._Way._size", "engine.Engine._run", "tapes.Tapes.find", "tapes.Tapes.record",
    "tape.program.Program.bind", "tape.program.Program.run", "stats.ModelStats.shape",
]  # fmt: skip


@pytest.mark.parametrize("target", VAE)
def test_a_fault_in_the_vae(models, pack, inject, target):
    from anyshape.accel.comfy.vae import compile_vae

    vae, latent = models.vae(torch.float32, ch=32, num_res_blocks=1), torch.randn(1, 4, 5, 3)
    inject(target)
    fast, message = compile_vae(vae)
    assert message == ""
    with torch.inference_mode():
        for _ in range(2):  # recorded, then ours
            assert torch.equal(fast.decode(latent), vae.decode(latent))
    assert any("injected" in reason for reason in reasons())


@pytest.mark.parametrize("target", ["comfy.vae._with_our_ways", "comfy.vae.engine_for"])
def test_a_fault_in_compile_vae(models, inject, target):
    from anyshape.accel.comfy.vae import compile_vae

    vae = models.vae(torch.float32, ch=32, num_res_blocks=1)
    inject(target)
    out, message = compile_vae(vae)
    assert out is vae and "injected" in message and message in reasons()
