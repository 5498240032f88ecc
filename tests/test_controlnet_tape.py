"""Every ControlNet is recorded. CPU; unfused, what it gives is ComfyUI's to the bit. Those of SD also fused."""

import pytest
import torch

from tools import driving
from tools.control_driving import flux_control
from tools.driving import FLUX_RUN, SMALL_FLUX, SMALL_UNET, compiled, compiled_control, in_threads, randn, steering
from tools.oracles import assert_untouched, error, fallbacks, footprint
from tools.peak import peak

pytestmark = pytest.mark.usefixtures("pack", "one_thread", "clean_stats")


@pytest.fixture(scope="module")
def control(models):
    return flux_control(models)


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


def test_residuals_are_comfyuis(control, recordings):
    from anyshape.accel import stats

    fast = compiled_control(control)
    for side, rows, seed in ((16, 2, 0), (12, 1, 1), (16, 2, 2), (12, 1, 3)):
        assert_same(call(fast, side, rows, seed), call(control, side, rows, seed))
    assert len(recordings) == 2 and not fallbacks()
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
    run = FLUX_RUN | {"width": 64, "height": 64, "steps": 3}
    for apply in ({}, {"start_percent": 0.4, "strength": 0.5}, {"end_percent": 0.5}):
        eager = models.sample(flux, **run, steer=steering(control, **apply))
        for patcher in (flux, compiled(flux)):
            fast = compiled_control(control)
            out = models.sample(patcher, **run, steer=steering(fast, **apply))
            assert torch.equal(out, eager), apply
            assert fast.control_model.forward.sampling._run is None
    assert not torch.equal(eager, models.sample(flux, **run)) and not fallbacks()


def test_residuals_that_serve_several_blocks_are_one_tensor(control):
    """As in eager: no copy of them is made."""
    fast = compiled_control(control)
    for _ in range(2):
        given, wanted = ([id(item) for items in call(each).values() for item in items] for each in (fast, control))
        assert len(set(given)) == len(set(wanted)) and [given.index(item) for item in given] == [
            wanted.index(item) for item in wanted
        ]


def test_a_controlnet_of_sd35(models, recordings):
    """Its network takes an embedding from the model when a run begins: from another model another one."""
    import comfy.controlnet
    import comfy.ops
    from comfy.cldm.dit_embedder import ControlNetEmbedder

    from tools.architectures import patchers

    config = {"num_attention_heads": 2, "attention_head_dim": 64, "adm_in_channels": 24, "num_layers": 2}
    network = ControlNetEmbedder(
        img_size=None, patch_size=2, in_chans=16, main_model_double=2, double_y_emb=False, dtype=torch.float32,
        device="cpu", operations=comfy.ops.disable_weight_init, **config,
    )  # fmt: skip
    models.randomise(network)
    control = comfy.controlnet.ControlNetSD35(network.eval(), compression_ratio=1, load_device=torch.device("cpu"))
    fast = compiled_control(control)
    assert type(fast.copy()) is type(fast)
    for seed in (0, 1):
        patcher = patchers.make("SD3", seed=seed)
        prompts = [[[randn(1, 9, 40, seed=seed), {"pooled_output": randn(1, 24, seed=seed)}]] for seed in (1, 2)]
        outs = [sampled_sd35(patcher, prompts, each) for each in (control, fast, None)]
        assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert len(recordings) == 1 and not fallbacks()


def small_network(name):
    """(a ControlNet of the model ``name`` of ``tools.architectures``, what it is called with at a size)."""
    import comfy.cldm.mmdit
    import comfy.ops
    from comfy.ldm.hydit.controlnet import HunYuanControlNet
    from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel

    from tools.architectures import TABLE

    make = {
        "SD3": lambda **config: comfy.cldm.mmdit.ControlNet(num_blocks=1, **config),
        "QwenImage": QwenImageControlNetModel, "HunyuanDiT": HunYuanControlNet,
    }[name]  # fmt: skip
    config, layers = dict(TABLE[name].config), {"device": "cpu", "operations": comfy.ops.disable_weight_init}

    def given(side, rows, seed):
        latent = [rows, 4 if name == "HunyuanDiT" else 16, *([1] if name == "QwenImage" else []), side, side]
        found = {
            "x": randn(*latent, seed=seed), "hint": randn(*latent, seed=seed + 1),
            "timesteps": torch.full((rows,), 0.5), "context": randn(rows, 77, 40, seed=seed + 2),
        }  # fmt: skip
        if name == "SD3":
            return found | {"y": randn(rows, 24, seed=seed + 3)}
        if name == "QwenImage":
            return found
        other = {"encoder_hidden_states_t5": randn(rows, 256, 40, seed=seed + 3), "context": found["context"][..., :24]}
        masks = {"text_embedding_mask": torch.ones(rows, 77), "text_embedding_mask_t5": torch.ones(rows, 256)}
        return found | other | masks

    return make(**config, **layers, dtype=torch.float32), given


@pytest.mark.parametrize("name", ["SD3", "QwenImage", "HunyuanDiT"])
def test_other_networks(models, recordings, name):
    """That of Hunyuan-DiT writes into its prompts, which a replay would not: it stays ComfyUI's own."""
    import comfy.controlnet

    network, given = small_network(name)
    models.randomise(network)
    control = comfy.controlnet.ControlNet(network.eval(), load_device=torch.device("cpu"))
    fast = compiled_control(control).control_model
    for side, rows, seed in ((16, 2, 0), (12, 1, 1), (16, 2, 2)):
        with torch.inference_mode():
            assert_same(fast(**given(side, rows, seed)), network(**given(side, rows, seed)))
    assert len(recordings) == 2
    reasons = [found["reason"].split(" (")[0] for found in fallbacks()]
    assert reasons == (["it writes into an input or a weight"] if name == "HunyuanDiT" else [])


def sampled_sd35(patcher, prompts, control):
    from tools.driving import sample_prompts

    if control is not None:
        control.cond_hint_original = None
        used = control.copy().set_cond_hint(randn(1, 16, 16, 16), 0.7)
        prompts = [[[text, extra | {"control": used, "control_apply_to_uncond": True}]] for ((text, extra),) in prompts]
    return sample_prompts(patcher, *prompts)


# Of SD's UNets ----------------------------------------------------------------------------------------------------

HALF = torch.float16
NARROW = driving.NARROW_UNET | driving.TINY_UNET


def inputs(width, height, rows, dtype=HALF, seed=0):
    given = {
        "x": randn(rows, 4, height // 8, width // 8, seed=seed), "hint": randn(rows, 3, height, width, seed=seed + 1),
        "timesteps": torch.full((rows,), 500.0), "context": randn(rows, 77, 64, seed=seed + 2),
    }  # fmt: skip
    return {name: tensor.to(dtype) for name, tensor in given.items()}


@pytest.fixture
def fused(monkeypatch):
    """Kernels run here, in the interpreter."""
    from anyshape.accel import tape_tier
    from anyshape.accel.tape import kernels

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    monkeypatch.setattr(kernels, "_COMPILED", {})  # whatever other tests have compiled


def assert_close(out, wanted):
    pairs = [pair for name in wanted for pair in zip(out[name], wanted[name], strict=True)]
    assert max(error(*pair) for pair in pairs) < 5e-3
    assert [a.stride() for a, _ in pairs] == [b.stride() for _, b in pairs]


@pytest.mark.usefixtures("fused", "plain_kernels")
def test_kernels_serve_every_size(models):
    """With the check on: nothing compiles after the first size, weights lie channels last within the run alone."""
    from anyshape.accel import stats

    patcher = models.unet("sd15", HALF, **NARROW)
    control = models.controlnet_for(patcher)
    fast, network = compiled_control(control), control.control_model
    sizes = [(64, 64, 1), (64, 64, 1), (72, 56, 2), (56, 32, 3)]
    calls, before = [inputs(*size, seed=seed) for seed, size in enumerate(sizes)], footprint(network)
    with torch.inference_mode():
        wanted = [network(**given) for given in calls]
        fast.pre_run(patcher.model, patcher.model.model_sampling.percent_to_sigma)
        for given, expected in zip(calls, wanted, strict=True):
            assert_close(fast.control_model(**given), expected)
            assert not network.input_blocks[1][0].in_layers[2].weight.is_contiguous()
        fast.cleanup()
    assert_untouched(network, before)
    (entry,) = [entry for entry in stats.snapshot()["models"] if entry["shapes"]]
    assert [(shape["state"], shape["calls"]) for shape in entry["shapes"]] == [("tape", 2), ("tape", 1), ("tape", 1)]
    assert entry["kernels"] > 10 and not entry["recompiles"] and not fallbacks()


@pytest.mark.usefixtures("fused", "plain_kernels")
def test_a_fused_control_lora(models):
    """Over two runs, of which the second compiles and records nothing."""
    from anyshape.accel import stats

    patcher = models.unet("sd15", HALF, **NARROW)
    control = models.control_lora(patcher)
    fast, run = compiled_control(control), {"width": 64, "height": 64, "steps": 2, "cfg": 1.0}
    models.sample(patcher, **run)  # what ComfyUI notes on a model that it loads
    before = footprint(patcher.model.diffusion_model)
    for apply in ({}, {"strength": 0.5}):
        eager, out = (models.sample(patcher, **run, steer=steering(each, **apply)) for each in (control, fast))
        assert error(out, eager) < 5e-3
        (entry,) = [entry for entry in stats.snapshot()["models"] if entry["shapes"]]
        assert entry["kernels"] > 5 and not entry["recompiles"] and not fallbacks()
    assert [(shape["state"], shape["calls"]) for shape in entry["shapes"]] == [("tape", 4)]
    assert_untouched(patcher.model.diffusion_model, before)


@pytest.mark.parametrize("kind", ["its own weights", "Control-LoRA"])
def test_no_more_memory_than_eager(models, monkeypatch, kind):
    """Neither while it is recorded nor when it is replayed. What kernels compute does not matter here."""
    from anyshape.accel.tape.kernels import Launch

    from tools.recording import recorded

    patcher = models.unet("sd15", torch.float32, **driving.ONE_LEVEL_UNET)
    if kind == "Control-LoRA":
        control = models.control_lora(patcher)
        control.pre_run(patcher.model, patcher.model.model_sampling.percent_to_sigma)
    else:
        control = models.controlnet_for(patcher)
    given, network, made = inputs(128, 120, 2, torch.float32), control.control_model, []
    eager = peak(lambda: network(**given))
    assert peak(lambda: made.append(recorded(network, (), given, fuse=False))) <= eager * 1.01
    monkeypatch.setattr(Launch, "__call__", lambda *args: None)
    made.append(recorded(network, (), given))
    for call in made:
        assert sum(tensor.nbytes for tensor in call.program.constants()) < 1024
        assert peak(call.run) <= eager * 1.01


def test_two_threads(models):
    """Each records and replays on one network; none takes the other's for a change of it."""
    control = models.controlnet("sd15", torch.float32, **SMALL_UNET)
    sizes = [(64, 64, 1), (72, 64, 2), (64, 96, 1)]

    def body(order):
        fast = compiled_control(control)
        for seed, size in enumerate(order * 2):
            given = inputs(*size, torch.float32, seed)
            with torch.inference_mode():
                out, wanted = fast.control_model(**given), control.control_model(**given)
            assert error(out["middle"][0], wanted["middle"][0]) < 1e-4

    in_threads(body, (sizes, sizes[::-1]))
    assert not [found for found in fallbacks() if "hooked" in found["reason"]]
