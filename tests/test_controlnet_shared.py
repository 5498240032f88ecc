"""Compile ControlNet on a ControlNet that others share: what stays as it was, runs that break off or overlap; CPU."""

import gc
import weakref

import pytest
import torch

from tools.control_driving import assert_over, inputs, largest_error, sampled, sampling
from tools.driving import SMALL_RUN, SMALL_UNET, compiled, compiled_control, steering
from tools.oracles import FUSED, assert_fast, assert_untouched, error, expect, fallbacks, footprint, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4


@pytest.fixture(scope="module")
def control(models):
    """The ControlNet that the tests of this file share."""
    return models.controlnet("sd15", torch.float32, **SMALL_UNET)


# The shared ControlNet --------------------------------------------------------------------------------------------


def test_toggling_leaves_the_shared_control_as_it_was(models, patcher, control):
    """A with the node, B without, A with, on one ControlNet: B to the bit what it was before."""

    network, plain, known = control.control_model, sampled(models, patcher, control), dict(vars(control))
    before, before_patcher = footprint(network), dict(vars(control.control_model_wrapped))
    fast = compiled_control(control)
    first = sampled(models, patcher, fast)
    assert_untouched(network, before)
    assert vars(control) == known and vars(control.control_model_wrapped) == before_patcher
    with expect(calls=0):
        assert torch.equal(sampled(models, patcher, control), plain)
    assert torch.equal(sampled(models, patcher, fast), first)
    assert error(first, plain) < CLOSE
    assert_over(fast, patcher)


def test_disabled_passes_through(control, pack):
    from anyshape.nodes import CompileControlNet

    assert CompileControlNet.execute(control, False).args[0] is control


def test_compiling_twice_is_compiling_once(models, patcher, control):
    once = compiled_control(control)
    assert once is not control and compiled_control(once) is once
    again = compiled_control(control)  # another node on the same ControlNet, in the same run
    assert sampling(again) is sampling(once)
    wanted = sampled(models, patcher, control, control)
    assert error(sampled(models, patcher, once, again), wanted) < CLOSE
    (shape,) = shapes()
    assert shape["calls"] == 4 and shape["state"] == FUSED


def test_copies_and_chains(models, patcher, control):
    """Nodes copy controls, and hang one behind the other; ours keeps the chain it was given and is kept by copies."""
    import comfy.controlnet

    first = control.copy().set_cond_hint(torch.rand(1, 3, 128, 128))
    chained = control.copy().set_previous_controlnet(first)
    fast = compiled_control(chained)
    assert fast.previous_controlnet is first and type(fast) is not comfy.controlnet.ControlNet
    assert type(fast.copy()) is type(fast) and fast.copy().control_model is fast.control_model
    assert fast.get_models() == [control.control_model_wrapped, fast.control_model_wrapped]


def test_a_pack_takes_on_a_compiled_control_as_it_does_comfyuis(models, patcher, control):
    """Advanced-ControlNet makes another of each whose class equals ComfyUI's, and leaves all else as it is."""
    from comfy.controlnet import ControlNet, ControlNetSD35

    class Masked(ControlNet):
        def control_merge(self, control, *args, **kwargs):
            half = {place: [x * (torch.arange(x.shape[-1]) < 4) for x in each] for place, each in control.items()}
            return super().control_merge(half, *args, **kwargs)

    def masked(given):
        if type(given) != ControlNet:  # noqa: E721  as that pack asks
            return given
        made = Masked(given.control_model, load_device=given.load_device, extra_conds=given.extra_conds)
        given.copy_to(made)
        made.control_model_wrapped = given.control_model_wrapped.clone()
        return made

    def image(given):
        def steer(positive, negative):
            prompts = steering(given)(positive, negative)
            return [[[c[0], c[1] | {"control": masked(c[1]["control"])}] for c in prompt] for prompt in prompts]

        return models.sample(patcher, **SMALL_RUN, steer=steer)

    fast, wanted = compiled_control(control), image(control)
    assert torch.equal(image(fast), wanted) and error(wanted, sampled(models, patcher, control)) > 1e-4
    assert_fast()
    kinds = {type(fast): 1, ControlNetSD35: 2}
    assert kinds[ControlNet] == 1 and len(kinds) == 2 and type(fast) is not ControlNet


def test_a_copy_to_the_bottom(control):
    """Of a prompt with its control, as a pack may make one: another network, compiled too."""
    import copy

    fast = compiled_control(control)
    other = copy.deepcopy(fast.control_model)
    weights = {p.data_ptr() for p in control.control_model.parameters()}
    assert not weights & {p.data_ptr() for p in other.parameters()} and other.forward is not fast.control_model.forward
    with torch.inference_mode():
        for parameter in control.control_model.zero_convs.parameters():
            parameter.mul_(2)
        wanted = fast.control_model(**inputs())
        for parameter in control.control_model.zero_convs.parameters():
            parameter.mul_(0.5)
        out = other(**inputs())
    assert all(error(a * 2, b) < CLOSE for a, b in zip(out["output"], wanted["output"], strict=True))


def test_memory_management_loads_the_network_itself(models, patcher, control):
    """The shadow's patcher is a clone: the same loaded model to ComfyUI, and its weights are no second copy."""
    fast = compiled_control(control)
    own, ours = control.control_model_wrapped, fast.control_model_wrapped
    assert own is not ours and ours.is_clone(own) and ours.model is control.control_model
    weights = dict(fast.control_model.named_parameters())
    assert all(weights[name] is parameter for name, parameter in control.control_model.named_parameters())


def test_everything_goes_with_the_network(models, patcher):
    """The engine, its graphs and what was known of runs: no cache holds a ControlNet."""
    import comfy.model_management as mm
    from anyshape.accel.comfy import attach, controlnet_run

    own = models.controlnet("sd15", torch.float32, **SMALL_UNET)
    fast, network = compiled_control(own), weakref.ref(own.control_model)
    engine, state = weakref.ref(*attach.engines_of(own.control_model)), weakref.ref(sampling(fast))
    sampled(models, patcher, fast)
    gc.collect()  # of tests before
    engines, states = len(attach._ENGINES), len(controlnet_run._SAMPLING)
    del own, fast
    gc.collect()
    mm.cleanup_models()
    assert network() is None and engine() is None and state() is None
    assert (len(attach._ENGINES), len(controlnet_run._SAMPLING)) == (engines - 1, states - 1)


def test_unloading_drops_the_graphs_of_this_network(control, monkeypatch):
    """By the patcher that ComfyUI unloads; a load beside it (``unpatch_all`` off) drops none."""
    from anyshape.accel.engine import Engine

    dropped = []
    fast = compiled_control(control)
    monkeypatch.setattr(Engine, "drop_graphs", lambda self: dropped.append(self.stats.kind))
    fast.control_model_wrapped.detach(unpatch_all=False)
    assert dropped == []
    fast.control_model_wrapped.detach()
    assert dropped == ["controlnet"]
    control.control_model_wrapped.detach()
    assert dropped == ["controlnet"]


# A run's beginning and end ----------------------------------------------------------------------------------------


def test_a_run_looks_at_the_network_once(models, patcher, monkeypatch):
    """For what other packs changed, and where its weights lie."""
    from anyshape.accel.comfy import known_code, sampling_state

    looks, runs, look, make = [], [], known_code.foreign_code, sampling_state.SamplingState
    monkeypatch.setattr(known_code, "foreign_code", lambda *args: looks.append(1) or look(*args))
    monkeypatch.setattr(sampling_state, "SamplingState", lambda *args: runs.append(1) or make(*args))
    fast = compiled_control(models.controlnet("sd15", torch.float32, **SMALL_UNET))
    sampled(models, patcher, fast, fast, steps=4)
    assert (len(looks), len(runs)) == (1, 1)
    sampled(models, patcher, fast)
    assert (len(looks), len(runs)) == (1, 2)  # its code is as it was
    assert_over(fast, patcher)


def test_interrupt_between_steps(models, patcher, control):
    """ComfyUI cleans no control up then: the end of the model's run is ours, too."""
    from comfy.model_management import InterruptProcessingException

    fast, states = compiled_control(control), []

    def stop(step, denoised, x, total):
        states.append(sampling(fast)._run is not None)
        raise InterruptProcessingException

    with pytest.raises(InterruptProcessingException):
        sampled(models, patcher, fast, callback=stop)
    assert states == [True]
    assert_over(fast, patcher)
    assert error(sampled(models, patcher, fast), sampled(models, patcher, control)) < CLOSE
    assert_fast()
    assert not fallbacks()


def test_interrupt_inside_a_forward(models, patcher, control):
    """The user presses Cancel while the network runs, which is no failure of it."""
    from comfy.model_management import InterruptProcessingException

    fast = compiled_control(control)

    def stop(module, args):
        raise InterruptProcessingException

    handle = control.control_model.zero_convs[3].register_forward_pre_hook(stop)
    with pytest.raises(InterruptProcessingException):
        sampled(models, patcher, fast)
    handle.remove()
    assert_over(fast, patcher)
    assert error(sampled(models, patcher, fast), sampled(models, patcher, control)) < CLOSE
    assert shapes()[-1]["state"] == FUSED
    assert all("hooked" in f["reason"] for f in fallbacks())  # no tier was given up


def test_interrupt_while_it_is_recorded(models, patcher, control, monkeypatch):
    """The next call is the size's first."""
    import comfy.ldm.modules.attention as attention
    from comfy.model_management import InterruptProcessingException

    fast, own, stops = compiled_control(control), attention.SpatialTransformer.forward, [1]

    def stopped(self, *args, **kwargs):
        if stops:
            stops.pop()
            raise InterruptProcessingException
        return own(self, *args, **kwargs)

    monkeypatch.setattr(attention.SpatialTransformer, "forward", stopped)
    with pytest.raises(InterruptProcessingException):
        sampled(models, patcher, fast)
    assert_over(fast, patcher)
    assert not shapes()
    assert error(sampled(models, patcher, fast), sampled(models, patcher, control)) < CLOSE
    assert_fast()
    assert not fallbacks()


def test_runs_that_overlap(models, patcher, fresh, control):
    """One that ends, of another model with the same ControlNet, leaves the other its state."""
    fast, other, kept = compiled_control(control), compiled_control(control), []

    def nested(step, denoised, x, total):
        if step == 0:
            before = sampling(fast)._run
            sampled(models, fresh, other)
            kept.append(sampling(fast)._run is before is not None)

    sampled(models, patcher, fast, callback=nested)
    assert kept == [True]
    assert_over(fast, patcher)


@pytest.mark.parametrize("budget", [0, 512])
def test_the_budget_is_that_of_compile_model(models, patcher, control, budget):
    """Of the run's own; the node has no such input, and graphs of a device share one budget."""
    fast, seen = compiled_control(control), []
    for model in (compiled(patcher, graph_budget_mb=budget), patcher):
        sampled(models, model, fast, callback=lambda *args: seen.append(sampling(fast).settings.graph_budget_mb))
    assert seen == [budget, budget, 2048, 2048]


def test_without_a_run_nothing_is_remembered(control):
    """Another pack calls the network itself: right, and a hook between two calls takes effect."""
    network, fast = control.control_model, compiled_control(control).control_model
    with torch.inference_mode():
        assert largest_error(fast(**inputs()), network(**inputs())) < CLOSE
        handle = network.input_blocks[1][0].register_forward_hook(lambda module, args, out: out * 1.5)
        try:
            assert largest_error(fast(**inputs()), network(**inputs())) < CLOSE
        finally:
            handle.remove()
    assert fast.forward.sampling._run is None
    assert not fallbacks()  # the hook keeps nothing, so it is recorded like the network's own code
