"""Compile VAE on a VAE that several workflows share, on the CPU: what one leaves for another, also when cancelled."""

import gc
import weakref

import pytest
import torch

from tools.comfy_nodes import first_output as node
from tools.driving import compiled_vae, every_progress
from tools.oracles import FUSED, error, expect, fallbacks, shapes
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


# One VAE, several workflows ---------------------------------------------------------------------------------------


def footprint(vae):
    """What a workflow without our node may see of the VAE: attributes, hooks, where and how the weights lie."""
    model = vae.first_stage_model
    parts = [
        (name, id(m), sorted(m.__dict__), len(m._forward_hooks), "forward" in m.__dict__)
        for name, m in model.named_modules()
    ]
    weights = [(p.data_ptr(), p.stride(), p.view(torch.int32).sum().item()) for p in model.parameters()]
    return parts, weights, sorted(vae.__dict__), sorted(vae.patcher.__dict__), dict(vae.patcher.callbacks)


def test_workflows_in_turn(vae):
    """A with the node, B without it, A again; whole, tiled, after an error: B is to the bit what it was."""
    z, pixels = latent(), picture(40, 24)
    uses = (("VAEDecode", z), ("VAEDecodeTiled", z, 64, 0), ("VAEEncode", pixels))

    def run(each):
        made = [node(name, each, *args) for name, *args in uses]
        return [out["samples"] if isinstance(out, dict) else out for out in made]

    wanted, before = run(vae), footprint(vae)  # which loads it
    first = run(compiled_vae(vae))
    with pytest.raises(RuntimeError):
        node("VAEDecode", compiled_vae(vae), {"samples": torch.zeros(1, 3, 5, 4)})
    assert all(torch.equal(*pair) for pair in zip(run(vae), wanted, strict=True))
    assert all(torch.equal(*pair) for pair in zip(run(compiled_vae(vae)), first, strict=True))
    assert footprint(vae) == before
    assert {s["state"] for s in shapes() if (s["width"], s["height"]) != (32, 40)} == {FUSED}


def test_two_vaes_in_turn(models, vae):
    """Other weights and other widths: no result of one in the other, and nothing compiles for the second."""

    other = build(models, ch=64)
    models.randomise(other.first_stage_model, seed=9)
    ways = [(each, compiled_vae(each)) for each in (vae, other)]
    node("VAEDecode", ways[0][1], latent())
    with expect(recompiles=0):
        for plain, fast in ways * 2:
            assert error(node("VAEDecode", fast, latent()), node("VAEDecode", plain, latent())) < CLOSE
    assert states() == {FUSED}


def test_weights_that_change(fresh, models):
    """Another pack merges into the shared VAE, in place or with new tensors: the next picture has the new weights."""
    fast = compiled_vae(fresh)
    first = node("VAEDecode", fast, latent())
    conv = fresh.first_stage_model.decoder.conv_in
    conv.weight.data.mul_(1.5)
    second = node("VAEDecode", fast, latent())
    assert error(second, first) > 1e-2 and error(second, node("VAEDecode", fresh, latent())) < CLOSE
    conv.weight = torch.nn.Parameter(conv.weight * 0.5, requires_grad=False)
    third = node("VAEDecode", fast, latent())
    assert error(third, second) > 1e-2 and error(third, node("VAEDecode", fresh, latent())) < CLOSE


def test_a_patched_vae(fresh):
    """Weight patches on the VAE's patcher, as merge nodes put them; with the node before and after them."""
    key, wanted = "decoder.conv_in.weight", node("VAEDecode", fresh, latent())
    fast = compiled_vae(fresh)
    for each in (fast, fresh):
        each.patcher.add_patches({key: (torch.ones_like(each.patcher.model_state_dict()[key]) * 0.1,)}, 1.0)
        patched = node("VAEDecode", each, latent())
        assert error(patched, wanted) > 1e-2
        outs = [node("VAEDecode", other, latent()) for other in (compiled_vae(fresh), each)]
        if each is fresh:
            assert error(*outs) < CLOSE


def test_unloaded_and_reloaded(vae):
    import comfy.model_management as mm

    fast, wanted = compiled_vae(vae), node("VAEDecode", vae, latent())
    for _ in range(2):
        assert error(node("VAEDecode", fast, latent()), wanted) < CLOSE
        mm.unload_all_models()
        mm.cleanup_models()
    assert torch.equal(node("VAEDecode", vae, latent()), wanted) and states() == {FUSED}


@pytest.mark.parametrize("first", ["the VAE", "its copy"])
def test_a_freed_vae_is_gone(models, first):
    """Whichever goes first: nothing of ours keeps the weights alive, and the one that is left still works."""
    import comfy.model_management as mm
    from anyshape.accel.comfy.attach import engines_of

    plain = build(models)
    fast = compiled_vae(plain)
    node("VAEEncode", fast, node("VAEDecode", fast, latent()))
    model, weight = weakref.ref(plain.first_stage_model), weakref.ref(plain.first_stage_model.decoder.conv_in.weight)
    engines = [weakref.ref(engine) for engine in engines_of(model())]
    if first == "the VAE":
        del plain
        gc.collect()
        node("VAEDecode", fast, latent())
        del fast
    else:
        del fast
        gc.collect()
        node("VAEDecode", plain, latent())
        del plain
    mm.unload_all_models()
    gc.collect()
    assert [ref() for ref in (model, weight, *engines)] == [None] * 4


# Interrupts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["decode", "encode"])
def test_an_interrupt_between_tiles(vae, monkeypatch, way):
    """As the server does it: its hook of the progress bar raises."""
    import comfy.model_management as mm
    import comfy.utils

    wanted, before = node("VAEDecode", vae, latent()), footprint(vae)  # the first loads it
    fast = compiled_vae(vae)
    name, value = ("VAEDecodeTiled", latent(33, 9)) if way == "decode" else ("VAEEncodeTiled", picture(264, 72))

    def hook(done, total, *rest, **named):
        if done == 2:
            mm.interrupt_current_processing()
        mm.throw_exception_if_processing_interrupted()

    every_progress(monkeypatch)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    with pytest.raises(mm.InterruptProcessingException):
        node(name, fast, value, 64, 0)
    monkeypatch.undo()
    assert sum(s["calls"] for s in shapes()) == 2 and fallbacks() == []
    assert footprint(vae) == before and torch.equal(node("VAEDecode", vae, latent()), wanted)
    assert error(node("VAEDecode", fast, latent()), wanted) < CLOSE


def test_an_interrupt_inside_the_vae(vae, monkeypatch):
    """In the midst of a forward: a message, so no tier is retired and nothing is tried again."""
    import comfy.model_management as mm
    from anyshape.accel.tape.program import Program

    wanted, before = node("VAEDecode", vae, latent()), footprint(vae)  # the first loads it
    fast = compiled_vae(vae)
    node("VAEDecode", fast, latent())

    def interrupted(*args):
        raise mm.InterruptProcessingException

    with monkeypatch.context() as patched:
        patched.setattr(Program, "run", interrupted)
        with pytest.raises(mm.InterruptProcessingException):
            node("VAEDecode", fast, latent())
    assert footprint(vae) == before and fallbacks() == []
    assert error(node("VAEDecode", fast, latent()), wanted) < CLOSE and states() == {FUSED}
