"""The conds of a run are copied to the model's device once: which are, and that nothing else about them changes."""

import pytest
import torch

META = torch.device("meta")  # a device that any machine has, besides the CPU


@pytest.fixture
def parts(pack):
    import comfy.conds
    from anyshape.accel.comfy.conds import to_device

    return comfy.conds, to_device


def test_prompts_and_lists_are_copied_and_the_callers_are_not_changed(parts) -> None:
    kinds, to_device = parts
    prompt, images = torch.randn(1, 7, 8), [torch.randn(1, 4), torch.randn(1, 4)]
    own = {
        "c_crossattn": kinds.CONDCrossAttn(prompt), "ref_latents": kinds.CONDList(images),
        "number": kinds.CONDConstant(3), "noise": kinds.CONDNoiseShape(torch.randn(1, 4, 8, 8)),
    }  # fmt: skip
    positive, negative = {"model_conds": own, "uuid": 1}, {"model_conds": {"c_crossattn": kinds.CONDCrossAttn(prompt)}}
    to_device({"positive": [positive], "negative": [negative]}, META)
    found = positive["model_conds"]
    assert {name: type(item) for name, item in found.items()} == {name: type(item) for name, item in own.items()}
    assert found["c_crossattn"].cond.device == META == found["noise"].cond.device
    assert [tensor.device for tensor in found["ref_latents"].cond] == [META] * 2
    assert found["number"] is own["number"] and positive["uuid"] == 1
    assert found["c_crossattn"].cond is negative["model_conds"]["c_crossattn"].cond  # one tensor, one copy
    assert own["c_crossattn"].cond is prompt and prompt.device.type == "cpu"  # a node may use it elsewhere


def test_where_one_lies_on_a_device_all_stay(parts) -> None:
    """ComfyUI joins two conds in one call only if they lie on the same device; that must not change."""
    kinds, to_device = parts
    here, there = torch.randn(1, 7, 8), torch.empty(1, 7, 8, device=META)
    conds = {
        "positive": [{"model_conds": {"c_crossattn": kinds.CONDCrossAttn(here), "y": kinds.CONDRegular(here)}}],
        "negative": [{"model_conds": {"c_crossattn": kinds.CONDCrossAttn(there)}}],
        "middle": None,
    }
    to_device(conds, META)
    assert conds["positive"][0]["model_conds"]["c_crossattn"].cond is here
    assert conds["positive"][0]["model_conds"]["y"].cond.device == META


def test_a_sampling_run_passes_its_conds(pack, models, patcher, monkeypatch) -> None:
    """Through ComfyUI's sampler: once per run, all its conds, to the model's device."""
    from anyshape.accel.comfy import conds

    from tools.driving import compiled

    seen, own = [], conds.to_device

    def counted(given, device):
        seen.append((sorted(given), device.type))
        own(given, device)

    monkeypatch.setattr(conds, "to_device", counted)
    fast = compiled(patcher)
    expected = models.sample(patcher, 64, 64, 1, steps=2)
    assert not seen
    assert torch.allclose(models.sample(fast, 64, 64, 1, steps=2), expected, atol=1e-4)
    assert seen == [(["negative", "positive"], fast.load_device.type)]
