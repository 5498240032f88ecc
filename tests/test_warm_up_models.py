"""Warm Up without a prompt, of any model: the prompt it makes up, frames, and latents as ComfyUI's nodes make them."""

import re

import pytest
import torch

from tools.driving import compiled
from tools.oracles import FUSED, fallbacks, shapes
from tools.warming import ran, warm


def made(name):
    """A tiny model of this kind, compiled, and the pixels and frames of one element of its latents."""
    from anyshape.accel.comfy.latents import latents_of

    from tools.architectures import patchers

    model = compiled(patchers.make(name))
    return model, latents_of(model.get_model_object("latent_format"))


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("WAN21_T2V", {"context": (256, 40), "frames": True}), ("Flux", {"context": (256, 40), "y": (24,)}),
        ("SD3", {"context": (256, 40), "y": (24,)}), ("QwenImage", {"context": (256, 40)}),
        ("LTXV", {"context": (256, 40), "attention_mask": (256,), "frames": True}), ("Flux2", {"context": (512, 40)}),
        ("HunyuanVideo", {"context": (256, 40), "y": (24,), "frames": True}), ("ZImage", {"context": (256, 40)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_any_model_without_a_prompt(pack, clean_stats, name, prompt) -> None:
    """Its latents, and a prompt of the widths that it takes, which nobody has written down here."""
    model, latents = made(name)
    wanted, video = dict(prompt), prompt.get("frames", False)
    wanted.pop("frames", None)
    report = warm(pack, model, "128x128x9" if video else "128x128")
    (shape,) = shapes()
    size = latents.size(latents.shape(128, 128, 1, 9 if video else 1))
    assert (shape["width"], shape["height"], shape["frames"]) == size
    found = dict(re.findall(r"(\w+)\[\d+x([\dx]+)\]", shape["key"]))
    assert {part: found[part] for part in wanted} == {p: "x".join(map(str, s)) for p, s in wanted.items()}
    assert ("y" in found, "attention_mask" in found) == ("y" in wanted, "attention_mask" in wanted)
    assert "failed" not in report and "not run" not in report and shape["state"] == FUSED


def test_a_model_that_no_plain_prompt_fits(pack, clean_stats) -> None:
    """HiDream wants the outputs of several text encoders."""
    model, _ = made("HiDream")
    (line,) = warm(pack, model, "128x128").splitlines()[1:]
    assert "not run" in line and "connect positive: no plain prompt fits this model" in line
    assert shapes() == [] and fallbacks() == []


def test_asking_for_a_prompt_leaves_nothing_behind(pack, clean_stats) -> None:
    """To the bit; and wrappers and random state are as they were."""
    from anyshape.accel.comfy.plain_prompt import plain_prompt

    from tools.oracles import assert_untouched, footprint

    model, latents = made("SD3")
    with torch.inference_mode():
        plain_prompt(model, latents)  # ComfyUI loads the model, which leaves its own marks
    before, state = footprint(model.model.diffusion_model), torch.get_rng_state()
    with torch.inference_mode():
        (((text, more),), problem) = plain_prompt(model, latents)
    assert (text.shape, more["pooled_output"].shape, problem) == ((1, 256, 40), (1, 24), "")
    assert_untouched(model.model.diffusion_model, before)
    assert torch.equal(torch.get_rng_state(), state) and shapes() == []


def test_frames_are_for_video_and_sizes_for_pictures(pack, clean_stats) -> None:
    flux, _ = made("Flux")
    report = warm(pack, flux, "128x128 9 frames\n64x64").splitlines()
    assert "not run" in report[1] and "this model makes single images: leave the frames out of" in report[1]
    assert ran().keys() == {(64, 64, 1)}
    sound, latents = made("StableAudio")
    assert latents is None
    assert "makes neither images nor video" in warm(pack, sound, "128x128")


def test_a_third_number_is_the_batch_where_there_are_no_frames(pack, patcher, clean_stats) -> None:
    report = warm(pack, compiled(patcher), "64x64x2\n64x64 batch 2\n72x64x5000")
    assert "64x64x2 - taken as 2 images: this model makes no video" in report
    assert ran().keys() == {(64, 64, 2)} and report.count("makes single images: leave the frames out") == 1


def test_what_a_models_latents_cannot_have_is_rounded_and_said(pack, clean_stats) -> None:
    wan, _ = made("WAN22_T2V")  # 16 pixels, and 4 frames after the first
    report = warm(pack, wan, "136x120x8 batch 2")
    assert "taken as 128x112x5 batch 2, the next size below that this model's latents have" in report
    (shape,) = shapes()
    assert (shape["width"], shape["height"], shape["frames"], shape["batch"]) == (128, 112, 5, 2)


@pytest.mark.parametrize(
    ("format_name", "node", "given"),
    [
        ("Wan21", "nodes_hunyuan.EmptyHunyuanLatentVideo", {"width": 848, "height": 480, "length": 33}),
        ("Mochi", "nodes_mochi.EmptyMochiLatentVideo", {"width": 848, "height": 480, "length": 25}),
        ("LTXV", "nodes_lt.EmptyLTXVLatentVideo", {"width": 768, "height": 512, "length": 97}),
        ("Cosmos1CV8x8x8", "nodes_cosmos.EmptyCosmosLatentVideo", {"width": 1280, "height": 704, "length": 121}),
        ("HunyuanVideo15", "nodes_hunyuan.EmptyHunyuanVideo15Latent", {"width": 848, "height": 480, "length": 33}),
        ("Flux2", "nodes_flux.EmptyFlux2LatentImage", {"width": 1000, "height": 1024}),
        ("HunyuanImage21", "nodes_hunyuan.EmptyHunyuanImageLatent", {"width": 2048, "height": 1056}),
        ("SD3", "nodes_sd3.EmptySD3LatentImage", {"width": 1016, "height": 720}),
    ],
    ids=str,
)  # fmt: skip
def test_latents_are_those_of_comfyuis_nodes(models, format_name, node, given) -> None:
    import importlib

    import comfy.latent_formats
    from anyshape.accel.comfy.latents import latents_of

    module, name = node.split(".")
    made_by_node = getattr(importlib.import_module(f"comfy_extras.{module}"), name).execute(**given, batch_size=2)
    found = latents_of(getattr(comfy.latent_formats, format_name)())
    shape = found.shape(given["width"], given["height"], 2, given.get("length", 1))
    assert shape == tuple(made_by_node.args[0]["samples"].shape)
    width, height, frames = found.size(shape)
    assert 0 <= given["width"] - width < found.pixels and 0 <= given["height"] - height < found.pixels
    assert frames == given.get("length", 1)
