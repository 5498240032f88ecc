"""The networks of patches, which count as parts of the model while it is sampled. On the CPU, with Anima's LLLite."""

import gc
import weakref

import pytest
import torch

from tools import architectures
from tools.driving import calls_of, compiled
from tools.oracles import error, fallbacks, shapes
from tools.patching import CHANGED

pytestmark = [
    pytest.mark.usefixtures("clean_stats"),
    pytest.mark.skipif(architectures.is_older(), reason="it has no such nodes"),
]
RUN = {"width": 128, "height": 128, "steps": 3, "tokens": 24, "cfg": 3.0}


@pytest.fixture
def patcher(pack):
    from tools.architectures import patchers

    return patchers.make("Anima")


def with_network(patcher):
    """(The model with the node, its network)."""
    from tools.model_patches import lllite

    patched = lllite()(patcher)
    return patched, patched.model_patches_models()[0].model


def check(models, plain, fast, seed=0, states=("tape",)):
    wanted = models.sample(plain, **RUN, seed=seed)
    assert torch.equal(models.sample(fast, **RUN, seed=seed), wanted), fallbacks()
    assert {shape["state"] for shape in shapes()} <= set(states), fallbacks()
    return wanted


def test_only_the_patch_that_reads_back_is_called(models, patcher, recordings, monkeypatch):
    """The others hold its network: it counts as a part of the model, in turn with the model alone."""
    from anyshape.accel.tape.called_patches import LiveCall

    called = calls_of(monkeypatch, LiveCall, "_called", lambda call, *_: call.name)
    fast = compiled(patcher)
    (plain, network), (patched, same) = with_network(patcher), with_network(fast)
    same.load_state_dict(network.state_dict())
    wanted = check(models, plain, patched)
    alone = check(models, patcher, fast)
    counted = len(recordings)
    assert error(wanted, alone) > CHANGED
    for seed in range(2):
        check(models, patcher, fast, seed)
        check(models, plain, patched, seed)
    assert len(recordings) == counted and not fallbacks()
    assert set(called) == {"AnimaLLLitePatch"}


CHANGES = {
    "a weight in place": lambda part: part.up.weight.mul_(1.5),
    "another weight": lambda part: setattr(part.up, "weight", torch.nn.Parameter(part.up.weight * 1.5)),
    "a hook": lambda part: part.up.register_forward_hook(lambda layer, args, out: out * 1.5),
    "another forward": lambda part: setattr(part, "forward", lambda x, cond, strength: x * 1.5),
    "another layer": lambda part: setattr(part, "up", torch.nn.Linear(part.up.in_features, part.up.out_features)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_network_that_changes_between_two_runs(models, patcher, name):
    plain, network = with_network(patcher)
    fast = compiled(plain)
    before = check(models, plain, fast)
    with torch.inference_mode():
        CHANGES[name](network.lllite_dit_blocks_1_self_attn_q_proj)
    # other code might read a tensor that Anima leaves in itself: then nothing is recorded
    assert error(check(models, plain, fast, states=("tape", "eager")), before) > CHANGED


def test_a_network_that_another_one_takes_the_place_of(models, patcher):
    """As when the node runs again, with another file."""
    fast = compiled(patcher)
    with torch.inference_mode():
        outs = []
        for number in range(3):
            (plain, network), (patched, same) = with_network(patcher), with_network(fast)
            for each in (network, same):
                each.lllite_dit_blocks_0_mlp_layer1.up.weight.mul_(1 + number)
            outs.append(check(models, plain, patched))
    assert error(outs[0], outs[1]) > CHANGED and error(outs[1], outs[2]) > CHANGED


def test_a_network_is_let_go_with_its_node(models, patcher):
    """The model, and what was recorded, go on without it."""
    fast = compiled(patcher)
    patched, network = with_network(fast)
    models.sample(patched, **RUN)
    gone = [weakref.ref(network), *map(weakref.ref, network.parameters())]
    del patched, network
    import comfy.model_management

    comfy.model_management.cleanup_models_gc()
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    check(models, patcher, fast)


def test_companions_are_last_and_have_their_own_paths(pack):
    from anyshape.accel.tape.companions import companions, put_beside
    from anyshape.accel.tape.named_tensors import NamedTensors, PartsByPath, modules_of, parts_of, resolve

    model, first, second = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3))
    assert companions(model) == {} and len(parts_of(model)) == 2
    put_beside(model, [first, second])
    assert [path for path, _ in modules_of(model)] == ["", "0", "beside 0", "beside 0.0", "beside 1", "beside 1.0"]
    assert parts_of(model) == [part for _, part in modules_of(model)] and parts_of(first) == [first, first[0]]
    weight = NamedTensors(model).find(second[0].weight)
    assert resolve(PartsByPath(model), weight) is second[0].weight
    del second
    gc.collect()
    assert list(companions(model)) == ["beside 0"]
    put_beside(model, ())
    assert companions(model) == {}
