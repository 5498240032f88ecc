"""Control-LoRAs, whose network ComfyUI builds again for each run out of the model's weights. CPU, unfused."""

import gc
import weakref

import pytest
import torch

from tools.driving import SHORT_RUN, SMALL_UNET, SMALL_UNETS, compiled, compiled_control, steering
from tools.oracles import assert_fast, assert_untouched, error, fallbacks, footprint, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4
RUN = SHORT_RUN | {"steps": 2, "width": 64, "height": 72}


@pytest.fixture
def control(models, patcher):
    """A Control-LoRA of a file of its own."""
    return models.control_lora(patcher)


def sampled(models, patcher, *controls, apply=None, **run):
    return models.sample(patcher, **RUN | run, steer=steering(*controls, **apply or {}))


def test_one_recording_serves_all_runs(models, patcher, control, recordings):
    """With Compile Model and without; it begins or ends in mid-run; the model is left as it was."""
    run = {"steps": 3}
    plain, fast = models.sample(patcher, **RUN | run), compiled_control(control)
    before = footprint(patcher.model.diffusion_model)
    for apply in ({}, {"start_percent": 0.4, "strength": 0.5}, {"end_percent": 0.5}):
        wanted = sampled(models, patcher, control, apply=apply, **run)
        assert error(wanted, plain) > 1e-3
        for each in (patcher, compiled(patcher)):
            assert error(sampled(models, each, fast, apply=apply, **run), wanted) < CLOSE, apply
    assert sum("hint" in key for key in recordings) == 1
    assert_fast()
    assert not fallbacks()
    assert_untouched(patcher.model.diffusion_model, before)
    sampled(models, patcher, fast, width=104)
    assert sum("hint" in key for key in recordings) == 2


def test_sizes_and_batches(models):
    """Of an SDXL, whose network has another embedding and linear layers around its transformers."""
    sdxl = models.unet("sdxl", torch.float32, **SMALL_UNETS["sdxl"])
    control = models.control_lora(sdxl)
    fast = compiled_control(control)
    for run in ({}, {"width": 72, "height": 88, "batch": 3}, {"tokens": 154, "cfg": 1.0}):
        wanted = sampled(models, sdxl, control, **run)
        assert error(sampled(models, sdxl, fast, **run), wanted) < CLOSE, run
    assert_fast()
    assert not fallbacks()


def test_several_of_one_file_share_a_network(models, patcher, control, recordings):
    """Two nodes in a chain, of different strengths and pictures; neither has the other's results."""
    wanted = sampled(models, patcher, control, control, apply={"strength": 0.6})
    fast, networks = [compiled_control(control), compiled_control(control)], []

    def look(*args):
        networks.append({id(used.control_model) for used in fast[0].sampling._users})
        assert len(fast[0].sampling._users) == 2

    assert fast[0].sampling is fast[1].sampling
    out = sampled(models, patcher, *fast, apply={"strength": 0.6}, callback=look)
    assert error(out, wanted) < CLOSE and {len(each) for each in networks} == {1}
    assert len(recordings) == 1 and shapes()[0]["calls"] == 4


def test_two_files_do_not_share(models, patcher):
    """They have matrices of their own."""
    one, other = models.control_lora(patcher), models.control_lora(patcher, rank=2, seed=1)
    wanted = sampled(models, patcher, one, other)
    fast = compiled_control(one), compiled_control(other)
    assert error(sampled(models, patcher, *fast), wanted) < CLOSE
    assert error(wanted, sampled(models, patcher, one, one)) > 1e-3
    assert len(shapes()) == 2


def test_another_model_of_the_same_form(models, patcher, control, recordings):
    """The recording is bound to its weights; then to the first model's again."""
    other, fast = models.unet("sd15", torch.float32, **SMALL_UNET), compiled_control(control)
    with torch.no_grad():
        for weight in other.model.diffusion_model.parameters():
            weight.mul_(0.8)
    outs = []
    for each in (patcher, other, patcher):
        outs.append(sampled(models, each, fast))
        assert error(outs[-1], sampled(models, each, control)) < CLOSE
    assert len(recordings) == 1 and error(outs[1], outs[0]) > 1e-2 and torch.equal(outs[2], outs[0])


def test_a_model_of_another_form(models, patcher, control):
    """Cast at each call: ComfyUI builds the network of other layers then, and it is recorded again."""
    cast, fast = models.unet("sd15", torch.bfloat16, **SMALL_UNET), compiled_control(control)
    cast.set_model_compute_dtype(torch.float32)
    for each in (patcher, cast, patcher):
        assert error(sampled(models, each, fast), sampled(models, each, control)) < 1e-3
    assert_fast()


def test_a_lora_on_the_model(models, patcher, control, recordings):
    """Its weights are others, at other addresses; nothing is recorded again."""
    name = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    patched, fast = patcher.clone(), compiled_control(control)
    weight = patcher.model.get_parameter(name)
    patched.add_patches({name: (torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)),)}, 0.5)
    plain = sampled(models, patcher, fast)
    wanted = sampled(models, patched, control)
    assert error(wanted, plain) > 1e-4
    for _ in range(2):
        assert error(sampled(models, patched, fast), wanted) < 1e-5
    assert error(sampled(models, patcher, fast), plain) < 1e-6
    assert len(recordings) == 1


def test_nothing_is_held_beyond_a_run(models, patcher, control, monkeypatch):
    """Neither the network nor the model's weights; its graphs are given back."""
    from anyshape.accel.engine import Engine

    dropped, drop, fast, networks = [], Engine.drop_graphs, compiled_control(control), []
    monkeypatch.setattr(Engine, "drop_graphs", lambda self: (dropped.append(self), drop(self)))

    def look(*args):
        (user,) = fast.sampling._users
        networks.append(weakref.ref(user.control_model.input_blocks[1][0]))
        networks.append(weakref.ref(user.control_model.forward.network.zero_convs[0][0].weight))

    sampled(models, patcher, fast, callback=look)
    gc.collect()
    assert networks and not any(each() is not None for each in networks)
    assert dropped == [fast.engine] and fast.sampling._run is None and not fast.sampling._users
    assert not patcher.callbacks


def test_a_run_that_breaks_off(models, patcher, control):
    from comfy.model_management import InterruptProcessingException

    fast = compiled_control(control)

    def stop(*args):
        raise InterruptProcessingException

    with pytest.raises(InterruptProcessingException):
        sampled(models, patcher, fast, callback=stop)
    assert fast.sampling._run is None and not fast.sampling._users and not patcher.callbacks
    assert error(sampled(models, patcher, fast), sampled(models, patcher, control)) < CLOSE
    assert not fallbacks()


def test_a_class_that_is_replaced_is_recorded_again(models, patcher, control, recordings, monkeypatch):
    """Every network is another module: what tells is its code."""
    import comfy.controlnet

    fast, kind = compiled_control(control), comfy.controlnet.ControlLoraOps.Conv2d
    plain, own = sampled(models, patcher, fast), kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x) * 1.5)
    wanted = sampled(models, patcher, control)
    assert error(wanted, plain) > 1e-3
    for _ in range(2):
        assert error(sampled(models, patcher, fast), wanted) < CLOSE
    assert len(recordings) == 2


def test_a_hooked_network_runs_in_eager(models, patcher, control, monkeypatch):
    """Another pack hooks each network when it is built."""
    import comfy.controlnet

    begin, calls = comfy.controlnet.ControlLora.pre_run, []

    def hooked(self, *args):
        begin(self, *args)
        part = self.control_model.zero_convs[0]
        part.register_forward_hook(lambda module, args, out: calls.append(1) or out * 2)

    monkeypatch.setattr(comfy.controlnet.ControlLora, "pre_run", hooked)
    wanted, count = sampled(models, patcher, control), len(calls)
    assert torch.equal(sampled(models, patcher, compiled_control(control)), wanted)
    assert len(calls) == 2 * count == 4 and "hooked" in fallbacks()[0]["reason"]


def test_a_fault_of_ours_costs_speed_alone(models, patcher, control, monkeypatch):
    from anyshape.accel.comfy import control_lora

    fast, wanted = compiled_control(control), sampled(models, patcher, control)
    monkeypatch.setattr(control_lora, "shadow_of", lambda *args: 1 / 0)
    assert torch.equal(sampled(models, patcher, fast), wanted)
    assert "ZeroDivisionError" in fallbacks()[0]["reason"]


def test_the_control_that_was_loaded_stays_as_it_was(models, patcher, control):
    known, fast = dict(vars(control)), compiled_control(control)
    wanted = sampled(models, patcher, control)
    sampled(models, patcher, fast)
    assert {name: vars(control)[name] for name in known} == known
    assert torch.equal(sampled(models, patcher, control), wanted)
    assert compiled_control(fast) is fast and type(fast.copy()) is type(fast)
    assert compiled_control(control).engine is fast.engine


def test_what_is_kept_goes_with_the_file(models, patcher):
    from anyshape.accel.comfy import control_lora

    control = models.control_lora(patcher)
    engine = weakref.ref(compiled_control(control).engine)
    sampled(models, patcher, compiled_control(control))
    assert engine() is not None
    known = len(control_lora._FILES)
    del control
    gc.collect()
    assert engine() is None and len(control_lora._FILES) == known - 1


def test_networks_of_other_code_have_other_numbers(pack):
    """Also where one changes in mid-run, before and after it was built again: a shared number is a wrong picture."""
    from anyshape.accel.comfy.control_lora import SameForm

    def built(gain):
        made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())
        made.gain = gain
        return made

    known, numbers = SameForm(), {}
    for gains in ((1, 2, 3), (3, 4), (5, 6), (6, 1)):
        network = built(gains[0])
        for gain in gains:
            network.gain = gain
            numbers.setdefault(known.of(network), set()).add(gain)
    assert all(len(gains) == 1 for gains in numbers.values()), numbers
    assert known.of(built(1)) == known.of(built(1))
