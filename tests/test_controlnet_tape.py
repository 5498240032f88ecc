"""ControlNets without a forward by hand are recorded. CPU, unfused: what they give is ComfyUI's to the bit."""

import pytest
import torch

from tools.driving import FLUX_RUN, SMALL_FLUX, compiled, compiled_control, randn, steering
from tools.oracles import fallbacks

pytestmark = pytest.mark.usefixtures("pack", "one_thread", "clean_stats")


@pytest.fixture(scope="module")
def control(models):
    """A ControlNet of Flux, with blocks of both kinds. Its hint is a picture."""
    import comfy.controlnet
    import comfy.ops
    from comfy.ldm.flux.controlnet import ControlNetFlux

    config = {name: value for name, value in models.FLUX.items() if name not in ("image_model", "guidance_embed")}
    config |= SMALL_FLUX | {"guidance_embed": True}
    network = ControlNetFlux(**config, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    models.randomise(network)
    return comfy.controlnet.ControlNet(network.eval(), load_device=torch.device("cpu"), extra_conds=["y", "guidance"])


def call(control, side=16, rows=2, seed=0):
    network = control.control_model
    with torch.inference_mode():
        return network(
            x=randn(rows, 16, side, side, seed=seed), hint=randn(rows, 3, 8 * side, 8 * side, seed=seed + 1),
            timesteps=torch.full((rows,), 0.5), context=randn(rows, 7, 48, seed=seed + 2),
            y=randn(rows, 32, seed=seed + 3), guidance=torch.full((rows,), 3.5),
        )  # fmt: skip


def assert_same(out, wanted):
    assert out.keys() == wanted.keys()
    for name, items in wanted.items():
        assert type(out[name]) is type(items) and len(out[name]) == len(items)
        for mine, theirs in zip(out[name], items, strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_residuals_are_comfyuis(control, monkeypatch):
    from anyshape.accel import stats, tapes

    record, recorded = tapes.Tapes.record, []
    monkeypatch.setattr(tapes.Tapes, "record", lambda self, *args: (recorded.append(args[0]), record(self, *args))[1])
    fast = compiled_control(control)
    for side, rows, seed in ((16, 2, 0), (12, 1, 1), (16, 2, 2), (12, 1, 3)):
        assert_same(call(fast, side, rows, seed), call(control, side, rows, seed))
    assert len(recorded) == 2 and not fallbacks()
    (entry,) = [entry for entry in stats.snapshot()["models"] if entry["shapes"]]
    assert [(shape["state"], shape["calls"]) for shape in entry["shapes"]] == [("tape", 2), ("tape", 2)]


def test_what_comfyui_does_with_residuals_changes_no_later_ones(control):
    """``control_merge`` multiplies them in place."""
    fast, wanted = compiled_control(control), call(control)
    for _ in range(3):
        out = call(fast)
        assert_same(out, wanted)
        for item in {id(item): item for items in out.values() for item in items if item is not None}.values():
            with torch.inference_mode():
                item.mul_(0)


def test_an_error_of_the_networks_own_is_raised(control):
    fast = compiled_control(control)
    with pytest.raises(ValueError, match="3 dimensions"), torch.inference_mode():
        fast.control_model(
            x=randn(1, 16, 8, 8), hint=randn(1, 3, 64, 64), timesteps=torch.ones(1),
            context=randn(1, 48), y=randn(1, 32), guidance=torch.ones(1),
        )  # fmt: skip


def test_an_image_with_a_recorded_controlnet(models, control):
    """With Compile Model and without; it begins or ends in mid-run; nothing is left of a run."""
    flux = models.flux(dtype=torch.float32, **SMALL_FLUX)
    run = FLUX_RUN | {"steps": 3}
    for apply in ({}, {"start_percent": 0.4, "strength": 0.5}, {"end_percent": 0.5}):
        eager = models.sample(flux, **run, steer=steering(control, **apply))
        for patcher in (flux, compiled(flux)):
            fast = compiled_control(control)
            out = models.sample(patcher, **run, steer=steering(fast, **apply))
            assert torch.equal(out, eager), apply
            assert fast.control_model.forward.sampling._run is None
    assert not torch.equal(eager, models.sample(flux, **run)) and not fallbacks()
