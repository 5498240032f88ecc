"""Skip Blocks with other packs' nodes and with ControlNet and LoRA hooks, on the real sampler path, on the CPU."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from tools import embed
from tools.control_driving import flux_control
from tools.driving import SMALL_FLUX, SMALL_UNET, compiled, memory_by_turns, randn, skipping
from tools.oracles import counted, error, last_run
from tools.patching import PATCHES, attention_override, attn1_replace_one, attn2_replace_one
from tools.skip_driving import BLOCKS, PLANNED, RUN, STEPS

embed.bare_pack()

from anyshape.accel.reasons import say  # noqa: E402 - the package exists from the line above on

pytestmark = pytest.mark.usefixtures("clean_stats")

NEWCOMER = say("newcomer")
BATCH = {"full": 4, "skipped": 5, "resets": {say("skip_failed"): 1}}
ONCE_MORE = {"full": 4, "skipped": 5, "resets": {NEWCOMER: 1}}
INSTEAD = [attn1_replace_one, attn2_replace_one, attention_override]  # of an attention: beside others, only these count
BESIDE = [patch for patch in PATCHES if patch not in INSTEAD]


# Patches ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def skipped(models, patcher):
    """A run without any patch."""
    return models.sample(skipping(patcher, depth="2"), **RUN)


@pytest.mark.parametrize("patches", [BESIDE, INSTEAD], ids=["beside layers", "instead of attention"])
def test_patches_of_other_packs(models, patcher, skipped, patches):
    """They are called in full and in skipped steps, compiled or not, and cost no step its skipping.

    But for one: that a patch must be called at each replay, because it counts its calls, turns out in its first step.
    """
    patched, logs = patcher.clone(), {patch.__name__: [] for patch in patches}
    for patch in patches:
        patch(patched, logs[patch.__name__])
    models.sample(patched, **RUN | {"steps": 1})
    wholes = {name: log.copy() for name, log in logs.items()}
    models.sample(skipping(patched, depth="2"), **RUN)
    assert last_run()["resets"] in ({}, {NEWCOMER: 1})
    for log in logs.values():
        log.clear()
    out = models.sample(skipping(patched, depth="2"), **RUN)
    assert counted() == PLANNED
    assert error(out, skipped) > 1e-4
    for name, log in logs.items():
        whole = wholes[name]
        less = log[len(whole) :][: (len(log) - 3 * len(whole)) // 6]  # the second step is a skipped one
        assert log[: len(whole)] == whole and len(log) == 3 * len(whole) + 6 * len(less), name
        assert less and [place for place in whole if place in less] == less, name
    assert error(models.sample(compiled(skipping(patched, depth="2")), **RUN), out) < 1e-3


@pytest.mark.parametrize(("version", "depth"), [("FreeU", "0"), ("FreeU_V2", "3")])
def test_freeu_never_touches_a_stored_feature(models, unets, version, depth):
    """Its edits are made in place; made on copies they must give the same run."""
    from comfy_extras import nodes_freelunch

    # it edits what is four times as wide as the first level
    (freeu,) = getattr(nodes_freelunch, version)().patch(unets["sd15"], 1.3, 1.4, 0.9, 0.2)
    copying = freeu.clone()
    patches = copying.model_options["transformer_options"]["patches"]
    (own,) = patches["output_block_patch"]
    patches["output_block_patch"] = [lambda h, skip, options: own(h.clone(), skip.clone(), options)]
    assert torch.equal(*(models.sample(skipping(each, depth=depth), **RUN) for each in (freeu, copying)))


def test_a_patch_that_comes_anew_each_step(models, fresh):
    """A closure a step cannot be distinguished from another patch: right, and counted."""
    from comfy.patcher_extension import WrappersMP

    def renewed(executor, *args, **kwargs):
        options = next(a for a in (*args, *kwargs.values()) if isinstance(a, dict) and "sigmas" in a)
        options.setdefault("patches", {})["input_block_patch"] = [lambda h, o: h * 1.1]
        return executor(*args, **kwargs)

    patched, fixed = fresh.clone(), fresh.clone()
    patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another pack", renewed)
    fixed.set_model_input_block_patch(lambda h, o: h * 1.1)
    out = models.sample(skipping(patched), **RUN)
    assert last_run()["resets"] == {NEWCOMER: 6}
    assert torch.equal(out, models.sample(fixed, **RUN))


def test_wrappers_of_other_packs_see_every_step(models, patcher):
    """The ports own the one wrapper slot, or replace the model's forward."""
    from comfy.patcher_extension import WrappersMP

    calls = []

    def counts(kind):
        return lambda executor, *args, **kwargs: calls.append(kind) or executor(*args, **kwargs)

    before = patcher.clone()
    for kind in (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL):
        before.add_wrapper_with_key(kind, "before", counts(kind))
    after = skipping(before)
    for kind in (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL):
        after.add_wrapper_with_key(kind, "after", counts(kind))
    models.sample(after, **RUN)
    assert calls.count(WrappersMP.APPLY_MODEL) == calls.count(WrappersMP.DIFFUSION_MODEL) == 2 * STEPS
    assert counted() == PLANNED


def test_deep_shrink(models, unets):
    """It makes the deep blocks' images smaller for the first part of a run."""
    from comfy_extras.nodes_model_downscale import PatchModelAddDownscale

    patched = PatchModelAddDownscale.execute(unets["sdxl"], 3, 2.0, 0.0, 0.35, True, "bicubic", "bicubic").args[0]
    for depth in ("2", "3"):  # outside of what is smaller, and in it
        assert torch.isfinite(models.sample(skipping(patched, depth=depth), **RUN)).all()
        assert last_run()["skipped"] > 0


# Guidance that evaluates more than once ---------------------------------------------------------------------------


def test_perturbed_attention_guidance(models, patcher, skipped):
    """PAG calls the model again, with the same uuid and a patch more: a feature of its own."""
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance

    patched = PerturbedAttentionGuidance.execute(patcher, 3.0).args[0]
    skip = skipping(patched, depth="2")
    out = models.sample(skip, **RUN)
    assert counted() == PLANNED
    assert error(out, skipped) > 1e-4
    assert error(models.sample(compiled(skip), **RUN), out) < 1e-3


def test_self_attention_guidance(models, patcher):
    """SAG calls the model again for the negative prompt, on a blurred latent, as a positive one: also of its own."""
    from comfy_extras.nodes_sag import SelfAttentionGuidance

    skip, run = skipping(SelfAttentionGuidance.execute(patcher, 0.5, 2.0).args[0]), RUN | {"width": 64, "height": 64}
    models.sample(skip, **run)
    assert set(last_run()["resets"]) <= {NEWCOMER}  # once: its patch keeps something, as turns out in the first step
    out = models.sample(skip, **run)
    assert counted() == PLANNED
    assert error(models.sample(compiled(skip), **run), out) < 1e-3


def test_the_same_call_twice_a_step(models, patcher):
    """Another input under the same prompt and patches: which feature is whose cannot be told, so all is computed."""
    import comfy.samplers

    def again(args):
        blurred = args["input"] * 0.9
        (other,) = comfy.samplers.calc_cond_batch(
            args["model"], [args["cond"]], blurred, args["sigma"], args["model_options"]
        )
        return args["denoised"] + 0.1 * other

    patched = patcher.clone()
    patched.set_model_sampler_post_cfg_function(again)
    out = models.sample(skipping(patched), **RUN)
    (reason,) = last_run()["resets"]
    assert "evaluated twice per step" in reason and last_run()["skipped"] == 0
    assert error(out, models.sample(patched, **RUN)) < 1e-5


def test_easycache(models, patcher):
    """ComfyUI's own cache beside ours: it leaves out whole calls, after which ours computes."""
    from comfy_extras.nodes_easycache import EasyCacheNode

    cached = EasyCacheNode.execute(patcher, 0.3, 0.15, 0.95, False).args[0]
    for both in (skipping(cached), compiled(skipping(cached))):
        assert torch.isfinite(models.sample(both, **RUN)).all()
        assert set(last_run()["resets"]) <= {NEWCOMER}
        assert last_run()["full"] + last_run()["skipped"] <= STEPS


# ControlNet and hooks ---------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A model, and what changes it."""

    make: Callable[[Any], Any]
    control: Callable[[Any], Any]
    latent: tuple[int, ...]
    weight: str  # of a block that is left out
    half: float  # of the noise schedule, where a step is to be skipped


KINDS = {
    "unet": Kind(
        lambda models: models.unet("sd15", torch.float32, **SMALL_UNET),
        lambda models: models.controlnet("sd15", torch.float32, **SMALL_UNET),
        (1, 4, 13, 17),
        "diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_k.weight",
        0.6,
    ),
    "flux": Kind(
        lambda models: models.flux(torch.float32, **SMALL_FLUX | {"depth": BLOCKS, "depth_single_blocks": BLOCKS}),
        flux_control,
        (1, 16, 12, 14),
        "diffusion_model.double_blocks.2.img_mlp.0.weight",
        0.5,
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def model(kind, models):
    return kind.make(models)


@pytest.fixture(scope="module")
def unchanged(models):
    """The latent of a kind's model as it is, by itself or with another node."""
    return cache(lambda kind, node=lambda model: model: sample(models, node(kind.make(models)), kind))


def prompts(models, patcher):
    return [models.conditioning(patcher, 20, seed=seed) for seed in (1, 2)]


def controlled(models, patcher, kind, start=0.0, end=1.0, parts=("input", "middle", "output")):
    """A prompt with a real ControlNet of random weights. parts: of its residuals."""
    control = kind.control(models)
    control.set_cond_hint(randn(1, 3, *(8 * side for side in kind.latent[2:])), 0.8, (start, end))
    network, own = control.control_model, control.control_model.forward
    network.forward = lambda *args, **kwargs: {n: r for n, r in own(*args, **kwargs).items() if n in parts}
    (prompt,) = prompts(models, patcher)[:1]
    return [[c, extra | {"control": control, "control_apply_to_uncond": True}] for c, extra in prompt]


def sample(models, patcher, kind, positive=None, cfg=lambda step: 7.0, steps=STEPS):
    """A run. cfg: of each step, as nodes have it that change it in mid-run."""
    import comfy.sample
    import comfy.samplers

    class Guider(comfy.samplers.CFGGuider):
        def predict_noise(self, *args, **kwargs):
            self.cfg, self.step = cfg(self.step), self.step + 1
            return super().predict_noise(*args, **kwargs)

    guider, latent = Guider(patcher), torch.zeros(kind.latent)
    guider.step, (own, negative) = 0, prompts(models, patcher)
    guider.set_conds(own if positive is None else positive, negative)
    noise, scheduler = comfy.sample.prepare_noise(latent, 1), models.traits(patcher).scheduler
    sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), scheduler, steps)
    with torch.inference_mode():
        return guider.sample(
            noise, latent, comfy.samplers.ksampler("euler"), sigmas, disable_pbar=True, seed=1
        )  # fmt: skip


def test_controlnet(models, model, kind, unchanged):
    """Every step is steered, skipped ones too; compiled or not."""
    prompt = controlled(models, model, kind)
    out = sample(models, skipping(model), kind, prompt)
    assert counted() == PLANNED
    assert error(out, unchanged(kind, skipping)) > 1e-3
    assert error(sample(models, compiled(skipping(model)), kind, prompt), out) < 1e-3
    few = {"positive": prompt, "steps": 4}
    assert torch.equal(sample(models, skipping(model, interval=1), kind, **few), sample(models, model, kind, **few))


@pytest.mark.parametrize("part", ["input", "output"])
def test_residuals_of_one_kind_of_block(models, unchanged, part):
    """Of a transformer's double or single blocks alone."""
    kind = KINDS["flux"]
    model = kind.make(models)
    prompt = controlled(models, model, kind, parts=(part,))
    wanted, out = (sample(models, each, kind, prompt) for each in (model, skipping(model)))
    assert counted() == PLANNED and error(out, wanted) < error(out, unchanged(kind))


@pytest.mark.parametrize(("kind", "half"), [("unet", "start"), ("flux", "end")], indirect=["kind"])
def test_a_controlnet_of_half_a_run(models, model, kind, half):
    """A feature that was steered is not for a step that is not, nor the other way round: computed again and counted."""
    prompt = controlled(models, model, kind, **{half: kind.half})
    out = sample(models, skipping(model), kind, prompt)
    assert counted() == ONCE_MORE
    assert error(sample(models, compiled(skipping(model)), kind, prompt), out) < 1e-3


@pytest.mark.parametrize(("kind", "strengths"), [("unet", (0.0, 1.0)), ("flux", (1.0, 0.0))], indirect=["kind"])
def test_lora_hooks_that_change_in_mid_run(models, model, kind, unchanged, strengths):
    """Weights by hooks with keyframes: a feature of the old weights is not for the new ones."""
    import comfy.hooks

    weight = model.model.state_dict()[kind.weight]
    hooks = comfy.hooks.create_hook_lora(lora={}, strength_model=1.0, strength_clip=1.0)
    hook = hooks.hooks[0]
    hook.weights, hook.need_weight_init = {kind.weight: (randn(*weight.shape),)}, False
    frames = comfy.hooks.HookKeyframeGroup()
    for strength, start in zip(strengths, (0.0, kind.half), strict=True):
        frames.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=start))
    hooks.set_keyframes_on_hooks(frames)
    positive = comfy.hooks.set_hooks_for_conditioning(prompts(models, model)[0], hooks)
    wanted, out = (sample(models, each, kind, positive) for each in (model, skipping(model)))
    assert counted() == ONCE_MORE
    assert error(wanted, unchanged(kind)) > 1e-3 and error(out, wanted) < 0.7
    assert torch.equal(sample(models, skipping(model, interval=1), kind, positive), wanted)


@pytest.mark.parametrize(
    ("kind", "before", "after", "first", "later"),
    [
        ("unet", 7.0, 1.0, BATCH, PLANNED),
        ("flux", 1.0, 7.0, ONCE_MORE, ONCE_MORE),
        ("flux", 7.0, 3.0, PLANNED, PLANNED),
    ],
    ids=["off", "on", "less"],
    indirect=["kind"],
)
def test_cfg_that_changes_in_mid_run(models, model, kind, unchanged, monkeypatch, before, after, first, later):
    """Without CFG ComfyUI leaves the negative prompt out: a smaller batch, and when it comes it has no feature yet."""
    run = {"cfg": lambda step: before if step < 5 else after}
    wanted = sample(models, model, kind, **run)
    assert error(wanted, unchanged(kind)) > 1e-3
    sample(models, skipping(model), kind, **run)
    assert counted() == first
    outs = []
    for made in (skipping(model), compiled(skipping(model))):
        outs.append(sample(models, made, kind, **run))
        assert counted() == later
    assert error(outs[0], wanted) < 0.7 and error(*outs) < 1e-3
    assert torch.equal(sample(models, skipping(model, interval=1), kind, **run), wanted)
    if later == PLANNED:  # whose feature is whose does not hang on who is beside it
        memory_by_turns(monkeypatch, False)
        assert error(sample(models, skipping(model), kind, **run), outs[0]) < 1e-4
