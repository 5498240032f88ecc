"""The networks of patches, which count as parts of the model while it is sampled. On the CPU, with Anima's LLLite."""

import gc
import weakref

import pytest
import torch

from tools import architectures, pages
from tools.driving import calls_of, compiled, skipping
from tools.oracles import error, fallbacks, shapes
from tools.patching import CHANGED
from tools.skip_driving import BLOCKS
from tools.vae_driving import build

pytest_plugins = ("tools.page_fixtures",)
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


def test_which_networks_may_be_beside_a_model(patcher):
    """ComfyUI's own, on the model's device, and no part of it. Patches with others are as before."""
    from anyshape.accel.comfy.patch_networks import networks

    patched, network = with_network(patcher)
    options, model = patched.model_options["transformer_options"], patcher.model.diffusion_model
    here = torch.device("cpu")
    assert networks(options, model, here) == [network] and networks({}, model, here) == []
    assert networks(options, model, torch.device("cuda")) == []
    assert networks(options, torch.nn.Sequential(network), here) == []
    network.brought = type("Theirs", (torch.nn.Module,), {})()
    assert networks(options, model, here) == []


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


ONE = {"n_control_layers": 1}  # so Z-Image's patch lets go of its tokens before the last of few blocks
CONTROLS = {  # by node: settings of its network
    "ZImageFunControlnet": ONE,
    "ZImageFunControlnet 2": ONE | {"additional_in_dim": 17, "refiner_control": True},
    "QwenImageDiffsynthControlnet": {}, "WanUni3CControlnetApply": {},
}  # fmt: skip


@pytest.mark.parametrize("name", CONTROLS)
def test_no_control_is_called(models, pack, recordings, monkeypatch, name):
    """Each encodes its picture for each size, in the first forward of it: that is ComfyUI's own, and no more.

    A VAE that was unloaded meanwhile makes no difference.
    """
    import comfy.model_management
    from anyshape.accel.tape.called_patches import LiveCall

    from tools import model_patches
    from tools.architectures import patchers

    called = calls_of(monkeypatch, LiveCall, "_called", lambda call, *_: call.name)
    kind, apply, run = model_patches.NODES[name]
    if kind == "ZImage":
        vae, apply = build(models, z_channels=16), model_patches.fun(**CONTROLS[name])
        monkeypatch.setattr(model_patches, "Encoder", lambda model: vae)
    patcher = patchers.make(kind)
    plain, fast = apply(patcher), apply(compiled(patcher))
    took = []
    for seed, width in enumerate((128, 192, 128, 128, 192, 160, 128)):
        if seed == 3:
            comfy.model_management.unload_all_models()
        before, at = len(recordings), RUN | {"width": width, "steps": 4, "seed": seed} | run
        wanted = models.sample(plain, **at)
        assert torch.equal(models.sample(fast, **at), wanted), fallbacks()
        took.append(len(recordings) - before)
    assert not called and not fallbacks() and {shape["state"] for shape in shapes()} == {"tape"}
    # Encoding again costs one forward; the size is known then. The picture fits the first size as it is.
    assert took[2:] == [1, 0, 1, took[1], 1] and took[0] == took[1] - (name != "WanUni3CControlnetApply")


@pytest.mark.parametrize("name", [*CONTROLS, "AnimaLLLiteApply"])
def test_skip_blocks(models, pack, name):
    """What a network adds between blocks is added on skipped steps too, as Skip Blocks does it alone."""
    from anyshape.accel import stats

    from tools import model_patches
    from tools.architectures import patchers

    kind, apply, run = model_patches.NODES[name]
    if kind == "ZImage":
        apply = model_patches.fun(**CONTROLS[name])
    patched = apply(patchers.make(kind, blocks=BLOCKS))
    alone, fast = (skipping(each, interval=3, depth="1") for each in (patched, compiled(patched)))
    at = RUN | {"steps": 9} | run
    for each in (fast, alone):  # in a first run a part of a range of noise levels may have no program yet
        models.sample(each, **at)
    assert torch.equal(models.sample(fast, **at, seed=1), models.sample(alone, **at, seed=1)), fallbacks()
    counted = stats.snapshot()["skip"][-1]
    assert (counted["full"], counted["skipped"], counted["resets"]) == (3, 6, {}) and not fallbacks()


def test_a_patch_that_changes_itself_each_time_is_called(models, pack, recordings):
    """It has one more chance if it brings a network, and no third one."""
    from tools.architectures import patchers

    class Counts:
        calls = 0

        def __call__(self, given):
            self.calls += 1
            return given | {"img": given["img"] * (1 + self.calls / 100)}

        def models(self):
            return []

    outs = []
    for make in (lambda patcher: patcher, compiled):
        patched = make(patchers.make("ZImage"))
        patched.set_model_double_block_patch(Counts())
        outs.append([models.sample(patched, **RUN, seed=seed) for seed in range(2)])
    assert all(map(torch.equal, *outs)) and len(recordings) == 3
    assert {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()


# With DynamicVRAM ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mapped(patcher, card):
    """(A model with the node, compiled with it, what a load of the model and of the network does.)"""
    patched, network = with_network(patcher)
    loads = [pages.Loads(each, card) for each in (patcher.model.diffusion_model, network)]
    for load in loads:
        load()
    return patched, compiled(patched), loads


def near(models, patched, fast, seed=0):
    assert error(models.sample(fast, **RUN, seed=seed), models.sample(patched, **RUN, seed=seed)) < 1e-4


def test_pages_of_a_network_go_and_come_back(models, mapped, recordings, monkeypatch):
    """They are asked for with the model's, and none is kept when a call is over."""
    from anyshape.accel.tape.called_patches import LiveCall

    called = calls_of(monkeypatch, LiveCall, "_called", lambda call, *_: call.name)
    patched, fast, loads = mapped
    near(models, patched, fast)
    counted = len(recordings)
    for load in reversed(loads):
        load.pages.give_away()
        for each in loads:
            each()
        near(models, patched, fast, seed=1)
        assert all(each.pages.there and not each.pages.pinned for each in loads)
    assert set(called) == {"AnimaLLLitePatch"} and len(recordings) == counted
    assert {shape["state"] for shape in shapes()} == {"tape"} and not fallbacks()


@pytest.mark.parametrize("short", [0, 1])
def test_a_network_that_does_not_fit_beside_its_model(models, mapped, recordings, monkeypatch, short):
    """Steps fetch the weights of both, and in each run no more is asked beside than whether they still must.

    short: which of the two has lost pages; the other one's may lie behind them.
    """
    from anyshape.accel.comfy import dynamic

    patched, fast, loads = mapped
    wanted = models.sample(patched, **RUN | {"steps": 8})
    table = loads[short].pages
    table.watermark = table.count // 2  # as comfy-aimdo leaves it, until the next load
    table.give_away(*range(table.watermark, table.count))
    asked = calls_of(monkeypatch, dynamic, "_fault")
    out = models.sample(fast, **RUN | {"steps": 8})
    assert torch.equal(out, wanted) and len(recordings) <= 2
    assert {shape["state"] for shape in shapes()} == {"tape"}
    assert all("weights streamed: of" in fallback["reason"] for fallback in fallbacks())
    assert not any(load.pages.pinned for load in loads) and len(asked) <= 2 * 8
