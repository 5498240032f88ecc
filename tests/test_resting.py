"""A partly loaded model of which no block gains: nothing of it is looked at again until its weights lie elsewhere.

On the CPU, where all weights lie together: whether some lie elsewhere is said by the test.
"""

import pytest
import torch
from torch import nn

from tools.driving import SMALL_FLUX
from tools.oracles import shapes

pytestmark = pytest.mark.usefixtures("clean_stats", "fusing")

WHY = "low VRAM, says the test"


@pytest.fixture
def looks(pack, monkeypatch):
    """One entry for each sampling state that is made."""
    from anyshape.accel.comfy import sampling_state

    found, own = [], sampling_state.SamplingState._look

    def counting(self, model):
        found.append(model)
        return own(self, model)

    monkeypatch.setattr(sampling_state.SamplingState, "_look", counting)
    return found


def forward(patcher, seed=0):
    from tools.on_gpu import loaded_forward

    return loaded_forward(patcher, 128, 128, rows=1, seed=seed, times=1)


def test_calls_that_gain_nothing(pack, looks, monkeypatch):
    """Neither in the run that found it out nor in later ones; and as before once a weight has moved."""
    from anyshape.accel import block_tier
    from anyshape.accel.comfy import known_code, sampling_state

    from bench import models, product

    def refused(*_):
        raise block_tier.NotUsed("no block is recorded, says the test")

    source = models.flux(torch.float32, **SMALL_FLUX)
    fast, message = product.compile_model(source, product.Settings())
    model = fast.model.diffusion_model
    assert message == ""
    with monkeypatch.context() as patched:
        patched.setattr(sampling_state.SamplingState, "is_elsewhere", lambda self, device: True)
        patched.setattr("anyshape.accel.first_call.obstacle", lambda tape, module=None: WHY)
        patched.setattr(block_tier, "record_block", refused)
        for seed in range(3):
            forward(fast, seed)
        assert known_code.fingerprints(model).has_resting
        looks.clear()
        assert torch.equal(forward(fast, 7), forward(source, 7))
        assert looks == [] and shapes()[0]["state"] == "eager" and shapes()[0]["reason"] == WHY
        model.img_in.weight = nn.Parameter(model.img_in.weight.detach().clone(), requires_grad=False)
        assert torch.equal(forward(fast, 8), forward(source, 8))
        assert looks


def test_where_weights_lie(pack):
    """A tensor that is gone, or lies on another device, is seen; none is held."""
    from anyshape.accel.weights import Whereabouts

    kept, gone = nn.Linear(2, 2), nn.Linear(2, 2)
    places = Whereabouts([kept.weight, gone.weight])
    assert places.unchanged()
    del gone
    assert not places.unchanged()
    places = Whereabouts([kept.weight])
    kept.weight = nn.Parameter(kept.weight.detach().to("meta"), requires_grad=False)
    assert not places.unchanged()


def test_only_while_weights_lie_elsewhere(pack):
    """A model that is whole on its device is looked at in each run: another pack may change it."""
    from anyshape.accel.comfy import known_code, sampling_state
    from anyshape.accel.key import shape_key

    for device, rests in (("cpu", False), ("meta", True)):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=device))
        known, key = known_code.fingerprints(model), shape_key({"x": torch.zeros(1, 2)}, {})
        sampling_state.SamplingState(model, known).rest(key, WHY)
        assert known.has_resting is rests and known.resting(key) == (WHY if rests else "")
        model[0].weight = nn.Parameter(torch.zeros(2, 2))
        assert known.resting(key) == ""
