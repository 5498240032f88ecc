"""The demo model: what it is made of, that ComfyUI's own means work on it, and that it has learned its emoji."""

import importlib
import logging
import time
from types import ModuleType

import pytest
import torch

LIMIT_BYTES = 12_000_000
SHOWN = 2  # of the proof's 50 prompts, those sampled here
BOTH = ("unet", "transformer")


@pytest.fixture(scope="module")
def demo(demo_pack) -> ModuleType:
    """demo/model.py."""
    return importlib.import_module("anyshape_demo.model")


@pytest.fixture(scope="module")
def evaluate(demo_pack) -> ModuleType:
    """demo/evaluate.py."""
    return importlib.import_module("anyshape_demo.evaluate")


@pytest.fixture(scope="module")
def loaded(demo) -> tuple:
    """MODEL (the UNet), VAE and text encoder."""
    return demo.load()


@pytest.fixture(scope="module")
def transformer(demo) -> tuple:
    """As ``loaded``, with the transformer."""
    return demo.load(architecture=demo.TRANSFORMER)


@pytest.fixture(params=BOTH)
def either(request) -> tuple:
    """``loaded`` or ``transformer``."""
    return request.getfixturevalue("loaded" if request.param == BOTH[0] else request.param)


def test_file_is_small_and_half_precision(demo):
    weights, metadata = demo.read_file()
    assert demo.FILE.stat().st_size <= LIMIT_BYTES
    assert {w.dtype for w in weights.values()} == {torch.float16}
    assert all(w.isfinite().all() for w in weights.values())
    prefixes = (demo.MODEL_PREFIX, demo.VAE_PREFIX, demo.TEXT_PREFIX)
    assert all(key.startswith(prefixes) for key in weights)
    assert len(set(metadata["prompts"])) == len(metadata["codepoints"]) >= 500


def test_the_transformers_file_too(demo):
    weights, metadata = demo.read_file(demo.TRANSFORMER_FILE)
    assert demo.TRANSFORMER_FILE.stat().st_size <= LIMIT_BYTES
    assert {w.dtype for w in weights.values()} == {torch.float16} and all(w.isfinite().all() for w in weights.values())
    assert all(key.startswith(demo.MODEL_PREFIX) for key in weights)
    assert metadata["latent"] == demo.read_file()[1]["latent"], "it paints what the UNet's autoencoder decodes"


@pytest.mark.parametrize("architecture", BOTH)
def test_a_model_knows_its_file_and_how_it_is_loaded_again(demo, pack, architecture):
    """As those of ComfyUI's own loaders do."""
    from anyshape.nodes.badge import loaded_from

    patcher, vae, _ = demo.load(architecture=architecture)
    own = "emoji" if architecture == BOTH[0] else "emoji_transformer"
    assert [loaded_from(one) for one in (patcher, patcher.clone(), vae.patcher)] == [own, own, "emoji"]
    for one in (patcher, vae.patcher):
        make, args = one.cached_patcher_init
        again, weights = make(*args), one.model.state_dict()
        assert again.model is not one.model
        assert all(torch.equal(value, weights[name]) for name, value in again.model.state_dict().items())


def test_architecture_is_lumina_2(transformer):
    from comfy.ldm.lumina.model import NextDiT
    from comfy.model_base import Lumina2

    model = transformer[0].model
    assert type(model) is Lumina2 and type(model.diffusion_model) is NextDiT
    assert len(model.diffusion_model.layers) >= 8, "a middle worth skipping"


def test_architecture_is_stable_diffusions(loaded):
    from comfy.ldm.models.autoencoder import AutoencoderKL
    from comfy.ldm.modules.attention import SpatialTransformer
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    patcher, vae, _ = loaded
    unet = patcher.model.diffusion_model
    assert type(unet) is UNetModel and type(vae.first_stage_model) is AutoencoderKL
    assert len(unet.channel_mult) == 3 and len(unet.output_blocks) == len(unet.input_blocks)
    for blocks in (unet.input_blocks, unet.output_blocks):
        widths = {module.in_channels for block in blocks for module in block if isinstance(module, SpatialTransformer)}
        assert widths == {64, 128}, "cross-attention at two levels"
    assert any(isinstance(module, SpatialTransformer) for module in unet.middle_block)


def test_nothing_wants_gradients(either):
    patcher, vae, _ = either
    modules = (patcher.model, vae.first_stage_model)
    assert not any(p.requires_grad for module in modules for p in module.parameters())
    assert not any(m.training for m in (patcher.model.diffusion_model, vae.first_stage_model))


def test_every_weight_of_the_file_is_used(demo, loaded):
    patcher, vae, _ = loaded
    weights, _ = demo.read_file()
    assert set(demo.under(weights, demo.VAE_PREFIX)) == set(vae.first_stage_model.state_dict())
    assert set(demo.under(weights, demo.MODEL_PREFIX)) == set(patcher.model.diffusion_model.state_dict())


def test_every_weight_of_the_transformer_is_used(demo, transformer):
    own = set(demo.under(demo.read_file(demo.TRANSFORMER_FILE)[0], demo.MODEL_PREFIX))
    assert own - {"norm_final.weight"} == set(transformer[0].model.diffusion_model.state_dict()) - {"norm_final.weight"}


@pytest.mark.parametrize(("height", "width"), [(9, 13), (13, 8)])
def test_latents_with_odd_sides(either, height, width):
    patcher, vae, text = either
    with torch.inference_mode():
        x, sigma, context = torch.randn(2, 4, height, width), torch.tensor([0.9, 0.1]), text.encode("rocket")
        extra = {"num_tokens": context.shape[1]} if "Lumina2" in type(patcher.model).__name__ else {}
        out = patcher.model.apply_model(x, sigma, c_crossattn=context.repeat(2, 1, 1), **extra)
        picture = vae.decode(torch.randn(1, 4, height, width))
    assert out.shape == x.shape and out.isfinite().all()
    assert picture.shape == (1, height * 8, width * 8, 3)


def test_autoencoder_gives_the_picture_back(loaded, evaluate):
    vae = loaded[1]
    emoji = torch.nn.functional.interpolate(evaluate.load_references()[:2], scale_factor=4, mode="bicubic").clamp(0, 1)
    pixels = emoji.movedim(1, -1)
    with torch.inference_mode():
        latent = vae.encode(pixels)
        made = vae.decode(latent)
    assert latent.shape == (2, 4, 24, 24)
    assert (made - pixels).abs().mean() < 0.03
    scaled = loaded[0].model.process_latent_in(latent)
    assert 0.5 < scaled.std() < 2, "the latent format's scale factor fits the latents"


def test_prompt_lengths(demo, loaded):
    text = loaded[2]
    width = demo.CONTEXT_DIM
    for words, tokens in ((0, 77), (2, 77), (77, 77), (78, 154), (200, 231)):
        ((context, extra),) = demo.encode(text, " ".join(["rocket"] * words))
        assert context.shape == (1, tokens, width) and extra["pooled_output"].shape == (1, width)


def test_unknown_words(loaded, caplog):
    text = loaded[2]
    with caplog.at_level(logging.WARNING):
        context = text.encode("red aple")
    assert "'aple'" in caplog.text and "apple" in caplog.text
    assert torch.equal(context, text.encode("red"))
    with pytest.raises(ValueError, match="'rokcet'.*rocket"):
        text.encode("rokcet")


PATCHED = {
    "UNetModel": "diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_k.weight",
    "NextDiT": "diffusion_model.layers.3.attention.out.weight",
}


def test_weight_patches_find_their_keys_and_go_again(either, evaluate):
    patcher = either[0].clone()
    key = PATCHED[type(patcher.model.diffusion_model).__name__]
    difference = torch.ones_like(patcher.model_state_dict()[key])
    assert patcher.add_patches({key: (difference,)}, 0.5) == [key]
    setting = evaluate.Setting(steps=1)

    def picture(model) -> torch.Tensor:
        with torch.inference_mode():
            return evaluate.generate((model, *either[1:]), ["rocket"], [1], (64, 64), setting)

    plain, patched = picture(either[0]), picture(patcher)
    assert not torch.allclose(plain, patched, atol=1e-3)
    assert torch.equal(plain, picture(either[0]))


@pytest.mark.parametrize("architecture", BOTH)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dtype_can_be_chosen(demo, dtype, architecture):
    patcher, vae, _ = demo.load(dtype, architecture)
    assert patcher.model.get_dtype() == vae.vae_dtype == demo.DTYPES[dtype]


def test_activations_fit_in_half_precision(either, evaluate):
    """The weights may be run in fp16 anywhere, so nothing on the way may come near its limit of 65504."""
    patcher, vae, _ = either
    largest = 0.0

    def watch(module, inputs, output) -> None:
        nonlocal largest
        if torch.is_tensor(output):
            largest = max(largest, output.abs().max().item())

    modules = [m for root in (patcher.model.diffusion_model, vae.first_stage_model) for m in root.modules()]
    handles = [module.register_forward_hook(watch) for module in modules]
    try:
        with torch.inference_mode():
            evaluate.generate(either, ["octopus"], [1], (256, 256), evaluate.Setting(steps=4, cfg=5.0))
    finally:
        for handle in handles:
            handle.remove()
    assert 0 < largest < 6000


@pytest.mark.parametrize(("size", "first"), [((320, 192), 0), ((200, 264), 1)])
def test_pictures_show_what_was_asked_for(either, evaluate, size, first):
    """A part of the proof (demo/proof.json has it all): each picture is nearest to its own emoji among all 50.

    In half as many steps. Beside its emoji a wide picture is white.
    first: every second prompt is sampled at one size, the others at the other.
    """
    features, nearest = evaluate.features, evaluate.nearest
    started = time.monotonic()
    prompts = either[2].prompts
    places = list(range(0, evaluate.COUNT, evaluate.COUNT // SHOWN))[first:SHOWN:2]
    names = [prompts[evaluate.proof_indices(len(prompts))[place]] for place in places]
    with torch.inference_mode():
        pictures = evaluate.generate(either, names, list(range(first, SHOWN, 2)), size, evaluate.Setting(steps=4))
    found = nearest(features(pictures), features(evaluate.load_references()))
    assert found.tolist() == places, names
    if size[0] > size[1]:
        assert all(picture[:, :, side].mean() > 0.97 for picture in pictures for side in (slice(40), slice(-40, None)))
    assert time.monotonic() - started < 60


def test_nodes_give_what_comfyui_expects(demo_pack):
    nodes = importlib.import_module("anyshape_demo.nodes")
    schemas = {node.define_schema().node_id: node.define_schema() for node in (nodes.DemoLoader, nodes.DemoPrompt)}
    assert set(schemas) == {"AnyShapeDemoLoader", "AnyShapeDemoPrompt"}
    assert [output.io_type for output in schemas["AnyShapeDemoLoader"].outputs] == [
        "MODEL",
        "VAE",
        "ANYSHAPE_DEMO_TEXT",
    ]
    assert all(entry.tooltip for schema in schemas.values() for entry in schema.inputs)
    model, vae, text = nodes.DemoLoader.execute().result
    other = nodes.DemoLoader.execute(architecture="transformer").result[0]
    assert [type(each.model.diffusion_model).__name__ for each in (model, other)] == ["UNetModel", "NextDiT"]
    (conditioning,) = nodes.DemoPrompt.execute(text, "").result
    assert conditioning[0][0].shape == (1, 77, 96)
