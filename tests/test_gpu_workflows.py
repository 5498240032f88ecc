"""Workflows on a real GPU: graphs while LoRAs, hooks, patches and batches come and go; eager's image always."""

import pytest
import torch

from tools.comfy_nodes import GUIDANCE, NODES, OWN_RUNS, WITHOUT_EFFECT, torch_compiled
from tools.driving import COMPILED_PARTS, TINY_UNET, compiled, memory_by_turns, sample_prompts
from tools.loras import ALL_KINDS, LAYERS, family, lora, stacked, with_lora
from tools.on_gpu import SMALL
from tools.oracles import error, shapes
from tools.patching import changing_in_mid_run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_stats", "no_graphs_left", "exact_float32")]

CLOSE = 1e-3  # relative L2 in fp32, without TF32, after a few steps
CHANGED = 1e-2
SMALL_FLUX = {"hidden_size": 256, "num_heads": 2, "depth": 2, "depth_single_blocks": 3, "context_in_dim": 128}
RUNS = {
    "unet": {"width": 256, "height": 328, "steps": 2},
    "flux": {"width": 256, "height": 328, "steps": 3, "tokens": 20, "cfg": 3.0},
}
KINDS = tuple(RUNS)


@pytest.fixture(scope="module")
def patchers(models):
    return {
        "unet": models.unet("sd15", torch.float32, **SMALL),
        "flux": models.flux(torch.float32, **SMALL_FLUX),
    }


@pytest.fixture
def warm(models, patchers):
    """Compiled, and its graph captured."""
    fast = {kind: compiled(patcher) for kind, patcher in patchers.items()}
    for kind, each in fast.items():
        models.sample(each, **RUNS[kind])
    assert {s["state"] for s in shapes()} == {"graph"}
    return fast


def replays():
    return sum(s["replays"] for s in shapes())


def assert_graph_again(models, patchers, warm, kind, run=None):
    """Without the LoRA or the node all is as it was, from a graph."""
    from anyshape.accel import stats

    run = run or RUNS[kind]
    stats.STATS.clear()  # of what the node's own calls counted
    assert error(models.sample(warm[kind], **run), models.sample(patchers[kind], **run)) < CLOSE
    assert replays() and {(s["state"], s["reason"]) for s in shapes()} == {("graph", "")}


# Weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_one_afternoon(models, patchers, warm, nothing_compiles, monkeypatch, kind, in_place):
    """LoRAs come, change strength, stack and go: a graph captured with other weights is never replayed."""
    first, second = (lora(patchers[kind], name, seed) for name, seed in (("lora", 1), ("loha", 99)))
    stacks = [[], [(first, 0.5)], [(first, -0.5)], [(second, 1.0)], [(first, 0.5), (second, 1.0)], [], [(first, 0.5)]]

    def loaded(patcher, stack):
        patcher = stacked(patcher, stack)
        monkeypatch.setattr(patcher, "weight_inplace_update", in_place)
        return patcher

    plain = models.sample(patchers[kind], **RUNS[kind])
    for stack in stacks:
        wanted, before = models.sample(loaded(patchers[kind], stack), **RUNS[kind]), replays()
        assert error(wanted, plain) > CHANGED or not stack
        assert error(models.sample(loaded(warm[kind], stack), **RUNS[kind]), wanted) < CLOSE
        assert replays() > before
    assert_graph_again(models, patchers, warm, kind)


@pytest.mark.parametrize("name", ALL_KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_lora(models, patchers, warm, nothing_compiles, caplog, kind, name):
    if name == "norm" and kind == "flux":
        pytest.skip("Flux's norms have no weights")
    state = lora(patchers[kind], name)
    wanted = models.sample(with_lora(patchers[kind], state, 0.7), **RUNS[kind])
    if refusals := [said.getMessage() for said in caplog.records if said.getMessage().startswith(f"ERROR {name} ")]:
        pytest.skip(f"this ComfyUI cannot apply one: {refusals[0]}")  # BOFT in half precision, in 0.33
    assert error(wanted, models.sample(patchers[kind], **RUNS[kind])) > CHANGED
    assert error(models.sample(with_lora(warm[kind], state, 0.7), **RUNS[kind]), wanted) < CLOSE
    assert_graph_again(models, patchers, warm, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_change_in_mid_run(models, patchers, warm, nothing_compiles, kind):
    """Two prompts with LoRAs of their own, one with keyframes: weights are written in place under a graph."""
    import comfy.hooks

    frames = comfy.hooks.HookKeyframeGroup()
    for strength, start in ((1.0, 0.0), (0.0, 0.4), (1.5, 0.7)):
        frames.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=start))
    groups = [comfy.hooks.create_hook_lora(lora(patchers[kind], name), 0.8, 0.0) for name in ("lora", "lokr")]
    groups[0].set_keyframes_on_hooks(frames)
    tokens = RUNS[kind].get("tokens", 77)
    conds = [models.conditioning(patchers[kind], tokens, seed) for seed in (1, 2, 3)]
    hooked = [comfy.hooks.set_hooks_for_conditioning(c, g) for c, g in zip(conds, groups, strict=False)]
    positive, before = hooked[0] + hooked[1], replays()
    wanted = sample_prompts(patchers[kind], positive, conds[2], steps=8)
    assert error(wanted, sample_prompts(patchers[kind], conds[0] + conds[1], conds[2], steps=8)) > CHANGED
    for _ in range(2):
        assert error(sample_prompts(warm[kind], positive, conds[2], steps=8), wanted) < CLOSE
    assert replays() > before + 16
    assert_graph_again(models, patchers, warm, kind)


@pytest.mark.parametrize("name", ["lora", "dora", "set_weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_low_vram(models, patchers, warm, kind, name):
    """A LoRA on a partly loaded model: weights are cast and patched at each call, so there is no graph."""
    import comfy.model_management as mm

    state, outs = lora(patchers[kind], name), []
    for each in (patchers[kind], warm[kind]):
        loaded = with_lora(each, state)
        mm.unload_all_models()
        mm.load_models_gpu([loaded])
        loaded.partially_unload(torch.device("cpu"), loaded.model_size() // 2)
        assert any(p.device.type == "cpu" for p in loaded.model.parameters())
        outs.append(models.sample(loaded, **RUNS[kind]))
    mm.unload_all_models()
    assert error(outs[1], outs[0]) < CLOSE
    assert_graph_again(models, patchers, warm, kind)


# Nodes and packs --------------------------------------------------------------------------------------------------

CASES = [(kind, name) for kind, nodes in NODES.items() for name in nodes]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_node(models, patchers, warm, kind, name):
    """After Compile Model and before it, then gone; what patches nothing leaves the graph."""
    apply, run = NODES[kind][name][0], RUNS[kind] | OWN_RUNS.get(name, {})
    wanted = models.sample(apply(patchers[kind]), **run)
    assert error(wanted, models.sample(patchers[kind], **run)) > CLOSE or (kind, name) in WITHOUT_EFFECT
    for patched in (apply(warm[kind]), compiled(apply(patchers[kind]))):
        for _ in range(2):  # the second run replays what the first captured
            assert error(models.sample(patched, **run), wanted) < CLOSE
    if name in GUIDANCE:
        assert {s["state"] for s in shapes()} == {"graph"}
    assert_graph_again(models, patchers, warm, kind, run)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_comes_in_mid_run(models, patchers, warm, kind):
    """From that step on it acts, and no graph is replayed over it."""
    layer = {"unet": "output_blocks.11.0.out_layers.3", "flux": "single_blocks.1.linear1"}[kind]

    def hooking(model):
        return changing_in_mid_run(
            model, layer, lambda module: module.register_forward_hook(lambda m, a, out: out * 1.5).remove
        )

    run = RUNS[kind] | {"steps": 5}
    wanted = models.sample(hooking(patchers[kind]), **run)
    assert error(wanted, models.sample(patchers[kind], **run)) > CLOSE
    assert error(models.sample(hooking(warm[kind]), **run), wanted) < CLOSE
    assert_graph_again(models, patchers, warm, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_another_attention_for_every_model(models, patchers, warm, monkeypatch, kind):
    """Packs exchange attention's backend between two runs: a graph with the old one is not replayed."""
    import comfy.ldm.flux.math as flux_math
    import comfy.ldm.modules.attention as attention

    plain = models.sample(warm[kind], **RUNS[kind])
    with monkeypatch.context() as patch:
        for module in (attention, flux_math):
            own = module.optimized_attention
            patch.setattr(module, "optimized_attention", lambda *a, own=own, **k: own(*a, **k) * 1.2)
        wanted = models.sample(patchers[kind], **RUNS[kind])
        assert error(wanted, plain) > CLOSE
        assert error(models.sample(warm[kind], **RUNS[kind]), wanted) < CLOSE
    assert_graph_again(models, patchers, warm, kind)


@pytest.mark.parametrize("parts", ["the whole model", "some blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_compile(models, patchers, kind, parts):
    """ComfyUI's TorchCompileModel with inductor next to ours: no graph holds what others compiled."""
    patcher = models.unet("sd15", torch.float32, **SMALL | TINY_UNET) if kind == "unet" else patchers["flux"]

    def compiling(model):
        return torch_compiled(model, "inductor", COMPILED_PARTS[kind] if parts == "some blocks" else ())

    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    fast, plain = compiled(patcher), models.sample(patcher, **RUNS[kind])
    models.sample(fast, **RUNS[kind])
    for both in (compiling(fast), compiled(compiling(patcher))):
        assert error(models.sample(both, **RUNS[kind]), plain) < CLOSE
    assert_graph_again(models, {kind: patcher}, {kind: fast}, kind)
    if parts == "the whole model":
        return
    clear_compilation_metrics()
    other = RUNS[kind] | {"width": RUNS[kind]["width"] + 64}
    assert error(models.sample(compiling(patcher), **other), models.sample(patcher, **other)) < CLOSE
    assert get_compilation_metrics()  # as if ours had never recorded what they compile


# Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_cond_and_uncond_are_split_and_joined_in_mid_run(models, patchers, warm, monkeypatch, nothing_compiles, kind):
    """As free memory comes and goes: a graph for each, the same image."""
    tokens = RUNS[kind].get("tokens", 77)
    conds = [models.conditioning(patchers[kind], tokens, seed) for seed in (1, 2)]
    channels = patchers[kind].model.latent_format.latent_channels
    latent = torch.zeros(2, channels, 33, 30)
    joined = sample_prompts(patchers[kind], *conds, latent=latent, steps=6)
    memory_by_turns(monkeypatch, True, False, False, True)
    for _ in range(2):
        assert error(sample_prompts(warm[kind], *conds, latent=latent, steps=6), joined) < CLOSE
    assert {s["state"] for s in shapes()} == {"graph"}
    assert len({s["key"] for s in shapes() if s["height"] == 264}) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_areas_and_prompts_of_unequal_length(models, patchers, warm, nothing_compiles, kind):
    import nodes

    tokens = RUNS[kind].get("tokens", 77)
    first, second, negative = (models.conditioning(patchers[kind], tokens * (1 + s % 2), s) for s in (1, 2, 3))
    positive = first + nodes.ConditioningSetArea().append(second, 64, 80, 24, 16, 1.2)[0]
    for batch in (1, 3):
        latent = torch.zeros(batch, patchers[kind].model.latent_format.latent_channels, 17, 15)
        wanted = sample_prompts(patchers[kind], positive, negative, latent=latent, steps=4)
        assert error(sample_prompts(warm[kind], positive, negative, latent=latent, steps=4), wanted) < CLOSE
    assert {s["state"] for s in shapes()} == {"graph"}


def test_the_layers_that_tests_change_are_there(patchers):
    for kind, patcher in patchers.items():
        assert family(patcher) == kind
        assert all(patcher.model.diffusion_model.get_submodule(name) is not None for name in LAYERS[kind])
