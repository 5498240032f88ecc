"""Compile VAE on ComfyUI's own autoencoders, on the CPU: the picture of eager, a shared VAE that stays as it is."""

import pytest
import torch

from tools.driving import compiled_vae, programs_short_of_memory, randn
from tools.oracles import FUSED, error, expect, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("pack", "clean_stats")

CLOSE = 1e-4  # relative L2 in fp32; the contract allows 1e-3
SIZES = [(64, 64, 1), (40, 72, 2), (8, 8, 1), (56, 24, 4)]  # width, height in pixels, batch


@pytest.fixture(scope="module")
def vae(models):
    return models.vae(torch.float32, ch=32, num_res_blocks=1)


@pytest.fixture
def fresh(models):
    """A VAE of the test's own: what is retired there harms no other test."""
    return models.vae(torch.float32, ch=32, num_res_blocks=1)


def latent(width, height, batch=1):
    generator = torch.Generator().manual_seed(width * 31 + height)
    return torch.randn(batch, 4, height // 8, width // 8, generator=generator)


def picture(width, height, batch=1):
    return torch.rand(batch, height, width, 3, generator=torch.Generator().manual_seed(width * 31 + height))


def decode(vae, *args):
    with torch.inference_mode():
        return vae.decode(latent(*args))


def encode(vae, *args):
    with torch.inference_mode():
        return vae.encode(picture(*args))


def states():
    return {s["state"] for s in shapes()}


# Parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_decode_and_encode_equal_eager(vae, size):
    fast = compiled_vae(vae)
    image = decode(vae, *size)
    assert 0.01 < image.std() and image.shape == (size[2], size[1], size[0], 3)
    assert error(decode(fast, *size), image) < CLOSE
    assert error(encode(fast, *size), encode(vae, *size)) < CLOSE
    assert states() == {FUSED}
    assert {(s["width"], s["height"], s["batch"]) for s in shapes()} == {size}


def test_odd_pictures_are_cropped_as_in_eager(vae):
    fast = compiled_vae(vae)
    assert error(encode(fast, 75, 35), encode(vae, 75, 35)) < CLOSE


def test_no_size_compiles(vae, fusing):
    """After the first decode and the first encode: no size, no batch, and no second VAE."""

    fast = compiled_vae(vae)
    decode(fast, 48, 48), encode(fast, 48, 48)
    with expect(recompiles=0, kernels=0, fallbacks=0):
        for width, height, batch in [*SIZES, (24, 88, 3), (8, 16, 1)]:
            decode(fast, width, height, batch), encode(fast, width, height, batch)
        decode(compiled_vae(vae), 80, 24)
    assert states() == {FUSED}


# The shared VAE ---------------------------------------------------------------------------------------------------


def test_toggling_leaves_the_shared_vae_as_it_was(vae):
    """A with the node, B without, A with, on one VAE: B to the bit what it was before."""
    before, image, moments = vae_footprint(vae), decode(vae, 40, 24), encode(vae, 40, 24)
    fast = compiled_vae(vae)
    first = decode(fast, 40, 24), encode(fast, 40, 24)
    count = sum(s["calls"] for s in shapes())
    assert torch.equal(decode(vae, 40, 24), image) and torch.equal(encode(vae, 40, 24), moments)
    assert sum(s["calls"] for s in shapes()) == count == 2
    assert torch.equal(decode(fast, 40, 24), first[0]) and torch.equal(encode(fast, 40, 24), first[1])
    assert vae_footprint(vae) == before
    assert vae.patcher is not fast.patcher and vae.patcher.model is vae.first_stage_model


def vae_footprint(vae):
    modules = [(name, id(m), sorted(m.__dict__)) for name, m in vae.first_stage_model.named_modules()]
    weights = [(p.data_ptr(), p.stride(), p.double().sum().item()) for p in vae.first_stage_model.parameters()]
    return modules, weights, sorted(vae.__dict__)


def test_weights_and_their_names_are_shared(vae):
    """A node that saves or loads the VAE's weights finds what it knows, and no byte is copied."""
    fast = compiled_vae(vae)
    own, ours = vae.get_sd(), fast.get_sd()
    assert list(own) == list(ours)
    assert all(own[name].data_ptr() == ours[name].data_ptr() for name in own)
    if hasattr(vae, "model_size"):  # newer than ComfyUI 0.3.64
        assert fast.model_size() == vae.model_size()


def test_disabled_passes_through(vae, pack):
    from anyshape.nodes import CompileVAE

    assert CompileVAE.execute(vae, False).args[0] is vae


def test_compiling_twice_is_compiling_once(vae):
    once = compiled_vae(vae)
    fast = compiled_vae(once)
    assert once is not vae and fast is once
    assert error(decode(fast, 40, 24), decode(vae, 40, 24)) < CLOSE
    assert [s["calls"] for s in shapes()] == [1]


# Other VAEs -------------------------------------------------------------------------------------------------------


def test_tiny_autoencoder_is_recorded(models):
    """TAESD, by ComfyUI's own constructor: eager's pictures to the bit, and the loaded VAE as it was."""
    import comfy.sd
    from comfy.taesd.taesd import TAESD

    model = TAESD()
    models.randomise(model)
    tiny = comfy.sd.VAE(sd=model.state_dict(), dtype=torch.float32)
    decode(tiny, 8, 8)  # loading it leaves ComfyUI's own marks on it
    before, fast = vae_footprint(tiny), compiled_vae(tiny)
    assert type(tiny.first_stage_model) is type(fast.first_stage_model) is TAESD
    for size in SIZES[1:3]:
        assert torch.equal(decode(fast, *size), decode(tiny, *size))
        assert torch.equal(encode(fast, *size), encode(tiny, *size))
    assert states() == {FUSED} and fallbacks() == []
    assert {(s["width"], s["height"], s["batch"]) for s in shapes()} == set(SIZES[1:3])
    assert compiled_vae(fast) is fast and vae_footprint(tiny) == before


# What goes wrong --------------------------------------------------------------------------------------------------


def test_out_of_memory_in_our_decode(fresh, monkeypatch):
    """ComfyUI's own decoder makes the picture, and a smaller one is fast again."""
    programs_short_of_memory(monkeypatch, 8)
    fast = compiled_vae(fresh)
    for _ in range(2):  # recorded, then ours
        assert torch.equal(decode(fast, 40, 72), decode(fresh, 40, 72))
    assert any("out of memory" in f["reason"] for f in fallbacks())
    decode(fast, 40, 64), decode(fast, 40, 64)
    assert [s["state"] for s in shapes()] == ["eager", FUSED]


def test_a_failing_tier_gives_the_eager_picture(fresh, monkeypatch):
    from anyshape.accel.tape.program import Program

    monkeypatch.setattr(Program, "run", lambda self, *args: 1 / 0)
    fast = compiled_vae(fresh)
    for _ in range(3):
        assert torch.equal(decode(fast, 40, 24), decode(fresh, 40, 24))
    (fallback,) = fallbacks()
    assert "ZeroDivisionError" in fallback["reason"]


@pytest.mark.parametrize("name", ["mid.attn_1.q", "conv_in", ""])
def test_a_hook_takes_effect(vae, name):
    fast, plain = compiled_vae(vae), decode(vae, 40, 24)
    handle = vae.first_stage_model.decoder.get_submodule(name).register_forward_hook(lambda m, args, out: out * 1.5)
    try:
        wanted, out = decode(vae, 40, 24), decode(fast, 40, 24)
    finally:
        handle.remove()
    assert error(wanted, plain) > 1e-3 and torch.equal(out, wanted)
    assert torch.equal(decode(fast, 40, 24), plain)  # and goes with it
    assert states() == {FUSED}


def test_training_runs_in_eager(vae):
    z = latent(40, 24).requires_grad_(True)
    out = compiled_vae(vae).first_stage_model.decode(z)
    assert torch.equal(out, vae.first_stage_model.decode(z))
    out.mean().backward()
    assert z.grad.norm() > 0
    assert "gradients are on" in fallbacks()[0]["reason"]


@pytest.mark.parametrize("after", [False, True], ids=["before the node", "after it"])
def test_what_a_node_sets_of_a_vae(models, after):
    """As Set VAE Decoder Noise of ComfyUI-LTXVideo does, whichever node comes first."""
    from tools.architectures import autoencoders

    plain, ours = autoencoders.make("LTX 0.9.5"), autoencoders.make("LTX 0.9.5")
    fast, latent, outs = compiled_vae(ours), randn(1, 128, 2, 4, 4, seed=3), []
    for scale in (0.025, 0.5, 0.025):
        for vae in (plain, fast if after else ours):
            vae.first_stage_model.decode_noise_scale = scale
        for vae in (plain, fast if after else compiled_vae(ours)):
            torch.manual_seed(5)
            with torch.inference_mode():
                outs.append(vae.decode(latent))
        assert error(outs[-1], outs[-2]) < CLOSE
    assert error(outs[2], outs[0]) > 1e-3 and error(outs[4], outs[0]) == 0.0
