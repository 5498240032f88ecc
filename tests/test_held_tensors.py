"""Tensors that patches of other packs keep (an adapter's weights, say): read at each replay, and never kept alive."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tools.adapters import CONTEXT, Adapter, attending, widths
from tools.driving import compiled
from tools.oracles import error, fallbacks, shapes
from tools.patching import CHANGED, assert_equal, run, takes_of, with_patch

pytestmark = pytest.mark.usefixtures("clean_stats")


@pytest.fixture
def adapter(models, fresh):
    torch.manual_seed(0)
    return Adapter(widths(models, fresh))


def assert_recorded(fast):
    takes = takes_of(fast)
    assert takes and not any(take.live or take.reason for take in takes) and not fallbacks()


def test_an_adapter_is_recorded(models, fresh, adapter, recordings):
    """With its own layers for each block, at several sizes and batches; and without it the model is as it was."""
    eager, fast = with_patch(fresh, attending(adapter)), with_patch(compiled(fresh), attending(adapter))
    for at in (dict(), dict(width=64, height=96), dict(batch=2), dict(seed=3)):
        wanted = assert_equal(models, eager, fast, **at)
    assert error(wanted, run(models, fresh, seed=3)) > CHANGED
    assert len(recordings) == 3
    assert_recorded(fast)
    assert_equal(models, fresh, compiled(fresh))


def test_a_range_of_steps(models, fresh, adapter, recordings):
    patch = attending(adapter, start=8.0, end=1.0)
    eager, fast = with_patch(fresh, patch), with_patch(compiled(fresh), patch)
    for seed in range(2):
        assert_equal(models, eager, fast, seed=seed, steps=8)
    assert len(recordings) == 3  # before, within, after
    assert_recorded(fast)


@pytest.mark.parametrize("change", ["in place", "other memory", "another weight", "another layer"])
def test_tensors_that_change_between_steps(models, fresh, adapter, change):
    """Whoever changes them, in the middle of a run, the next step sees it."""

    def changing(patcher, adapter):
        attending(adapter)(patcher)
        calls = []

        def wrapper(executor, *args, **kwargs):
            calls.append(1)
            if len(calls) in (3, 6):
                layer = adapter.layers["0"]
                with torch.inference_mode(False), torch.no_grad():
                    if change == "in place":
                        layer.weight.mul_(1.5)
                    elif change == "other memory":
                        layer.weight.data = layer.weight.data * 1.5
                    elif change == "another weight":
                        layer.weight = nn.Parameter(layer.weight * 1.5)
                    else:
                        made = nn.Linear(CONTEXT, layer.out_features, bias=False)
                        made.weight.copy_(layer.weight * 1.5)
                        adapter.layers["0"] = made
            return executor(*args, **kwargs)

        from comfy.patcher_extension import WrappersMP

        patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another pack", wrapper)

    twin = Adapter(adapter.widths)
    twin.load_state_dict(adapter.state_dict())
    eager = with_patch(fresh, lambda p: changing(p, twin))
    fast = with_patch(compiled(fresh), lambda p: changing(p, adapter))
    for seed in range(3):
        assert_equal(models, eager, fast, seed=seed)
    assert torch.equal(twin.layers["0"].weight, adapter.layers["0"].weight)


def test_an_adapter_that_is_gone_is_not_kept(models, fresh):
    """Its weights may be hundreds of MB. A recording of it lets go at the end of a run."""
    found = widths(models, fresh)
    adapter = Adapter(found)
    gone = weakref.ref(adapter.layers["0"].weight)
    fast = compiled(fresh)
    for at in (dict(), dict(width=64, height=96), dict()):
        run(models, with_patch(fast, attending(adapter)), **at)
    del adapter
    gc.collect()
    assert gone() is None
    adapter = Adapter(found)
    assert_equal(models, with_patch(fresh, attending(adapter)), with_patch(fast, attending(adapter)))
    assert shapes()[0]["state"] == "tape"


def test_a_tensor_on_no_device(models, fresh):
    """It has no memory to look at, and the patch asks for its size alone."""
    mask = torch.empty(1, device="meta")

    def patch(patcher):
        patcher.set_model_input_block_patch(lambda h, options: h * (1.5 + mask.numel() / 10))

    eager, fast = with_patch(fresh, patch), with_patch(compiled(fresh), patch)
    assert_equal(models, eager, fast)
    assert_recorded(fast)
