"""Compile ControlNet: other packs, bad input, faults of ours, and ControlNets that it does not know; on the CPU."""

import pytest
import torch

from tools.control_driving import assert_over, inputs, largest_error, sampled
from tools.driving import SMALL_UNET, UNETS, compiled_control, randn
from tools.oracles import FUSED, error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4


@pytest.fixture(scope="module")
def control(models):
    """The ControlNet that the tests of this file share."""
    return models.controlnet("sd15", torch.float32, **SMALL_UNET)


# What other packs and bad input do --------------------------------------------------------------------------------

PARTS = ["", "input_blocks.1.1", "zero_convs.2", "zero_convs.2.0", "input_hint_block.2"]


@pytest.mark.parametrize("part", PARTS)
def test_a_hook_takes_effect(control, part):
    """Wherever it hangs, once per call, as in eager; ``zero_convs.2`` is called as a module, unlike a UNet's stages."""
    network, fast, calls = control.control_model, compiled_control(control).control_model, []
    with torch.inference_mode():
        plain = network(**inputs())
        handle = network.get_submodule(part).register_forward_hook(scaled(calls))
        try:
            wanted, count = network(**inputs()), len(calls)
            out = fast(**inputs())
        finally:
            handle.remove()
    assert largest_error(wanted, plain) > 1e-2 and largest_error(out, wanted) < CLOSE
    assert len(calls) == 2 * count == 2


def scaled(calls):
    """A hook that counts itself and makes a module's output larger."""

    def hook(module, args, out):
        calls.append(module)
        if isinstance(out, dict):
            return {key: [t * 2.0 for t in each] for key, each in out.items()}
        return out * 2.0

    return hook


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"hint": randn(1, 1, 3, 72, 88)}, "conv2d"), ({"extra": object()}, "extra, a object"),
     ({"context": None}, "cannot be multiplied")],
    ids=["a hint of five dimensions", "an argument that is new", "no prompt"],
)  # fmt: skip
def test_calls_for_eager_alone(control, changes, words):
    """They are ComfyUI's, its errors included; the reason is counted."""
    network, fast, outs = control.control_model, compiled_control(control).control_model, []
    with torch.inference_mode():
        for each in (network, fast):
            try:
                outs.append(each(**inputs(**changes)))
            except (RuntimeError, TypeError, AttributeError) as error:
                outs.append(type(error))
        if isinstance(outs[0], dict):
            assert largest_error(outs[1], outs[0]) == 0
        else:
            assert outs[0] is outs[1]
        assert words in fallbacks()[0]["reason"]
        assert largest_error(fast(**inputs()), network(**inputs())) < CLOSE
    assert shapes()[-1]["state"] == FUSED


def test_a_plain_argument_that_is_new(control, recordings):
    """ComfyUI's network passes over it here; another one may not, so each value is recorded by itself."""
    network, fast = control.control_model, compiled_control(control).control_model
    with torch.inference_mode():
        for extra in (1, 2, 1):
            assert largest_error(fast(**inputs(extra=extra)), network(**inputs())) < CLOSE
    assert len(recordings) == 2 and not fallbacks()


def test_a_control_for_sdxl_on_another_model(models, patcher):
    """ComfyUI's own message, from ComfyUI, and no tier is lost."""
    wide = models.controlnet("sdxl", torch.float32, **UNETS["sdxl"])
    fast = compiled_control(wide)
    with pytest.raises(ValueError, match="y is None"):
        sampled(models, patcher, fast)
    assert "a controlnet for SDXL on SD1" in fallbacks()[0]["reason"]
    assert_over(fast, patcher)
    with torch.inference_mode():
        call = inputs(y=randn(2, 2816))
        assert largest_error(fast.control_model(**call), wide.control_model(**call)) < CLOSE
    assert shapes()[-1]["state"] == FUSED


def test_a_failing_tier_gives_the_eager_image(models, patcher, monkeypatch):
    from anyshape.accel.tape.program import Program

    own = models.controlnet("sd15", torch.float32, **SMALL_UNET)
    monkeypatch.setattr(Program, "run", lambda self, *args: 1 / 0)
    wanted, fast = sampled(models, patcher, own), compiled_control(own)
    for _ in range(2):
        assert torch.equal(sampled(models, patcher, fast), wanted)
    (fallback,) = fallbacks()
    assert "ZeroDivisionError" in fallback["reason"] and shapes()[-1]["state"] == "eager"


def test_wrong_numbers_are_noticed(models, patcher, monkeypatch):
    """The first result of a size is compared with eager's, unless the user wants that not."""
    from anyshape.accel.comfy.controlnet import compile_controlnet
    from anyshape.accel.tape.program import Program

    own, right = models.controlnet("sd15", torch.float32, **SMALL_UNET), Program.run
    trusted, _ = compile_controlnet(models.controlnet("sd15", torch.float32, **SMALL_UNET), verify=False)
    wanted = sampled(models, patcher, own)
    monkeypatch.setattr(Program, "run", lambda self, *args: [1.5 * item for item in right(self, *args)])
    assert error(sampled(models, patcher, trusted), wanted) > 1e-2 and not fallbacks()
    assert torch.equal(sampled(models, patcher, compiled_control(own)), wanted)
    assert "wrong result" in fallbacks()[0]["reason"]


@pytest.mark.parametrize("part", ["take", "call_of"])
def test_a_fault_around_the_forward(models, patcher, control, monkeypatch, part):
    """Of ours, before any tier is tried: ComfyUI's own forward makes the residuals."""
    from anyshape.accel.comfy import taping

    fast, wanted = compiled_control(control), sampled(models, patcher, control)
    monkeypatch.setattr(taping, part, lambda *args, **kwargs: 1 / 0)
    assert torch.equal(sampled(models, patcher, fast), wanted)
    assert "ZeroDivisionError" in fallbacks()[0]["reason"]
    assert_over(fast, patcher)


@pytest.mark.parametrize("part", ["unsupported", "shadow_of"])
def test_a_fault_of_the_node(control, monkeypatch, part):
    from anyshape.accel.comfy import controlnet

    monkeypatch.setattr(controlnet, part, lambda *args: 1 / 0)
    out, message = controlnet.compile_controlnet(control)
    assert out is control and "ZeroDivisionError" in message


def test_training_runs_in_eager(control):
    fast = compiled_control(control).control_model
    call = inputs()
    call["x"].requires_grad_(True)
    fast(**call)["output"][-1].mean().backward()
    assert call["x"].grad.norm() > 0
    assert "gradients are on" in fallbacks()[0]["reason"]


# What it does not know --------------------------------------------------------------------------------------------


def subclass(models, control):
    import comfy.controlnet

    copied = control.copy()
    copied.__class__ = type("SomeonesControlNet", (comfy.controlnet.ControlNet,), {})
    return copied


def t2i_adapter(models, control):
    return models.t2i_adapter("sd15", **SMALL_UNET)


@pytest.mark.parametrize(("made", "words"), [(subclass, "SomeonesControlNet"), (t2i_adapter, "once per sampling run")])
def test_others_pass_through(models, control, made, words):
    from anyshape.accel.comfy.controlnet import compile_controlnet

    other = made(models, control)
    out, message = compile_controlnet(other)
    assert out is other and words in message and "as without this node" in message
    assert [f["reason"] for f in fallbacks()] == [message]
