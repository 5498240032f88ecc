"""A UNet that runs compiled, on the CPU: interrupts, failures, and what only eager does right."""

import pytest
import torch

from tools.driving import (
    SMALL_RUN,
    compile_with_message,
    compiled,
    options_of,
    randn,
    residuals,
    unet_forward,
    unet_inputs,
)
from tools.oracles import FUSED, assert_fast, error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32; the contract allows 1e-3, what is measured is 3e-6


# Interrupts and failures ------------------------------------------------------------------------------------------


def sample_with_callback(models, patcher, callback, steps=3):
    import comfy.sample

    latent = torch.zeros(1, 4, 16, 16)
    noise, conds = comfy.sample.prepare_noise(latent, 0), [models.conditioning(patcher, seed=s) for s in (1, 2)]
    with torch.inference_mode():
        return comfy.sample.sample(
            patcher, noise, steps, 7.0, "euler", "normal", *conds, latent, callback=callback, disable_pbar=True, seed=0
        )


def test_interrupt_between_steps(models, patcher):
    from comfy.model_management import InterruptProcessingException

    def stop(step, denoised, x, total):
        raise InterruptProcessingException

    fast = compiled(patcher)
    with pytest.raises(InterruptProcessingException):
        sample_with_callback(models, fast, stop)
    assert error(models.sample(fast, **SMALL_RUN), models.sample(patcher, **SMALL_RUN)) < CLOSE
    assert not fallbacks()
    assert_fast()


def test_interrupt_inside_a_forward(models, patcher):
    """The user presses Cancel: ComfyUI's layers raise in the midst of our forward, which is no failure of it."""
    import comfy.model_management as mm
    import comfy.ops

    if not hasattr(comfy.ops, "run_every_op"):
        pytest.skip("this ComfyUI's layers do not ask whether the user has cancelled")
    fast = compiled(patcher)
    stopping = fast.clone()
    stopping.set_model_input_block_patch(lambda h, o: mm.interrupt_current_processing(True) or h)
    with pytest.raises(mm.InterruptProcessingException):
        models.sample(stopping, **SMALL_RUN)
    mm.interrupt_current_processing(False)
    assert error(models.sample(fast, **SMALL_RUN), models.sample(patcher, **SMALL_RUN)) < CLOSE
    assert not fallbacks()
    assert shapes()[-1]["state"] == FUSED


def test_a_failing_program_gives_the_eager_image(models, fresh, monkeypatch):
    """Exactly it, with one reason; it is not tried again at this size, and the run after is right too."""
    from anyshape.accel.tape.program import Program

    tried = []

    def fail(self, *args):
        tried.append(1)
        raise RuntimeError("injected")

    monkeypatch.setattr(Program, "run", fail)
    plain, fast = models.sample(fresh, **SMALL_RUN | {"steps": 3}), compiled(fresh)
    for _ in range(2):
        assert torch.equal(models.sample(fast, **SMALL_RUN | {"steps": 3}), plain)
    assert len(tried) == 1
    (fallback,) = fallbacks()
    assert "injected" in fallback["reason"] and fallback["count"] >= 1
    (shape,) = shapes()
    assert shape["state"] == "eager" and shape["calls"] == 6 and "injected" in shape["reason"]


def test_a_failing_program_eats_no_residuals(fresh, monkeypatch):
    """ComfyUI's forward empties the ControlNet's lists; a forward of ours that failed must not have."""
    from anyshape.accel.tape.program import Program

    wanted = unet_forward(fresh, 136, 128, control=residuals(fresh, (2, 4, 16, 17), "controlnet"))
    fast = compiled(fresh)
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(Program, "run", lambda self, *args: 1 / 0)
        control = residuals(fresh, (2, 4, 16, 17), "controlnet")
        assert torch.equal(unet_forward(fast, 136, 128, control=control), wanted)
    assert any("ZeroDivisionError" in fallback["reason"] for fallback in fallbacks())


def test_out_of_memory_is_no_reason_to_give_up(models, fresh, monkeypatch):
    """One image too large for our forward: ComfyUI's own makes it, and smaller ones stay fast."""
    from anyshape.accel.tape.program import Program

    own = Program.run

    def tight(self, inputs, *args):
        if inputs[0].shape[-1] > 16:
            raise torch.OutOfMemoryError("injected")
        return own(self, inputs, *args)

    monkeypatch.setattr(Program, "run", tight)
    fast, large = compiled(fresh), SMALL_RUN | {"width": 264}
    assert torch.equal(models.sample(fast, **large), models.sample(fresh, **large))
    assert "out of memory" in shapes()[0]["reason"] and any("out of memory" in f["reason"] for f in fallbacks())
    models.sample(fast, **SMALL_RUN)
    assert [s["state"] for s in shapes()] == ["eager", FUSED]


# What only eager does right ---------------------------------------------------------------------------------------


def test_training_runs_in_eager(patcher):
    """Gradients reach the input, equal to those without us."""
    grads = []
    for each in (patcher, compiled(patcher)):
        call = unet_inputs(each, 128, 128)
        call["x"].requires_grad_(True)
        out = each.model.diffusion_model(**call, transformer_options=options_of(each))
        out.square().mean().backward()
        grads.append(call["x"].grad)
    assert torch.equal(*grads) and grads[0].norm() > 0
    assert [s["state"] for s in shapes()] == ["eager"]
    assert ["gradients are on" in f["reason"] for f in fallbacks()] == [True]


def test_arguments_of_any_name(patcher):
    """What is neither a tensor nor an option decides which recording fits."""
    fast = compiled(patcher)
    with torch.inference_mode():
        for frames in (2, 1, 2):
            call = unet_inputs(patcher, 128, 128) | {"num_video_frames": frames}
            outs = [p.model.diffusion_model(**call, transformer_options=options_of(p)) for p in (patcher, fast)]
            assert torch.equal(*outs)
    assert [shape["calls"] for shape in shapes()] == [2, 1]
    assert_fast()


def chroma():
    """The smallest Chroma that ComfyUI builds."""
    import comfy.supported_models
    from comfy.ldm.chroma.model import ChromaParams
    from comfy.model_patcher import ModelPatcher

    config = {
        "image_model": "chroma", "in_channels": 64, "out_channels": 64, "context_in_dim": 64, "hidden_size": 64,
        "mlp_ratio": 2.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [8, 12, 12],
        "theta": 10000, "patch_size": 2, "qkv_bias": True, "in_dim": 64, "out_dim": 64, "hidden_dim": 64, "n_layers": 1,
    }  # fmt: skip
    newer = {"txt_ids_dims": [], "vec_in_dim": 0}  # which ComfyUI 0.3.75 does not have
    config |= {name: value for name, value in newer.items() if name in ChromaParams.__dataclass_fields__}
    settings = comfy.supported_models.Chroma(config)
    settings.set_inference_dtype(torch.float32, None)
    model = settings.get_model({}, "", device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return ModelPatcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))


def sample_chroma(patcher):
    import comfy.sample

    latent = torch.zeros(1, 16, 8, 9)
    prompt = [[randn(1, 7, 64), {"pooled_output": randn(1, 32)}]]
    with torch.inference_mode():
        return comfy.sample.sample(
            patcher, randn(*latent.shape), 2, 1.0, "euler", "simple", prompt, prompt, latent, disable_pbar=True, seed=0
        )


def test_a_model_of_another_kind_is_recorded():
    patcher = chroma()
    out, message = compile_with_message(patcher)
    assert message == ""
    assert error(sample_chroma(out), sample_chroma(patcher)) < CLOSE
    assert_fast()
    assert not fallbacks()
