"""Compile VAE on a real GPU, in workflows: ComfyUI's nodes, dtypes, memory that runs out, what is given back."""

import gc

import pytest
import torch

from tools.comfy_nodes import first_output
from tools.driving import compiled_vae, programs_short_of_memory, short_of_memory
from tools.oracles import FUSED, error, expect, fallbacks, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "exact_float32")]

TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2.5e-2, torch.float32: 1e-4}
MORE = 1.5  # one draw of rounding noise against another
SIZES = [(512, 512, 1), (544, 408, 2), (728, 720, 1), (203, 67, 3), (256, 256, 4)]  # width, height in pixels, batch


def latent(width, height, batch=1, channels=4):
    generator = torch.Generator().manual_seed(width * 31 + height)
    return {"samples": torch.randn(batch, channels, height // 8, width // 8, generator=generator)}


def picture(width, height, batch=1):
    return torch.rand(batch, height, width, 3, generator=torch.Generator().manual_seed(width * 31 + height))


def node(name, *args):
    """The first output of one of ComfyUI's nodes, as a tensor."""
    out = first_output(name, *args)
    return out["samples"] if isinstance(out, dict) else out


def strides(vae):
    return [weight.stride() for weight in vae.first_stage_model.parameters()]


@pytest.fixture(scope="module")
def vae(models):
    """The VAE that several workflows share; bf16, as ComfyUI runs it."""
    return models.vae(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_nodes(models, kind, dtype):
    """Full size, odd pictures, tiles: eager's, on kernels, with the weights laid out as ComfyUI had them."""
    make = models.flux_vae if kind == "flux" else models.vae
    vae = make(dtype)
    fast, layout = compiled_vae(vae), strides(vae)
    uses = [("VAEDecode", latent(*size, channels=vae.latent_channels)) for size in SIZES]
    uses += [("VAEEncode", picture(*size)) for size in SIZES]
    uses += [("VAEDecodeTiled", latent(728, 360, channels=vae.latent_channels), 256, 64)]
    uses += [("VAEEncodeTiled", picture(731, 363), 256, 64)]
    uses += [("VAEEncodeForInpaint", picture(544, 408), (picture(544, 408)[..., 0] > 0.8).float())]
    for name, *args in uses:
        out, wanted = node(name, fast, *args), node(name, vae, *args)
        found = error(out, wanted)
        print(kind, dtype, name, tuple(getattr(args[0], "shape", ())), found)
        assert found < TOLERANCE[dtype], (name, found)
    assert strides(vae) == layout
    assert fallbacks() == []  # the reason, if some of it ran in eager
    assert {s["state"] for s in shapes()} == {FUSED}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_flat_picture(models, dtype):
    """An empty image, or one under a mask. Its norms divide by next to nothing, so its latent is much of rounding: ours
    has no more of that than eager's, or eager's is taken.
    """
    vae, truth, blank = models.flux_vae(dtype), models.flux_vae(torch.float32), torch.full((1, 408, 544, 3), 0.5)
    out, wanted, exact = (node("VAEEncode", each, blank) for each in (compiled_vae(vae), vae, truth))
    assert error(out, exact) <= MORE * error(wanted, exact)
    assert not fallbacks() or torch.equal(out, wanted)


def test_nothing_compiles_after_the_first_calls(vae):

    fast = compiled_vae(vae)
    node("VAEEncode", fast, node("VAEDecode", fast, latent(512, 512)))
    with expect(recompiles=0, fallbacks=0):
        for batch, (width, height) in enumerate([(520, 776), (64, 64), (1024, 256), (408, 544)], start=1):
            node("VAEEncode", fast, node("VAEDecode", fast, latent(width, height, batch)))
            node("VAEDecodeTiled", fast, latent(width, height, batch), 128, 32)


def test_workflows_in_turn(vae):
    """With the node, without it, with it again: without it to the bit what it was, and its weights where they were."""
    z, pixels, fast = latent(544, 408), picture(544, 408), compiled_vae(vae)

    def run(each):
        return node("VAEDecode", each, z), node("VAEEncode", each, pixels)

    with torch.backends.cudnn.flags(deterministic=True):
        run(vae)  # the first one of a size
        wanted, layout = run(vae), strides(vae)
        places = [weight.data_ptr() for weight in vae.first_stage_model.parameters()]
        for _ in range(2):
            run(fast)
            assert all(torch.equal(*pair) for pair in zip(run(vae), wanted, strict=True))
    assert strides(vae) == layout and places == [weight.data_ptr() for weight in vae.first_stage_model.parameters()]


def test_unloaded_and_reloaded(vae):
    import comfy.model_management as mm

    fast, z = compiled_vae(vae), latent(512, 512)
    wanted = node("VAEDecode", vae, z)
    for _ in range(2):
        assert error(node("VAEDecode", fast, z), wanted) < TOLERANCE[torch.bfloat16]
        mm.unload_all_models()
        assert {weight.device.type for weight in vae.first_stage_model.parameters()} == {
            vae.patcher.offload_device.type
        }
    assert error(node("VAEDecode", vae, z), wanted) < 1e-3 and {s["state"] for s in shapes()} == {FUSED}


def test_two_vaes_in_turn(models, vae):
    other = models.flux_vae(torch.bfloat16)
    ways = [(each, compiled_vae(each)) for each in (vae, other)]
    for plain, fast in ways * 2:
        z = latent(408, 544, channels=plain.latent_channels)
        assert error(node("VAEDecode", fast, z), node("VAEDecode", plain, z)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("where", ["ours", "both"])
def test_out_of_memory(models, monkeypatch, where):
    """Injected: ComfyUI's whole picture, or its tiles, and the weights as they lay."""
    import comfy.ldm.modules.diffusionmodules.model as blocks

    vae = models.vae(torch.bfloat16)
    fast, layout, z = compiled_vae(vae), strides(vae), latent(512, 1032)
    programs_short_of_memory(monkeypatch, 128)
    if where == "both":
        short_of_memory(monkeypatch, blocks.Decoder, "forward", 128)
    assert error(node("VAEDecode", fast, z), node("VAEDecode", vae, z)) < TOLERANCE[torch.bfloat16]
    assert all("out of memory" in f["reason"] for f in fallbacks()) and fallbacks()
    assert strides(vae) == layout
    node("VAEDecode", fast, latent(512, 512))
    assert shapes()[-1]["state"] == FUSED


def test_memory_that_really_runs_out(models):
    """The card itself says no: the picture is still made, in tiles, and everything is given back."""
    vae = models.vae(torch.bfloat16)
    fast, z = compiled_vae(vae), latent(1024, 1024)
    wanted, layout = node("VAEDecode", vae, z), strides(vae)
    node("VAEDecode", fast, latent(512, 512))
    gc.collect()
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (3 << 30)) / total)
    try:
        out = node("VAEDecode", fast, z)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert out.shape == wanted.shape and error(out, wanted) < 0.2  # tiles are blended
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (8 << 20) and strides(vae) == layout


def test_an_interrupt_leaves_the_layout(vae, monkeypatch):
    """Of the weights, which others use as well."""
    import comfy.model_management as mm
    from anyshape.accel.tape.program import Program

    fast, layout = compiled_vae(vae), strides(vae)
    node("VAEDecode", fast, latent(512, 512))

    def interrupted(*args):
        raise mm.InterruptProcessingException

    with monkeypatch.context() as patched:
        patched.setattr(Program, "run", interrupted)
        with pytest.raises(mm.InterruptProcessingException):
            node("VAEDecode", fast, latent(512, 512))
    assert strides(vae) == layout
    node("VAEDecode", fast, latent(512, 512))
    assert {s["state"] for s in shapes()} == {FUSED} and fallbacks() == []


def test_a_freed_vae_gives_its_memory_back(models):
    import comfy.model_management as mm

    def once():
        vae = models.vae(torch.bfloat16)
        fast = compiled_vae(vae)
        node("VAEEncode", fast, node("VAEDecode", fast, latent(512, 512)))

    def allocated():
        mm.unload_all_models()
        gc.collect()
        mm.cleanup_models()
        return torch.cuda.memory_allocated()

    once()
    before = allocated()
    once()
    assert allocated() <= before + (1 << 20)
