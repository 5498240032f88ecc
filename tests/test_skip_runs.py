"""Skip Blocks on ComfyUI's real sampler path, on the CPU: one test for each fault of the existing ports, and more.

Models that it is not for and faults of our own are in ``test_skip_faults``.

The oracle for state is a fresh run: whatever went on before or beside it, a run gives what it gives alone.
"""

import gc

import pytest
import torch

from tools import embed
from tools.driving import SMALL_FLUX, compiled, skipping
from tools.oracles import FUSED, counted, error, expect, last_run
from tools.skip_driving import BLOCKS, PLANNED, RUN, STEPS

embed.bare_pack()

from anyshape.accel.skip.schedule import full_steps  # noqa: E402 - the package exists from the line above on

pytestmark = pytest.mark.usefixtures("clean_stats")

OTHER = {"width": 56, "height": 88, "steps": STEPS, "seed": 3}
LARGER = {"width": 112, "height": 104}
CLOSE = 1e-5


def sample(patcher, width=72, height=56, callback=None, denoise=1.0, positive=None, cfg=7.0, sampler="euler"):
    """As ``models.sample``, with what it has not: a callback, img2img, prompts of one's own."""
    import comfy.sample

    from bench import models

    g, usual = torch.Generator().manual_seed(5), models.traits(patcher)
    latent = torch.randn(1, patcher.model.latent_format.latent_channels, height // 8, width // 8, generator=g)
    noise = comfy.sample.prepare_noise(latent, 1)
    own, negative = (models.conditioning(patcher, min(usual.tokens, 77), seed) for seed in (1, 2))
    with torch.inference_mode():
        return comfy.sample.sample(
            patcher, noise, STEPS, cfg, sampler, usual.scheduler, positive or own, negative, latent, denoise=denoise,
            callback=callback, disable_pbar=True, seed=1,
        )  # fmt: skip


@pytest.fixture(scope="module")
def either(models, patcher):
    """Models by name: what is shaped like a U, and a row of blocks."""
    rows = SMALL_FLUX | {"depth": BLOCKS, "depth_single_blocks": BLOCKS}
    fluxes = {name: models.flux(torch.float32, **rows) for name in ("flux", "another flux")}
    return {"sd15": patcher, **fluxes}


@pytest.fixture(scope="module")
def plain(models, patcher):
    """A run without it."""
    return models.sample(patcher, **RUN)


@pytest.fixture(scope="module")
def skipped(models, patcher):
    """The same with it."""
    return models.sample(skipping(patcher), **RUN)


# What it does -----------------------------------------------------------------------------------------------------


def test_deep_blocks_run_on_full_steps_only(patcher):
    """Their weights, which are no numbers but on full steps, change nothing; those of an outer block would."""
    network, full = patcher.model.diffusion_model, full_steps(range(STEPS), 3)
    wanted = sample(skipping(patcher))
    assert counted() == PLANNED
    for part, same in ((network.middle_block, True), (network.input_blocks[-1], True), (network.out, False)):
        weights = list(part.parameters())
        kept = [weight.clone() for weight in weights]

        def between(step, *_, weights=weights, kept=kept):
            for weight, own in zip(weights, kept, strict=True):
                weight.copy_(own if step + 1 in full or step + 1 == STEPS else own * torch.nan)

        assert torch.equal(sample(skipping(patcher), callback=between), wanted) == same
        assert counted() == PLANNED


@pytest.mark.parametrize("options", [{}, {"forecast": "off"}, {"interval": 2, "depth": "1"}], ids=str)
def test_the_picture_changes_a_little(models, patcher, plain, options):
    assert 0 < error(models.sample(skipping(patcher, **options), **RUN), plain) < 0.7  # random weights: no smoothness


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2m_sde"])
def test_interval_1_is_eager_to_the_bit(models, patcher, sampler):
    for size in ({"width": 72, "height": 56}, {"width": 56, "height": 88}):
        run = size | {"steps": 3, "sampler": sampler}
        assert torch.equal(models.sample(skipping(patcher, interval=1), **run), models.sample(patcher, **run))


@pytest.mark.parametrize("steps", [1, 8])
def test_few_steps_are_left_alone(models, patcher, steps):
    """Of a distilled model every step counts; the run says why nothing was won."""
    run = RUN | {"steps": steps}
    assert torch.equal(models.sample(skipping(patcher), **run), models.sample(patcher, **run))
    assert last_run()["skipped"] == 0 and "8 steps or fewer" in next(iter(last_run()["resets"]))


def test_outside_the_window_every_step_is_full(models, patcher):
    """OneDiff's start_step: the fast branch before any feature exists, which crashes."""
    models.sample(skipping(patcher, start_percent=0.4, end_percent=0.8), **RUN)
    assert last_run()["skipped"] > 0 and last_run()["full"] > 7 and last_run()["resets"] == {}


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2s_ancestral", "sa_solver_pece"])
def test_samplers_that_evaluate_otherwise(models, patcher, sampler):
    """The ports count calls: two a step break them, and so does noise that is added back."""
    assert torch.isfinite(models.sample(skipping(patcher), **RUN | {"sampler": sampler})).all()
    assert last_run()["skipped"] >= 6 and last_run()["resets"] == {}


@pytest.mark.parametrize("sampler", ["dpm_fast", "dpm_adaptive"])
def test_samplers_that_choose_their_own_steps(patcher, sampler):
    run = {"sampler": sampler, "cfg": 1.0, "denoise": 0.1}  # which they do in few
    assert torch.equal(sample(skipping(patcher), **run), sample(patcher, **run))
    assert last_run()["skipped"] == 0 and "chooses its own steps" in next(iter(last_run()["resets"]))


def test_what_is_said_of_a_run(models, patcher):
    """One line, the report with its kinds of step, and the entry of its model: there may be others of its class."""
    from anyshape.accel import stats
    from anyshape.accel.comfy import entries
    from anyshape.nodes.report import report

    lines = []
    skip = skipping(patcher, tell=lines.append)
    models.sample(skip, **RUN)
    text = report(stats.snapshot())
    assert "3 full and 6 skipped evaluations" in text and "full steps" in text and "skipped steps" in text
    models.sample(skip, **OTHER)
    assert len(lines) == 2
    assert "3 full and 6 skipped evaluations at depth 0" in lines[0]
    (name,) = entries.of_skipping(skip)()
    assert last_run()["entry"] == name and last_run()["model"] == type(patcher.model).__name__


# With Compile Model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["compile first", "skip first"])
def test_with_compile_model_in_either_order(models, patcher, skipped, order):
    from anyshape.accel import stats

    wanted = skipped, models.sample(skipping(patcher), **OTHER)
    both = skipping(compiled(patcher)) if order == "compile first" else compiled(skipping(patcher))
    with expect(recompiles=0, fallbacks=0):
        outs = [models.sample(both, **run) for run in (RUN, OTHER)]
    for out, want in zip(outs, wanted, strict=True):
        assert error(out, want) < 1e-3
    assert counted() == PLANNED
    assert {s["state"] for m in stats.snapshot()["models"] for s in m["shapes"] if "step=" in s["key"]} == {FUSED}


# Prompts that ComfyUI splits and joins ----------------------------------------------------------------------------


def limit_batches(monkeypatch, patcher, fits):
    """ComfyUI joins prompts into one call while they fit: ``fits`` says it for each question in turn."""
    monkeypatch.setattr(patcher.model, "memory_required", lambda shape, **_: 0 if shape[0] == 1 or fits() else 1e30)


def test_cond_and_uncond_in_two_calls(models, patcher, skipped, monkeypatch):
    """The ports run cond in full always, and uncond never: on cond's feature."""
    limit_batches(monkeypatch, patcher, lambda: False)
    assert error(models.sample(skipping(patcher), **RUN), skipped) < CLOSE
    assert counted() == PLANNED


def test_split_and_joined_from_step_to_step(models, patcher, skipped, monkeypatch):
    turns = iter([True, False, False, True] * 99)
    limit_batches(monkeypatch, patcher, lambda: next(turns))
    assert error(models.sample(skipping(patcher), **RUN), skipped) < CLOSE
    assert counted() == PLANNED


def test_area_prompts(models, patcher, monkeypatch):
    """Several prompts of several shapes a step, each with its own feature, however they are batched."""
    whole, left = models.conditioning(patcher, seed=1), models.conditioning(patcher, seed=4)
    prompts = whole + [[left[0][0], left[0][1] | {"area": (8, 8, 2, 3), "strength": 1.0}]]
    skip = skipping(patcher)
    wanted = sample(skip, positive=prompts, **LARGER)
    assert counted() == PLANNED
    limit_batches(monkeypatch, patcher, lambda: False)
    assert error(sample(skip, positive=prompts, **LARGER), wanted) < CLOSE


def test_areas_of_one_size(models, patcher, monkeypatch):
    """Of the negative prompt ComfyUI makes a copy for each area, with the uuid of the positive one there."""
    areas = [(8, 8, 0, 0), (8, 8, 4, 6)]
    conds = [models.conditioning(patcher, seed=seed)[0] for seed in (1, 4)]
    prompts = [[c, extra | {"area": area}] for (c, extra), area in zip(conds, areas, strict=True)]
    wanted = sample(skipping(patcher), positive=prompts, **LARGER)
    assert counted() == PLANNED
    limit_batches(monkeypatch, patcher, lambda: False)
    assert error(sample(skipping(patcher), positive=prompts, **LARGER), wanted) < CLOSE


def test_a_prompt_that_begins_in_mid_run(models, patcher):
    late = models.conditioning(patcher, seed=4)
    prompts = models.conditioning(patcher, seed=1) + [[late[0][0], late[0][1] | {"start_percent": 0.5}]]
    assert torch.isfinite(sample(skipping(patcher), positive=prompts)).all()
    assert last_run()["skipped"] > 0
    assert set(last_run()["resets"]) <= {"a prompt, a patch or a latent size was not there at the last full step"}


def test_batches(models, patcher):
    skip = skipping(patcher)
    out = models.sample(skip, **RUN, batch=3)
    assert out.shape[0] == 3 and counted() == PLANNED


# Runs that follow, break off or interleave ------------------------------------------------------------------------


def interrupt_at(step):
    from comfy.model_management import InterruptProcessingException

    def callback(done, *_):
        if done == step:
            raise InterruptProcessingException

    return callback


def fail_at(step):
    def callback(done, *_):
        if done == step:
            raise RuntimeError("another node's error")

    return callback


@pytest.mark.parametrize(("stop", "step"), [(fail_at, 0), (interrupt_at, 5)])
def test_a_run_that_broke_off_leaves_nothing_behind(models, patcher, stop, step):
    """The ports keep the feature until the noise rises: another size crashes, the same size is silently wrong."""
    skip = skipping(patcher)
    wanted = models.sample(skip, **OTHER)
    with pytest.raises(BaseException, match="another node's error|^$"):
        sample(skip, callback=stop(step))
    assert torch.equal(models.sample(skip, **OTHER), wanted)


def test_the_same_node_output_twice(models, patcher, skipped):
    """State made by the node is spent after the first prompt; ComfyUI serves the node's output again."""
    skip = skipping(patcher)
    assert torch.equal(models.sample(skip, **RUN), skipped)
    assert torch.equal(models.sample(skip, **RUN), skipped)
    assert counted() == PLANNED


@pytest.mark.parametrize("kind", ["sd15", "flux"])
def test_a_second_sampler_at_another_size_and_denoise(either, kind):
    """Hires-fix: the second pass begins at lower noise, with other steps, on a larger latent."""
    skip, second = skipping(either[kind]), LARGER | {"denoise": 0.5}
    wanted = sample(skip, **second)
    sample(skip)
    assert torch.equal(sample(skip, **second), wanted)
    assert last_run()["full"] == 3 and last_run()["resets"] == {}


@pytest.mark.parametrize(("outer", "inner"), [("flux", "sd15"), ("flux", "another flux")], ids=str)
def test_two_models_and_two_runs_that_interleave(either, outer, inner):
    """One run inside a step of another: a state of the process would mix them."""
    skip, other, run = skipping(either[outer]), skipping(either[inner]), {"width": 56, "height": 88}
    wanted, found = sample(skip), []
    alone = sample(other, **run)

    def nested(step, *_):
        if step == 3:
            found.append(sample(other, **run))

    assert torch.equal(sample(skip, callback=nested), wanted)
    assert torch.equal(found[0], alone)


def test_nothing_outlives_a_run(models, patcher):
    from anyshape.accel.skip.features import SkipRun
    from anyshape.accel.skip.forecast import History

    skip = skipping(compiled(patcher))
    models.sample(skip, **RUN)
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) in (SkipRun, History)]
    assert "anyshape_skip_run" not in skip.model_options["transformer_options"]


def test_the_model_is_left_alone(models, fresh):
    """Without the node the picture is ComfyUI's again; nothing was put on the shared model."""
    wanted, attributes = models.sample(fresh, **RUN), set(vars(fresh.model.diffusion_model))
    models.sample(skipping(fresh), **RUN)
    assert set(vars(fresh.model.diffusion_model)) == attributes and not fresh.wrappers
    assert torch.equal(models.sample(fresh, **RUN), wanted)


def test_the_second_node_decides(models, patcher):
    models.sample(skipping(skipping(patcher, interval=2), interval=5), **RUN)
    assert counted() == {"full": 2, "skipped": 7, "resets": {}}
