"""Compile VAE in workflows, on the CPU: ComfyUI's own nodes on the node's output, and what else a VAE is used for."""

import pytest
import torch

from tools.comfy_nodes import first_output as node
from tools.driving import compiled_vae, programs_short_of_memory, randn, short_of_memory
from tools.oracles import FUSED, error, fallbacks, shapes
from tools.vae_driving import build, latent, picture, states

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32


@pytest.fixture(scope="module")
def vae(models):
    """The VAE that several workflows share."""
    return build(models)


@pytest.fixture
def fresh(models):
    return build(models)


# Nodes ------------------------------------------------------------------------------------------------------------


def test_tiled_nodes(vae):
    """Tiles of other sizes, the last ones cut off by the picture's edge."""
    (tile, overlap), fast, z = (64, 16), compiled_vae(vae), latent(13, 9)
    image = node("VAEDecodeTiled", vae, z, tile, overlap)
    assert error(node("VAEDecodeTiled", fast, z, tile, overlap), image) < CLOSE
    assert error(image, node("VAEDecode", vae, z)) > CLOSE  # it was tiled
    pixels = picture(107, 77)  # ComfyUI cuts it down to multiples of 8
    wanted = node("VAEEncodeTiled", vae, pixels, tile, overlap)["samples"]
    assert error(node("VAEEncodeTiled", fast, pixels, tile, overlap)["samples"], wanted) < CLOSE
    assert states() == {FUSED} and len(shapes()) > 8


def test_inpaint_nodes(vae):
    fast, pixels = compiled_vae(vae), picture(72, 40)
    mask = torch.zeros(1, 72, 40)
    mask[:, 20:50, 10:30] = 1
    wanted, out = (node("VAEEncodeForInpaint", each, pixels, mask, 6) for each in (vae, fast))
    assert error(out["samples"], wanted["samples"]) < CLOSE
    assert torch.equal(out["noise_mask"], wanted["noise_mask"])
    conds = [[randn(1, 77, 64), {}]]
    positive = [node("InpaintModelConditioning", conds, conds, pixels, each, mask)[0][1] for each in (vae, fast)]
    assert error(*(extra["concat_latent_image"] for extra in reversed(positive))) < CLOSE
    assert states() == {FUSED}


# Memory that runs out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ours", "eager"])
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_out_of_memory(fresh, monkeypatch, way, where):
    """In ours: ComfyUI's whole picture. In eager, which is what is recorded: tiles, each of them ours."""
    import comfy.ldm.modules.diffusionmodules.model as blocks

    fast, scale = compiled_vae(fresh), {"decode": 1, "encode": 8}[way]
    part = {"decode": blocks.Decoder, "encode": blocks.Encoder}[way]
    value = latent(129, 1)["samples"] if way == "decode" else picture(1032, 8)
    with torch.inference_mode():
        wanted = getattr(fresh, way)(value)
        if where == "ours":
            programs_short_of_memory(monkeypatch, 128 * scale)
            getattr(fast, way)(value)
        else:
            short_of_memory(monkeypatch, part, "forward", 128 * scale)
            whole, wanted = wanted, getattr(fresh, way)(value)
            assert error(wanted, whole) > CLOSE  # it was tiled
        out = getattr(fast, way)(value)
    assert error(out, wanted) < CLOSE
    assert {s["state"] for s in shapes() if s["height"] == 1032} == {"eager"}
    tiles = [s for s in shapes() if s["height"] != 1032]
    assert bool(tiles) == (where == "eager") and {s["state"] for s in tiles} <= {FUSED}
    assert fallbacks() and all("out of memory" in f["reason"] for f in fallbacks())


# Wrong input ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(models):
    """Flux's: without a quantisation layer, so that wrong input comes as far as our decoder."""
    return models.flux_vae(torch.float32)


def test_flux_vae_is_compiled(wide):
    fast, (z, pixels) = compiled_vae(wide), ({"samples": randn(1, 16, 5, 3)}, picture(40, 24))
    assert error(node("VAEDecode", fast, z), node("VAEDecode", wide, z)) < CLOSE
    assert error(*(node("VAEEncode", each, pixels)["samples"] for each in (fast, wide))) < CLOSE
    assert states() == {FUSED}


def outcomes(call, *vaes):
    """What each VAE gives, or its error's text: newer ComfyUI leaves out frames and channels that are too many."""
    found = []
    for each in vaes:
        try:
            with torch.inference_mode():
                found.append(call(each))
        except RuntimeError as problem:
            found.append(str(problem))
    return found


def assert_same_outcome(wanted, ours):
    assert type(ours) is type(wanted)
    assert ours == wanted if isinstance(wanted, str) else error(ours, wanted) < CLOSE


@pytest.mark.parametrize("shape", [(1, 16, 2, 3, 2), (1, 4, 3, 2), (1, 17, 3, 2)], ids=["video", "SDXL", "17 channels"])
def test_a_latent_of_another_model(wide, shape):
    """ComfyUI's own result or error, and the next latent is decoded fused."""
    fast = compiled_vae(wide)
    samples = randn(*shape)
    wanted, ours = outcomes(lambda vae: node("VAEDecode", vae, {"samples": samples}), wide, fast)
    assert_same_outcome(wanted, ours)
    assert isinstance(wanted, str) or len(shape) == 5
    assert node("VAEDecode", fast, {"samples": randn(1, 16, 3, 2)}).shape == (1, 24, 16, 3)
    assert shapes()[-1]["state"] == FUSED


def test_a_picture_with_another_number_of_channels(vae):
    fast, pixels = compiled_vae(vae), torch.rand(1, 40, 32, 4, generator=torch.Generator().manual_seed(1))
    assert_same_outcome(*outcomes(lambda each: each.encode(pixels), vae, fast))
    assert_same_outcome(*outcomes(lambda each: each.encode(pixels[..., :2]), vae, fast))
    node("VAEEncode", fast, picture(48, 32))
    assert shapes()[-1]["state"] == FUSED


# Others that use a VAE --------------------------------------------------------------------------------------------


def test_a_controlnet_that_needs_a_vae(models, vae):
    """ComfyUI's ControlNet encodes its hint with the VAE that the node gives it."""
    import comfy.cldm.cldm
    import comfy.latent_formats
    from comfy.controlnet import ControlNet

    from tools.driving import SMALL_UNET

    patcher = models.unet("sd15", torch.float32, **SMALL_UNET)
    config = {name: value for name, value in patcher.model.model_config.unet_config.items() if name != "out_channels"}
    network = comfy.cldm.cldm.ControlNet(hint_channels=4, **config)
    network.input_hint_block = comfy.cldm.cldm.TimestepEmbedSequential(
        torch.nn.Conv2d(4, SMALL_UNET["model_channels"], 1)
    )
    models.randomise(network)
    control = ControlNet(
        network, compression_ratio=1, latent_format=comfy.latent_formats.SD15(), load_device=patcher.load_device
    )
    conds, outs = [models.conditioning(patcher, seed=seed) for seed in (1, 2)], []
    for each in (vae, compiled_vae(vae), None):
        positive, negative = conds if each is None else controlled(conds, control, each)
        outs.append(sampled(patcher, positive, negative))
    assert error(outs[1], outs[0]) < CLOSE < error(outs[2], outs[0])
    assert states() == {FUSED}


def controlled(conds, control, vae):
    import nodes

    return nodes.ControlNetApplyAdvanced().apply_controlnet(*conds, control, picture(72, 136), 0.5, 0.0, 1.0, vae=vae)


def sampled(patcher, positive, negative, callback=None):
    import comfy.sample

    z = latent()["samples"]
    with torch.inference_mode():
        return comfy.sample.sample(
            patcher, randn(*z.shape, seed=3), 2, 3.0, "euler", "normal", positive, negative, z, callback=callback,
            disable_pbar=True, seed=1,
        )  # fmt: skip


def test_previews_are_left_alone(models, vae, monkeypatch, tmp_path):
    """Between two steps, while the compiled VAE is in use: the previews of a workflow without it."""
    import folder_paths
    import latent_preview
    from comfy.cli_args import LatentPreviewMethod
    from comfy.taesd.taesd import TAESD
    from comfy.utils import save_torch_file

    from tools.driving import SMALL_UNET

    tiny = TAESD()
    models.randomise(tiny)
    save_torch_file(tiny.taesd_decoder.state_dict(), tmp_path / "taesd_decoder.safetensors")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "vae_approx", ([str(tmp_path)], {".safetensors"}))
    monkeypatch.setattr(latent_preview.args, "preview_method", LatentPreviewMethod.TAESD)
    patcher = models.unet("sd15", torch.float32, **SMALL_UNET)
    previewer = latent_preview.get_previewer(patcher.load_device, patcher.model.latent_format)
    assert type(previewer).__name__ == "TAESDPreviewerImpl"
    conds = [models.conditioning(patcher, seed=seed) for seed in (1, 2)]

    def previews(each):
        seen = []

        def callback(step, x0, x, total):
            node("VAEDecode", each, {"samples": x0})
            seen.append(previewer.decode_latent_to_preview(x0))

        sampled(patcher, *conds, callback)
        return [image.tobytes() for image in seen]

    wanted = previews(vae)
    assert previews(compiled_vae(vae)) == wanted and len(set(wanted)) == 2
    assert states() == {FUSED}
