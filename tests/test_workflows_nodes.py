"""Every node of ComfyUI that patches a MODEL, before and after Compile Model: eager's image, and what stays fast."""

import inspect

import pytest
import torch

from tools.comfy_nodes import CALLED, GUIDANCE, NODES, OWN_RUNS, TAPED, WITHOUT_EFFECT, extras, node
from tools.driving import (
    DEEP_UNET,
    SMALL_UNET,
    calls_of,
    compiled,
    randn,
    sample_prompts,
    sampled_once,
)
from tools.oracles import FUSED, error, fallbacks, shapes
from tools.patching import changing_in_mid_run

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32
RUNS = {"unet": {"width": 128, "height": 64, "steps": 2}}
CASES = [(kind, name) for kind in RUNS for name in NODES[kind]]


@pytest.fixture(scope="module")
def patchers(models):
    """Guided: for nodes that never enter a forward, which may be short."""
    configs = {"unet": DEEP_UNET, "guided": SMALL_UNET}
    return {kind: models.unet("sd15", torch.float32, **config) for kind, config in configs.items()}


@pytest.fixture(scope="module")
def plain(models, patchers):
    """Eager's image without any node."""
    return sampled_once(models, patchers)


@pytest.fixture(scope="module")
def warm(models, patchers):
    """Compiled, and run once."""
    fast = {kind: compiled(patcher) for kind, patcher in patchers.items()}
    for each in fast.values():
        models.sample(each, **RUNS["unet"])
    return fast


@pytest.fixture
def patches(monkeypatch):
    """Whether programs have called patches since the last time that this was asked."""
    from anyshape.accel.tape.called_patches import LiveCall

    calls = calls_of(monkeypatch, LiveCall, "__call__")

    def asked():
        found = CALLED if calls else TAPED
        calls.clear()
        return found

    return asked


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_node(models, patchers, plain, warm, patches, kind, name):
    """After Compile Model and before it; then it is gone, and everything is fast again."""
    apply, wanted_way = NODES[kind][name]
    size, steps = ("guided", 3) if name in GUIDANCE else (kind, 2)
    run = RUNS[kind] | {"steps": steps} | OWN_RUNS.get(name, {})
    unpatched = plain(size, run)
    wanted = models.sample(apply(patchers[size]), **run)
    assert error(wanted, unpatched) > 1e-3 or (kind, name) in WITHOUT_EFFECT
    # which patches have to be called is found out at first, and known in the other order
    for patched, times in ((apply(warm[size]), 1 if name in GUIDANCE else 2), (compiled(apply(patchers[size])), 1)):
        for _ in range(times):
            assert error(models.sample(patched, **run), wanted) < CLOSE
        assert patches() == wanted_way
    assert {s["state"] for s in shapes()} == {FUSED}
    assert error(models.sample(warm[size], **run), unpatched) < CLOSE
    assert patches() == TAPED and all(s["reason"] == "" for s in shapes())
    assert fallbacks() == []


# Chains -----------------------------------------------------------------------------------------------------------


def chained(model, names, kind):
    for name in names:
        model = compiled(model) if name == "Compile Model" else NODES[kind][name][0](model)
    return model


CHAINS = [
    ("unet", ["FreeU_V2", "SelfAttentionGuidance", "Compile Model", "PerturbedAttentionGuidance", "RescaleCFG"]),
    ("unet", ["LazyCache", "PatchModelAddDownscale", "Compile Model", "HyperTile"]),
    ("unet", ["EasyCache", "Compile Model", "TomePatchModel", "Compile Model", "APG"]),
]


@pytest.mark.parametrize(("kind", "names"), CHAINS, ids=str)
def test_chains_of_nodes(models, patchers, warm, kind, names):
    """Several at once, ours anywhere among them."""
    run = RUNS[kind] | {"height": 128, "steps": 4}
    wanted = models.sample(chained(patchers[kind], [n for n in names if n != "Compile Model"], kind), **run)
    assert error(wanted, models.sample(patchers[kind], **run)) > 1e-3
    fast = chained(patchers[kind], names, kind)
    for _ in range(2):  # which patches have to be called is found out at first
        assert error(models.sample(fast, **run), wanted) < CLOSE
    assert {s["state"] for s in shapes()} == {FUSED}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # in ComfyUI's own windows
@pytest.mark.parametrize("kind", RUNS)
def test_context_windows(models, patchers, warm, kind):
    """A latent in windows of its rows, as video models have windows of frames."""
    windows = node(
        "nodes_context_windows", "ContextWindowsManualNode", 10, 4, "standard_static", 1, False, "pyramid", 2
    )
    channels, tokens = 4, 77
    prompts = [models.conditioning(patchers[kind], tokens, seed) for seed in (1, 2)]
    latent = torch.zeros(1, channels, 17, 9)
    wanted = sample_prompts(windows(patchers[kind]), *prompts, latent=latent)
    assert error(wanted, sample_prompts(patchers[kind], *prompts, latent=latent)) > 1e-3
    assert error(sample_prompts(windows(warm[kind]), *prompts, latent=latent), wanted) < CLOSE
    manual = extras("nodes_context_windows").ContextWindowsManualNode
    fixes = "causal_window_fix" in inspect.signature(manual.execute).parameters  # a row before all but the first
    assert {(s["height"], s["state"]) for s in shapes()} == {(80, FUSED), *([(88, FUSED)] if fixes else [])}


def test_differential_diffusion(models, patchers, warm):
    """A mask that opens step by step."""
    apply = node("nodes_differential_diffusion", "DifferentialDiffusion", 0.4)
    prompts = [models.conditioning(patchers["guided"], 77, seed) for seed in (1, 2)]
    given = {"latent": randn(1, 4, 9, 8), "noise_mask": torch.linspace(0, 1, 64 * 72).reshape(1, 1, 72, 64), "steps": 4}
    wanted = sample_prompts(apply(patchers["guided"]), *prompts, **given)
    assert error(wanted, sample_prompts(patchers["guided"], *prompts, **given)) > 1e-3
    assert error(sample_prompts(apply(warm["guided"]), *prompts, **given), wanted) < CLOSE
    assert {s["state"] for s in shapes()} == {FUSED}


def test_a_patch_added_after_a_run_acts_at_once(models, patchers, warm):
    """On the very clone that has run: what was decided in one run does not outlive it."""
    model, run = warm["unet"].clone(), RUNS["unet"]
    plain = models.sample(model, **run)
    model.set_model_attn2_replace(lambda q, k, v, options: v.mean(1, keepdim=True).expand_as(q), "middle", 0)
    wanted = patchers["unet"].clone()
    wanted.set_model_attn2_replace(lambda q, k, v, options: v.mean(1, keepdim=True).expand_as(q), "middle", 0)
    assert error(models.sample(model, **run), models.sample(wanted, **run)) < CLOSE
    assert error(models.sample(model, **run), plain) > 1e-4


LAYER = {"unet": "output_blocks.7.0.out_layers.3"}


def hooked(module):
    handle = module.register_forward_hook(lambda m, args, out: out * 1.5)
    return handle.remove


def replaced(module):
    own = module.forward
    module.forward = lambda *args: own(*args) * 1.5
    return lambda: delattr(module, "forward")


def cast(module):
    module.weight_function = [lambda weight: weight * 1.5]
    return lambda: setattr(module, "weight_function", [])


@pytest.mark.parametrize("change", [hooked, replaced, cast])
@pytest.mark.parametrize("kind", RUNS)
def test_a_layer_that_changes_in_mid_run(models, patchers, plain, warm, kind, change):
    """A pack that does so in a wrapper of its own when sampling has begun, and undoes it before the end."""

    def changing(model):
        return changing_in_mid_run(model, LAYER[kind], change)

    run = RUNS[kind] | {"steps": 4}
    wanted = models.sample(changing(patchers[kind]), **run)
    assert error(wanted, plain(kind, run)) > 1e-3
    assert error(models.sample(changing(warm[kind]), **run), wanted) < CLOSE


def test_what_a_graph_must_not_outlive(models, warm, monkeypatch):
    """Attention's backend and torch's ways to multiply, which users and packs switch between runs."""
    import comfy.ldm.modules.attention as attention
    from anyshape.accel.engine import Engine

    seen, own = [], Engine.__call__

    def noting(self, call, settings):
        seen.append((call.weights, call.taped.structure))
        return own(self, call, settings)

    monkeypatch.setattr(Engine, "__call__", noting)
    backend, matmul = attention.optimized_attention, torch.backends.cuda.matmul

    def fingerprint():
        models.sample(warm["unet"], **RUNS["unet"] | {"steps": 1})
        return seen[-1]

    first = fingerprint()
    assert fingerprint() == first
    with monkeypatch.context() as patch:
        patch.setattr(attention, "optimized_attention", lambda *args, **kwargs: backend(*args, **kwargs))
        assert fingerprint() != first
    matmul.allow_fp16_accumulation ^= True
    try:
        assert fingerprint() != first
    finally:
        matmul.allow_fp16_accumulation ^= True
    assert fingerprint() == first
