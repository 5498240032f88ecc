"""Batches that ComfyUI makes: split and joined as memory allows, areas, masks, many prompts; eager's image always."""

import types

import pytest
import torch

from tools.driving import SMALL_UNET, SMALL_UNETS, compiled, memory_by_turns, randn, sample_prompts
from tools.oracles import assert_fast, error

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32
CHANGED = 1e-3
TOKENS = 77
NAMES = ("sd15", "sdxl")


@pytest.fixture(scope="module")
def patchers(small_unets):
    return small_unets


@pytest.fixture(scope="module")
def warm(models, patchers, counting):
    """Compiled, after the first prompt at batch 1 and the first above: from here on nothing may compile.

    That is also after a prompt with GLIGEN's boxes, at another size.
    """
    fast = {name: compiled(patcher) for name, patcher in patchers.items()}
    for name, each in fast.items():
        for latent in (latents(name), latents(name, 2)):
            sample_prompts(each, *prompts(models, each, name), latent=latent, cfg=1.0, steps=2)
    positive, negative = prompts(models, patchers["sd15"], "sd15")
    boxed = with_boxes(models, patchers["sd15"], positive, 4)
    sample_prompts(fast["sd15"], boxed, negative, latent=latents("sd15", height=8), steps=2)
    return fast


@pytest.fixture(autouse=True)
def _nothing_compiles(nothing_compiles):
    """Of every test of this file."""


def latents(name, batch=1, height=None):
    return torch.zeros(batch, 4, height or 11, 10)


def prompt(models, patcher, name, seed, tokens=None):
    return models.conditioning(patcher, tokens or TOKENS, seed)


def prompts(models, patcher, name):
    return prompt(models, patcher, name, 1), prompt(models, patcher, name, 2)


def assert_equal(patchers, warm, name, positive, negative, **run):
    """Compiled equals eager, fused; eager's image."""
    run = {"latent": latents(name)} | run
    wanted = sample_prompts(patchers[name], positive, negative, **run)
    assert error(sample_prompts(warm[name], positive, negative, **run), wanted) < CLOSE
    assert_fast()
    return wanted


# Memory -----------------------------------------------------------------------------------------------------------


def test_cond_and_uncond_are_split_and_joined_in_mid_run(models, patchers, warm, monkeypatch):
    """As free memory comes and goes; the image is the same as with both in one batch."""
    name, batches, own = "sd15", [], patchers["sd15"].model.apply_model

    def recording(x, *args, **kwargs):
        batches.append(len(x))
        return own(x, *args, **kwargs)

    run = {"steps": 4, "latent": latents(name, 2)}
    joined = assert_equal(patchers, warm, name, *prompts(models, patchers[name], name), **run)
    monkeypatch.setattr(patchers[name].model, "apply_model", recording)
    outs = []
    for each in (patchers[name], warm[name]):
        memory_by_turns(monkeypatch, True, False, False, True)
        outs.append(sample_prompts(each, *prompts(models, each, name), **run))
    # a question a batch that is still to be made: 4 together, or 2 and 2
    assert set(batches) == {2, 4} and batches[: len(batches) // 2] == batches[len(batches) // 2 :]
    assert error(outs[1], outs[0]) < CLOSE and error(outs[1], joined) < CLOSE
    assert_fast()


def test_batches_1_to_8(models, patchers, warm):
    for batch in (1, 3, 8):
        for cfg in (1.0, 4.0):
            run = {"latent": latents("sdxl", batch), "cfg": cfg, "steps": 2}
            assert_equal(patchers, warm, "sdxl", *prompts(models, patchers["sdxl"], "sdxl"), **run)


# Several prompts --------------------------------------------------------------------------------------------------


def in_area(cond, height, width, y, x):
    """ConditioningSetArea, in image pixels."""
    import nodes

    return nodes.ConditioningSetArea().append(cond, width, height, x, y, 1.2)[0]


def in_mask(cond, mask, area="default"):
    import nodes

    return nodes.ConditioningSetMask().append(cond, mask, area, 0.9)[0]


def in_range(cond, start, end):
    import nodes

    return nodes.ConditioningSetTimestepRange().set_range(cond, start, end)[0]


def masks():
    """A half, a soft ramp, and a small window."""
    half, window = torch.zeros(1, 88, 80), torch.zeros(1, 88, 80)
    half[:, :, :40], window[:, 20:60, 30:70] = 1.0, 1.0
    return half, torch.linspace(0, 1, 80).expand(1, 88, 80), window


def regional(kind, conds):
    """A positive prompt of several."""
    a, b, c, d = conds
    _, ramp, window = masks()
    return {
        "combined": a + b + c,
        "areas of one size": in_area(a, 88, 40, 0, 0) + in_area(b, 88, 40, 0, 40) + in_area(c, 88, 40, 0, 16),
        "everything": in_mask(a, ramp)
        + in_area(b, 56, 48, 24, 24)
        + in_range(c, 0.4, 0.8)
        + in_mask(d, window, "mask bounds"),
    }[kind]


@pytest.fixture(scope="module")
def first_prompt(models, patchers):
    """Eager's image of the first of several prompts alone."""
    pair = [prompt(models, patchers["sd15"], "sd15", seed) for seed in (10, 2)]
    return sample_prompts(patchers["sd15"], *pair, latents("sd15"), steps=3)


@pytest.mark.parametrize("kind", ["combined", "areas of one size", "everything"])
def test_several_prompts(models, patchers, first_prompt, warm, kind):
    """Of unequal lengths where ComfyUI keeps them apart, in areas, masks and parts of the run."""
    name, base = "sd15", TOKENS
    conds = [prompt(models, patchers[name], name, 10 + i, base * length) for i, length in enumerate((1, 2, 3, 1))]
    negative = prompt(models, patchers[name], name, 2)
    wanted = assert_equal(patchers, warm, name, regional(kind, conds), negative, steps=3)
    assert error(wanted, first_prompt) > CHANGED


@pytest.mark.parametrize("name", NAMES)
def test_unequal_prompts_in_one_batch(models, patchers, warm, name):
    """77 and 154 tokens are repeated to one length by ComfyUI and go together; negative ones in an area too."""
    base = TOKENS
    positive, negative = prompt(models, patchers[name], name, 1, 2 * base), prompt(models, patchers[name], name, 2)
    assert_equal(patchers, warm, name, positive, negative + in_area(positive, 40, 40, 0, 0), steps=2)


def test_guiders(models, patchers, warm):
    """Three predictions per step: DualCFGGuider and PerpNegGuider, on custom samplers."""
    from comfy_extras.nodes_custom_sampler import DualCFGGuider
    from comfy_extras.nodes_perpneg import PerpNegGuider

    conds = [prompt(models, patchers["sdxl"], "sdxl", seed, 77 * (1 + seed % 2)) for seed in (1, 2, 3)]
    for guider, settings in ((DualCFGGuider, (4.0, 6.0, "regular")), (PerpNegGuider, (5.0, 0.8))):
        outs = [guided(guider.execute(each["sdxl"], *conds, *settings).args[0]) for each in (patchers, warm)]
        assert error(outs[1], outs[0]) < CLOSE
    assert_fast()


def guided(guider):
    """What a custom sampler makes with this guider."""
    from comfy_extras.nodes_custom_sampler import KSamplerSelect, RandomNoise, SamplerCustomAdvanced

    sigmas = torch.tensor([14.0, 5.0, 1.0, 0.0])
    with torch.inference_mode():
        parts = (RandomNoise.execute(5).args[0], guider, KSamplerSelect.execute("dpmpp_2m").args[0], sigmas)
        return SamplerCustomAdvanced.execute(*parts, {"samples": latents("sdxl")}).args[0]["samples"]


def test_each_side_has_a_model(models, patchers, warm):
    """DualModelGuider, of Ideogram 4: the negative prompt runs on another model, with the options of the first."""
    from comfy_extras import nodes_custom_sampler as custom

    if not hasattr(custom, "DualModelGuider"):
        pytest.skip("this ComfyUI has no such guider")
    other = models.unet("sdxl", torch.float32, **SMALL_UNETS["sdxl"])
    with torch.no_grad():
        for weight in other.model.diffusion_model.parameters():
            weight.mul_(0.9)
    positive, negative = prompts(models, patchers["sdxl"], "sdxl")

    def sampled(first, second):
        return guided(custom.DualModelGuider.execute(first, positive, 4.0, second, negative).args[0])

    wanted = sampled(patchers["sdxl"], other)
    assert error(sampled(patchers["sdxl"], patchers["sdxl"]), wanted) > CHANGED
    assert error(sampled(warm["sdxl"], compiled(other)), wanted) < CLOSE
    assert_fast()


def on_cpu(models, model):
    """A patcher of this model, with random weights."""
    from comfy.model_patcher import ModelPatcher

    models.randomise(getattr(model, "diffusion_model", model))
    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def with_boxes(models, patcher, cond, seed):
    """What GLIGENTextBoxApply adds to a prompt: a small GLIGEN of random weights, and two boxes with texts."""
    import node_helpers
    from comfy.gligen import GatedSelfAttentionDense, Gligen, PositionNet
    from comfy.ldm.modules.attention import SpatialTransformer

    transformers = [m for m in patcher.model.diffusion_model.modules() if isinstance(m, SpatialTransformer)]
    gates = [GatedSelfAttentionDense(m.norm.num_channels, 64, 2, m.norm.num_channels // 2) for m in transformers]
    gligen = Gligen(gates, PositionNet(32, 64), 32)
    boxes = [(randn(1, 32, seed=seed + i) * 3, 5, 4, i, 2 * i) for i in (1, 2)]
    return node_helpers.conditioning_set_values(cond, {"gligen": ("position", on_cpu(models, gligen), boxes)})


def test_gligen(models, patchers, warm):
    """A patch that comes with one prompt: patched blocks run their own code, and the negative prompt runs fast."""
    positive, negative = prompts(models, patchers["sd15"], "sd15")
    boxed = with_boxes(models, patchers["sd15"], positive, 4)
    wanted = assert_equal(patchers, warm, "sd15", boxed, negative, steps=2)
    assert error(wanted, sample_prompts(patchers["sd15"], positive, negative, latents("sd15"), steps=2)) > CHANGED


def test_noise_mask(models, patchers, warm):
    """Inpainting with an ordinary model."""
    half, ramp, _ = masks()
    latent, pair = randn(*latents("sd15").shape, seed=3), prompts(models, patchers["sd15"], "sd15")
    plain = sample_prompts(patchers["sd15"], *pair, latent=latent, steps=3)
    for mask in (half, ramp):
        wanted = assert_equal(patchers, warm, "sd15", *pair, latent=latent, noise_mask=mask[None], steps=3)
        assert error(wanted, plain) > CHANGED


# Models with more inputs ------------------------------------------------------------------------------------------


def concatenated(cond, image, mask=None):
    import node_helpers

    values = {"concat_latent_image": image} | ({} if mask is None else {"concat_mask": mask})
    return node_helpers.conditioning_set_values(cond, values)


def test_an_inpaint_unet(models):
    """Nine channels: the latent, a mask and the masked image; at batch 1 and 2, and without either given."""
    patcher = models.unet("sd15", torch.float32, **SMALL_UNET, in_channels=9)
    fast = compiled(patcher)
    pair = [prompt(models, patcher, "sd15", seed) for seed in (1, 2)]
    given = [concatenated(cond, randn(1, 4, 11, 10, seed=4), masks()[0][None]) for cond in pair]
    for positive, negative in (given, pair):
        for batch in (1, 2):
            run = {"latent": latents("sd15", batch), "steps": 2}
            wanted = sample_prompts(patcher, positive, negative, **run)
            assert error(sample_prompts(fast, positive, negative, **run), wanted) < CLOSE
    assert_fast()


def test_instruct_pix2pix(models):
    """Eight channels: the latent and the image to edit."""
    import comfy.model_base

    settings = models.unet("sd15", torch.float32, **SMALL_UNET, in_channels=8).model.model_config
    patcher = on_cpu(models, comfy.model_base.SD15_instructpix2pix(settings))
    pair = [concatenated(prompt(models, patcher, "sd15", seed), randn(1, 4, 11, 10, seed=4)) for seed in (1, 2)]
    wanted = sample_prompts(patcher, *pair, latents("sd15"))
    assert error(sample_prompts(compiled(patcher), *pair, latents("sd15")), wanted) < CLOSE
    assert_fast()


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # in ComfyUI's own noise schedule
def test_unclip(models):
    """SD2 unCLIP: an image's embedding, with noise, beside the prompt."""
    import comfy.model_base
    import node_helpers

    config = SMALL_UNET | {"num_classes": "sequential", "adm_in_channels": 64}
    settings = models.unet("sd15", torch.float32, **config).model.model_config
    settings.noise_aug_config = {"noise_schedule_config": {"timesteps": 1000}, "timestep_dim": 32}
    patcher = on_cpu(models, settings.get_model({}, ""))
    assert type(patcher.model) is comfy.model_base.SD21UNCLIP
    vision = types.SimpleNamespace(image_embeds=randn(2, 32))
    image = {"clip_vision_output": vision, "strength": 0.9, "noise_augmentation": 0.1}
    positive, negative = prompts(models, patcher, "sd15")
    guided = node_helpers.conditioning_set_values(positive, {"unclip_conditioning": [image]})
    wanted = sample_prompts(patcher, guided, negative, latents("sd15"))
    assert error(wanted, sample_prompts(patcher, positive, negative, latents("sd15"))) > CHANGED
    assert error(sample_prompts(compiled(patcher), guided, negative, latents("sd15")), wanted) < CLOSE
    assert_fast()


# SDXL's sizes -----------------------------------------------------------------------------------------------------


def test_pooled_embeddings_of_several_prompts(models, patchers, warm):
    """SDXL's y: another one per prompt, with sizes and crops."""
    conds = [prompt(models, patchers["sdxl"], "sdxl", seed) for seed in (1, 2, 3)]
    for index, cond in enumerate(conds):
        cond[0][1] |= {"width": 64 * index, "height": 128, "crop_w": 8 * index, "crop_h": 0, "target_width": 96}
    wanted = assert_equal(patchers, warm, "sdxl", conds[0] + conds[1], conds[2], steps=2)
    plain = [prompt(models, patchers["sdxl"], "sdxl", seed) for seed in (1, 2, 3)]
    other = sample_prompts(patchers["sdxl"], plain[0] + plain[1], plain[2], latents("sdxl"), steps=2)
    assert error(wanted, other) > 1e-5
