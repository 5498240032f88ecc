"""CFG split over several devices, as ComfyUI's MultiGPU nodes do it: a clone with another model for each. CPU.

Two names of the one CPU are the devices: ComfyUI runs a part of each step's prompts on another thread for the second.
"""

import pytest
import torch

from tools.driving import SMALL_RUN, SMALL_UNETS, compiled, compiled_control, sample_tiny, skipping
from tools.oracles import error, last_run, reasons

pytestmark = pytest.mark.usefixtures("pack", "clean_stats", "one_thread")

BLOCKS = 5  # of the tiny transformers
SECOND = torch.device("cpu", 0)
NEAR = 1e-5  # relative L2: a row is computed alone, or by another number of threads


def split(patcher, made):
    """A patcher of which ComfyUI runs a part on the second device. made: what its loader makes."""
    if not hasattr(patcher, "deepclone_multigpu"):
        pytest.skip("this ComfyUI splits nothing")
    patcher = patcher.clone()
    patcher.cached_patcher_init = (lambda *_, **__: made(), ())
    other = patcher.deepclone_multigpu(new_load_device=SECOND)
    other.is_multigpu_base_clone = True
    patcher.set_additional_models("multigpu", [other])
    patcher.match_multigpu_clones()
    return patcher


def sampled(patcher, name, steps=3):
    return sample_tiny(patcher, name, seed=1, cfg=4.0, steps=steps)


def engines():
    """How many models were called, and as what."""
    from anyshape.accel import stats

    called = [model["shapes"] for model in stats.snapshot()["models"] if model["shapes"]]
    return len(called), {shape["state"] for shapes in called for shape in shapes}


@pytest.mark.parametrize("split_first", [False, True])
@pytest.mark.parametrize("name", ["Flux", "SD3"])  # of which one's forward calls no wrappers
def test_compile_model(tiny, name, split_first) -> None:
    patcher, made = tiny(name), lambda: tiny(name, fresh=True)
    wanted = sampled(split(patcher, made), name)
    assert 0 < error(wanted, sampled(patcher, name)) < NEAR  # it was split
    fast = compiled(split(patcher, made)) if split_first else split(compiled(patcher), made)
    for _ in range(2):
        assert error(sampled(fast, name), wanted) < NEAR
    assert engines() == (2, {"tape"}) and reasons() == []


@pytest.mark.parametrize("nodes", [[skipping], [skipping, compiled]], ids=["alone", "compiled"])
def test_skip_blocks(tiny, nodes) -> None:
    patcher = tiny("SD3")
    for node in nodes:
        patcher = node(patcher)
    wanted = sampled(patcher, "SD3", 10)
    full = last_run()["full"]
    out = sampled(split(patcher, lambda: tiny("SD3", fresh=True)), "SD3", 10)
    assert error(out, wanted) < NEAR and last_run()["full"] == full < 10
    assert engines() == (2, {"tape"}) and reasons() == []


def test_compile_controlnet(models, pack) -> None:
    """Its network is copied to the second device, too."""
    import nodes

    def made():
        return models.unet("sd15", torch.float32, **SMALL_UNETS["sd15"])

    patcher = made()
    control, hint = models.controlnet_for(patcher), torch.rand(1, 64, 64, 3)

    def out(fast):
        apply = nodes.ControlNetApplyAdvanced().apply_controlnet
        patch = split(compiled(patcher) if fast else patcher, made)
        used = compiled_control(control) if fast else control
        run = SMALL_RUN | {"steps": 2, "cfg": 3.0}
        return models.sample(patch, **run, steer=lambda *prompts: apply(*prompts, used, hint, 1.0, 0.0, 1.0))

    assert error(out(fast=True), out(fast=False)) < NEAR
    assert engines() == (4, {"tape"}) and reasons() == []


def test_a_controlnet_of_a_further_device_is_let_go_of(models, pack, monkeypatch) -> None:
    """When ComfyUI unloads it, as the first one."""
    import comfy.controlnet
    from anyshape.accel import graphs
    from anyshape.accel.comfy import attach

    if not hasattr(comfy.controlnet.ControlNet, "deepclone_multigpu"):
        pytest.skip("this ComfyUI splits nothing")
    dropped = []
    monkeypatch.setattr(graphs, "drop_owner", dropped.append)
    fast = compiled_control(models.controlnet_for(models.unet("sd15", torch.float32, **SMALL_UNETS["sd15"])))
    other = fast.deepclone_multigpu(SECOND)
    other.control_model_wrapped.detach()
    assert dropped == [id(engine) for engine in attach.engines_of(other.control_model_wrapped.model)] != []
    assert other.engine is not fast.engine and id(other.engine) in dropped
