"""What other packs do to a model besides patches: classes replaced for every model, options copied, torch switched."""

import copy
import functools
import types

import pytest
import torch

from tools import driving
from tools.driving import compiled, compiled_control, compiled_vae, randn, sample_prompts, skipping, unet_forward
from tools.oracles import FUSED, counted, error, fallbacks, shapes
from tools.skip_driving import BLOCKS, PLANNED, STEPS

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32
CHANGED = 1e-2  # by how much a change must show, so that a test can tell


def louder(monkeypatch, kind, name="forward", factor=1.5):
    """As a pack that replaces a method for every model: what it gives is larger."""
    own = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, *args, **kwargs: own(self, *args, **kwargs) * factor)


def test_what_a_model_makes_of_itself_at_its_first_forward(models):
    """Cosmos-Predict2 puts a dict into itself: the next call is recorded, and no fallback is told."""
    from tools.architectures import patchers

    name, run = "CosmosT2IPredict2", {"width": 64, "height": 64, "steps": 3, "tokens": 12}
    wanted = models.sample(patchers.make(name), **run)
    assert torch.equal(models.sample(compiled(patchers.make(name)), **run), wanted)
    (shape,) = shapes()
    assert fallbacks() == [] and shape["state"] in FUSED


# Classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "before"), [("CrossAttention", False), ("GroupNorm", False), ("CrossAttention", True)]
)
def test_a_class_of_a_unet(fresh, monkeypatch, name, before):
    """Replaced before the model's first call, or once a size was compared with eager; gone again in the end."""
    import comfy.ldm.modules.attention as attention
    import comfy.ops

    fast, kind = compiled(fresh), getattr(attention, name, None) or getattr(comfy.ops.disable_weight_init, name)
    plain = unet_forward(fresh, 128, 64)
    if not before:
        assert error(unet_forward(fast, 128, 64), plain) < CLOSE
        assert shapes()[-1]["reason"] == ""
    louder(monkeypatch, kind)
    wanted = unet_forward(fresh, 128, 64)
    assert error(wanted, plain) > CHANGED
    assert error(unet_forward(fast, 128, 64), wanted) < CLOSE
    assert shapes()[-1]["state"] == FUSED and shapes()[-1]["reason"] == ""  # its effect is on the tape
    monkeypatch.undo()
    assert error(unet_forward(fast, 128, 64), plain) < CLOSE


def test_the_class_of_the_model(fresh, monkeypatch):
    fast = compiled(fresh)
    louder(monkeypatch, type(fresh.model.diffusion_model), "_forward")
    assert error(unet_forward(fast, 128, 64), unet_forward(fresh, 128, 64)) < CLOSE
    assert shapes()[-1]["state"] == FUSED and shapes()[-1]["reason"] == ""
    calls = []
    own = type(fresh.model.diffusion_model)._forward
    monkeypatch.setattr(type(fresh.model.diffusion_model), "_forward", lambda *a, **k: calls.append(1) or own(*a, **k))
    for _ in range(3):
        assert torch.equal(unet_forward(fast, 128, 64), unet_forward(fresh, 128, 64))
    assert len(calls) == 6 and "UNetModel._forward of tests.test_changed_models" in shapes()[-1]["reason"]


def test_a_class_replaced_in_mid_run(models, fresh, monkeypatch):
    """Between two steps of a sampling run."""
    import comfy.ldm.modules.attention as attention

    def image(patcher):
        steps, patcher = [], patcher.clone()

        def between(apply, args):
            steps.append(1)
            if len(steps) == 2:
                louder(monkeypatch, attention.BasicTransformerBlock)
            return apply(args["input"], args["timestep"], **args["c"])

        patcher.set_model_unet_function_wrapper(between)
        return models.sample(patcher, 64, 64, steps=3)

    plain = models.sample(fresh, 64, 64, steps=3)
    own, wanted = attention.BasicTransformerBlock.forward, image(fresh)
    attention.BasicTransformerBlock.forward = own
    assert error(wanted, plain) > 10 * CLOSE and error(image(compiled(fresh)), wanted) < CLOSE


@torch.inference_mode()
def test_a_class_of_a_vae(models, monkeypatch):
    import comfy.ldm.modules.diffusionmodules.model as blocks

    vae = models.vae(torch.float32, ch=32, num_res_blocks=1)
    fast, z = compiled_vae(vae), randn(1, 4, 4, 5)
    plain = vae.decode(z)
    assert error(fast.decode(z), plain) < CLOSE and shapes()[-1]["reason"] == ""
    louder(monkeypatch, blocks.ResnetBlock)
    assert error(vae.decode(z), plain) > CHANGED
    assert error(fast.decode(z), vae.decode(z)) < CLOSE
    assert shapes()[-1]["state"] == FUSED and shapes()[-1]["reason"] == ""  # its effect is on the tape


@pytest.mark.parametrize("decorated", [False, True])
@torch.inference_mode()
def test_a_number_of_a_method_that_is_no_forward(models, monkeypatch, decorated):
    """A pack's function may lie in any place of a class, and torch's decorators around it hide nothing."""
    vae, setting = models.vae(torch.float32, ch=32, num_res_blocks=1), types.SimpleNamespace(gain=1.0)
    kind, fast, z = type(vae.first_stage_model), compiled_vae(vae), randn(1, 4, 4, 5)
    own = kind.decode

    @functools.wraps(own)
    def decode(self, *args, **kwargs):
        return own(self, *args, **kwargs) * setting.gain

    monkeypatch.setattr(kind, "decode", torch.no_grad()(decode) if decorated else decode)
    for gain in (1.0, 0.5, 0.5, 1.0):
        setting.gain = gain
        assert error(fast.decode(z), vae.decode(z)) < CLOSE
        assert shapes()[-1]["state"] == FUSED and shapes()[-1]["reason"] == ""


@pytest.mark.parametrize("name", ["forward_orig", "forward"])
def test_a_number_of_a_method_under_skip_blocks(models, monkeypatch, name):
    """Skipped steps read it, too: after it changed, a run is what it is on a fresh model."""
    setting = types.SimpleNamespace(gain=1.0)

    def made():
        flux = models.flux(torch.float32, **driving.SMALL_FLUX | {"depth": BLOCKS, "depth_single_blocks": BLOCKS})
        return flux, skipping(compiled(flux))

    def image(model, gain):
        setting.gain = gain
        return models.sample(model, **driving.FLUX_RUN | {"width": 64, "height": 64, "steps": STEPS})

    (flux, skip), (_, fresh) = made(), made()
    network = flux.model.diffusion_model
    kind = type(network if name == "forward_orig" else network.final_layer)
    own = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, *args, **kwargs: own(self, *args, **kwargs) * setting.gain)
    image(skip, 1.0)
    out = image(skip, 1.1)
    assert counted() == PLANNED and error(out, image(fresh, 1.1)) < CLOSE
    assert counted() == PLANNED and error(image(skip, 1.0), out) > CHANGED


def test_a_class_of_a_controlnet(models, fresh, monkeypatch):
    import comfy.ldm.modules.attention as attention

    control = models.controlnet_for(fresh)
    fast, call = compiled_control(control).control_model, driving.unet_inputs(fresh, 64, 64)
    call = {name: value for name, value in call.items() if value is not None} | {"hint": randn(2, 3, 64, 64)}

    def middle(net):
        with torch.inference_mode():
            return net(**call)["middle"][0]

    plain = middle(control.control_model)
    for _ in range(2):
        assert error(middle(fast), plain) < CLOSE
    louder(monkeypatch, attention.BasicTransformerBlock)
    wanted = middle(control.control_model)
    assert error(wanted, plain) > CHANGED
    for _ in range(2):  # recorded with what replaces it, then replayed
        assert error(middle(fast), wanted) < CLOSE
    monkeypatch.undo()
    assert error(middle(fast), plain) < CLOSE
    assert shapes()[-1]["state"] == FUSED and not fallbacks()


# What is switched around a call -----------------------------------------------------------------------------------


def test_autocast(fresh):
    """Fused operations would not follow it, and a graph would hold what was on when it was captured."""
    fast = compiled(fresh)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(unet_forward(fast, 64, 64), unet_forward(fresh, 64, 64))
    assert shapes()[-1]["state"] == "eager" and "autocast" in shapes()[-1]["reason"]
    assert error(unet_forward(fast, 64, 64), unet_forward(fresh, 64, 64)) < CLOSE
    assert shapes()[-1]["state"] == FUSED


@torch.inference_mode()
def test_autocast_of_a_vae(models):
    vae = models.vae(torch.float32, ch=32, num_res_blocks=1)
    fast, z = compiled_vae(vae), randn(1, 4, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast.decode(z), vae.decode(z))
    assert "autocast" in shapes()[-1]["reason"]


@pytest.mark.parametrize("name", ["strange_options", "rope_options"])
def test_options_of_a_newer_comfyui(fresh, name):
    fast = compiled(fresh)
    for patcher in (fresh, fast):
        patcher.model_options["transformer_options"][name] = {"scale": 2.0}
    assert error(unet_forward(fast, 64, 64), unet_forward(fresh, 64, 64)) < CLOSE
    assert shapes()[-1]["state"] == FUSED and not fallbacks()


# What is left behind ----------------------------------------------------------------------------------------------


def test_options_may_be_copied_to_the_bottom_in_mid_run(models, fresh):
    """With every node of ours: their wrappers, callbacks and a run's state lie in them."""
    control = compiled_control(models.controlnet_for(fresh))
    steer = driving.steering(control, width=64, height=64)
    positive, negative = steer(*(models.conditioning(fresh, seed=seed) for seed in (1, 2)))
    copies = []

    def copying(apply, args):
        options = copy.deepcopy(args["c"]["transformer_options"])
        copies.append(options)
        return apply(args["input"], args["timestep"], **args["c"] | {"transformer_options": options})

    outs = []
    for copied in (False, True):
        patcher = skipping(compiled(fresh), interval=2, depth="0")
        if copied:
            patcher.set_model_unet_function_wrapper(copying)
        outs.append(sample_prompts(patcher, positive, negative, torch.zeros(1, 4, 8, 9), steps=10))
    assert copies and error(outs[1], outs[0]) < CLOSE
    assert "anyshape_skip_run" in copies[0]
    assert not [f for f in fallbacks() if "failed" in f["reason"]]
