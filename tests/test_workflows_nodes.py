"""Every node of ComfyUI that patches a MODEL, before and after Compile Model: eager's image, and what stays fast."""

import importlib
import types
from pathlib import Path

import pytest
import torch

from tools.driving import FLUX_RUN, SMALL_FLUX, SMALL_UNET, compiled, randn, sample_prompts
from tools.oracles import error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32
RUNS = {"unet": {"width": 128, "height": 64, "steps": 2}, "flux": FLUX_RUN | {"width": 136, "height": 72, "steps": 3}}
ALL, SOME, NONE = "all", "some", "none"  # how many of the model's transformer blocks run fused
# Where the layers of blocks meet regions: (method of RegionOps, how often in a forward).
BLOCKS = {"unet": ("feed_forward", 16), "flux": ("linear_gelu", 2 * 2 + 3)}


def node(module, name, *args, **kwargs):
    """ComfyUI's node applied to a model with these other inputs."""

    def apply(model):
        cls = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
        if hasattr(cls, "execute"):
            out = cls.execute(model, *args, **kwargs)
            return (out if isinstance(out, tuple) else out.args)[0]  # HyperTile gives a plain tuple
        return getattr(cls(), cls.FUNCTION)(model, *args, **kwargs)[0]

    return apply


def perp_neg(model):
    from bench.models import conditioning

    tokens = 77 if model.model.latent_format.latent_channels == 4 else 20
    return node("nodes_perpneg", "PerpNeg", conditioning(model, tokens, 3), 0.7)(model)


def sharpen(model):
    """LatentApplyOperationCFG takes the latent operation of another node."""
    from comfy_extras.nodes_latent import LatentOperationSharpen

    operation = LatentOperationSharpen.execute(5, 1.0, 0.2).args[0]
    return node("nodes_latent", "LatentApplyOperationCFG", operation)(model)


def hypernetwork(model):
    """HypernetworkLoader on weights of its own."""
    import folder_paths
    from comfy_extras.nodes_hypernetwork import HypernetworkLoader

    folder = folder_paths.get_folder_paths("hypernetworks")[0]
    state = {"layer_structure": [1, 1], "activation_func": "linear"}
    state[64] = [{"linear.0.weight": randn(64, 64, seed=s) * 0.1, "linear.0.bias": randn(64, seed=s)} for s in (1, 2)]
    path = Path(folder) / "anyshape_test.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    try:
        return HypernetworkLoader.execute(model, path.name, 1.0).args[0]
    finally:
        path.unlink()


def uso(model):
    """USOStyleReference with a small style projector of its own class."""
    import comfy.ops
    from comfy.model_patcher import ModelPatcher
    from comfy_extras.nodes_model_patch import SigLIPMultiFeatProjModel, USOStyleReference

    from bench.models import randomise

    cpu, width = torch.device("cpu"), SMALL_FLUX["hidden_size"]
    projector = SigLIPMultiFeatProjModel(7, 5, 24, width, operations=comfy.ops.manual_cast)
    randomise(projector, 3)
    vision = types.SimpleNamespace(
        all_hidden_states=randn(1, 21, 7, 24, seed=1), penultimate_hidden_states=randn(1, 7, 24, seed=2)
    )
    return USOStyleReference().apply_patch(model, ModelPatcher(projector, cpu, cpu), vision)[0]


GUIDANCE = {  # nothing but what is done with the model's predictions
    "APG": node("nodes_apg", "APG", 0.5, 5.0, -0.3),
    "CFGZeroStar": node("nodes_cfg", "CFGZeroStar"),
    "CFGNorm": node("nodes_cfg", "CFGNorm", 0.7),
    "Epsilon Scaling": node("nodes_eps", "EpsilonScaling", 1.05),
    "TemporalScoreRescaling": node("nodes_eps", "TemporalScoreRescaling", 0.8, 1.0),
    "FreSca": node("nodes_fresca", "FreSca", 0.8, 1.5, 3),
    "RenormCFG": node("nodes_lumina2", "RenormCFG", 0.5, 0.7),
    "Mahiro": node("nodes_mahiro", "Mahiro"),
    "TCFG": node("nodes_tcfg", "TCFG"),
    "RescaleCFG": node("nodes_model_advanced", "RescaleCFG", 0.7),
    "PerpNeg": perp_neg,
    "LatentApplyOperationCFG": sharpen,
    "VideoLinearCFGGuidance": node("nodes_video_model", "VideoLinearCFGGuidance", 1.0),
    "VideoTriangleCFGGuidance": node("nodes_video_model", "VideoTriangleCFGGuidance", 1.0),
    "LazyCache": node("nodes_easycache", "LazyCacheNode", 5.0, 0.0, 1.0, False),
    "EasyCache": node("nodes_easycache", "EasyCacheNode", 5.0, 0.0, 1.0, False),
}
SAMPLING = "nodes_model_advanced"
NODES = {
    "unet": {name: (apply, ALL) for name, apply in GUIDANCE.items()}
    | {
        "ModelSamplingDiscrete v, zsnr": (node(SAMPLING, "ModelSamplingDiscrete", "v_prediction", True), ALL),
        "ModelSamplingDiscrete lcm": (node(SAMPLING, "ModelSamplingDiscrete", "lcm", False), ALL),
        "ModelSamplingContinuousEDM": (node(SAMPLING, "ModelSamplingContinuousEDM", "v_prediction", 90.0, 0.01), ALL),
        "ModelSamplingContinuousV": (node(SAMPLING, "ModelSamplingContinuousV", "v_prediction", 90.0, 0.01), ALL),
        "ModelComputeDtype": (node(SAMPLING, "ModelComputeDtype", "fp32"), ALL),
        "SelfAttentionGuidance": (node("nodes_sag", "SelfAttentionGuidance", 0.8, 2.0), SOME),
        "PerturbedAttentionGuidance": (node("nodes_pag", "PerturbedAttentionGuidance", 3.0), SOME),
        "HyperTile": (node("nodes_hypertile", "HyperTile", 32, 2, 1, True), NONE),
        "TomePatchModel": (node("nodes_tomesd", "TomePatchModel", 0.4), NONE),
        "HypernetworkLoader": (hypernetwork, NONE),
        "PatchModelAddDownscale": (
            node("nodes_model_downscale", "PatchModelAddDownscale", 3, 2.0, 0.0, 0.5, True, "bicubic", "bicubic"), ALL,
        ),
        "PatchModelAddDownscale before the skip": (
            node("nodes_model_downscale", "PatchModelAddDownscale", 3, 1.5, 0.0, 0.5, False, "bislerp", "area"), ALL,
        ),
        "FreeU_V2": (node("nodes_freelunch", "FreeU_V2", 1.3, 1.4, 0.9, 0.2), ALL),
    },
    "flux": {name: (apply, ALL) for name, apply in GUIDANCE.items()}
    | {
        "ModelSamplingFlux": (node(SAMPLING, "ModelSamplingFlux", 2.0, 0.5, 1024, 1024), ALL),
        "ModelSamplingSD3": (node(SAMPLING, "ModelSamplingSD3", 3.0), ALL),
        "ModelSamplingAuraFlow": (node(SAMPLING, "ModelSamplingAuraFlow", 1.7), ALL),
        "ModelComputeDtype": (node(SAMPLING, "ModelComputeDtype", "fp32"), ALL),
        "ScaleROPE": (node("nodes_rope", "ScaleROPE", 1.5, 2.0, 0.5, 3.0, 1.0, 1.0), ALL),
        "SkipLayerGuidanceDiT": (node("nodes_slg", "SkipLayerGuidanceDiT", 3.0, 0.0, 1.0, "1", "0, 2", 0.2), SOME),
        "SkipLayerGuidanceDiTSimple": (node("nodes_slg", "SkipLayerGuidanceDiTSimple", 0.0, 1.0, "1", "0"), SOME),
        "SkipLayerGuidanceSD3": (node("nodes_sd3", "SkipLayerGuidanceSD3", "1", 3.0, 0.0, 1.0), SOME),
        "USOStyleReference": (uso, ALL),
        "PerturbedAttentionGuidance": (node("nodes_pag", "PerturbedAttentionGuidance", 3.0), ALL),
    },
}  # fmt: skip
OWN_RUNS = {  # what a node needs to do anything
    "LazyCache": {"steps": 5}, "EasyCache": {"steps": 5}, "SelfAttentionGuidance": {"height": 128},
    "USOStyleReference": {"cfg": 1.0},
}  # fmt: skip
CASES = [(kind, name) for kind, nodes in NODES.items() for name in nodes]
# PAG replaces a block's attention that Flux has not; a model in fp32 is computed in fp32 anyway, but cast at each call
WITHOUT_EFFECT = {("flux", "PerturbedAttentionGuidance"), ("unet", "ModelComputeDtype"), ("flux", "ModelComputeDtype")}


@pytest.fixture(scope="module")
def patchers(models, unets):
    return {"unet": unets["sd15"], "flux": models.flux(torch.float32, **SMALL_FLUX)}


@pytest.fixture(scope="module")
def plain(models, patchers):
    """Eager's image without any node."""
    return {kind: models.sample(patcher, **RUNS[kind]) for kind, patcher in patchers.items()}


@pytest.fixture(scope="module")
def warm(models, patchers):
    """Compiled, and run once."""
    fast = {kind: compiled(patcher) for kind, patcher in patchers.items()}
    for kind, each in fast.items():
        models.sample(each, **RUNS[kind])
    return fast


@pytest.fixture
def share(monkeypatch):
    """How many of a model's blocks have run fused, of all that were called, since the last time it was asked."""
    from anyshape.accel.region_ops import RegionOps

    calls, seen = [], [0]

    def counting(name):
        own = getattr(RegionOps, name)
        monkeypatch.setattr(RegionOps, name, lambda *args: calls.append(1) or own(*args))

    for name, _ in BLOCKS.values():
        counting(name)

    def asked(kind):
        total = sum(s["calls"] for s in shapes())
        forwards, fused = total - seen[0], len(calls)
        seen[0] = total
        calls.clear()
        assert forwards > 0
        return NONE if fused == 0 else ALL if fused == forwards * BLOCKS[kind][1] else SOME

    return asked


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_node(models, patchers, plain, warm, share, kind, name):
    """After Compile Model and before it; then it is gone, and everything is fast again."""
    apply, wanted_share = NODES[kind][name]
    run, unpatched = RUNS[kind], plain[kind]
    if name in OWN_RUNS:
        run = run | OWN_RUNS[name]
        unpatched = models.sample(patchers[kind], **run)
    wanted = models.sample(apply(patchers[kind]), **run)
    assert error(wanted, unpatched) > 1e-3 or (kind, name) in WITHOUT_EFFECT
    for patched in (apply(warm[kind]), compiled(apply(patchers[kind]))):
        assert error(models.sample(patched, **run), wanted) < CLOSE
        assert share(kind) == wanted_share
    assert {s["state"] for s in shapes()} == {"regions"}
    assert error(models.sample(warm[kind], **run), unpatched) < CLOSE
    assert share(kind) == ALL and all(s["reason"] == "" for s in shapes())
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
    ("flux", ["ModelSamplingFlux", "Compile Model", "SkipLayerGuidanceDiT", "EasyCache"]),
    ("flux", ["ScaleROPE", "SkipLayerGuidanceDiTSimple", "Compile Model", "TCFG"]),
]


@pytest.mark.parametrize(("kind", "names"), CHAINS, ids=str)
def test_chains_of_nodes(models, patchers, warm, kind, names):
    """Several at once, ours anywhere among them."""
    run = RUNS[kind] | {"height": 128, "steps": 4}
    wanted = models.sample(chained(patchers[kind], [n for n in names if n != "Compile Model"], kind), **run)
    assert error(wanted, models.sample(patchers[kind], **run)) > 1e-3
    assert error(models.sample(chained(patchers[kind], names, kind), **run), wanted) < CLOSE
    assert {s["state"] for s in shapes()} == {"regions"}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # in ComfyUI's own windows
@pytest.mark.parametrize("kind", ["unet", "flux"])
def test_context_windows(models, patchers, warm, kind):
    """A latent in windows of its rows, as video models have windows of frames."""
    windows = node(
        "nodes_context_windows", "ContextWindowsManualNode", 10, 4, "standard_static", 1, False, "pyramid", 2
    )
    channels, tokens = (16, 20) if kind == "flux" else (4, 77)
    prompts = [models.conditioning(patchers[kind], tokens, seed) for seed in (1, 2)]
    latent = torch.zeros(1, channels, 17, 9)
    wanted = sample_prompts(windows(patchers[kind]), *prompts, latent=latent)
    assert error(wanted, sample_prompts(patchers[kind], *prompts, latent=latent)) > 1e-3
    assert error(sample_prompts(windows(warm[kind]), *prompts, latent=latent), wanted) < CLOSE
    assert {(s["height"], s["state"]) for s in shapes()} == {(80, "regions")}


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_differential_diffusion(models, patchers, warm, strength):
    """A mask that opens step by step."""
    apply = node("nodes_differential_diffusion", "DifferentialDiffusion", strength)
    prompts = [models.conditioning(patchers["unet"], 77, seed) for seed in (1, 2)]
    given = {"latent": randn(1, 4, 9, 8), "noise_mask": torch.linspace(0, 1, 64 * 72).reshape(1, 1, 72, 64), "steps": 4}
    wanted = sample_prompts(apply(patchers["unet"]), *prompts, **given)
    assert error(wanted, sample_prompts(patchers["unet"], *prompts, **given)) > 1e-3
    assert error(sample_prompts(apply(warm["unet"]), *prompts, **given), wanted) < CLOSE
    assert {s["state"] for s in shapes()} == {"regions"}


def test_a_patch_added_after_a_run_acts_at_once(models, patchers, warm):
    """On the very clone that has run: what was decided in one run does not outlive it."""
    model, run = warm["unet"].clone(), RUNS["unet"]
    plain = models.sample(model, **run)
    model.set_model_attn2_replace(lambda q, k, v, options: v.mean(1, keepdim=True).expand_as(q), "middle", 0)
    wanted = patchers["unet"].clone()
    wanted.set_model_attn2_replace(lambda q, k, v, options: v.mean(1, keepdim=True).expand_as(q), "middle", 0)
    assert error(models.sample(model, **run), models.sample(wanted, **run)) < CLOSE
    assert error(models.sample(model, **run), plain) > 1e-4


@pytest.mark.parametrize("kind", ["unet", "flux"])
def test_a_hook_that_comes_in_mid_run(models, patchers, warm, kind):
    """A pack that hooks a layer in a wrapper of its own, when sampling has begun: from that step on it acts."""
    from comfy.patcher_extension import WrappersMP

    def hooking(model):
        calls, model = [], model.clone()
        layer = {"unet": "output_blocks.11.0.out_layers.3", "flux": "single_blocks.1.linear1"}[kind]
        module = model.model.diffusion_model.get_submodule(layer)

        def wrapper(executor, *args, **kwargs):
            calls.append(1)
            handle = module.register_forward_hook(lambda m, a, out: out * 1.5) if len(calls) > 1 else None
            try:
                return executor(*args, **kwargs)
            finally:
                if handle:
                    handle.remove()

        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another pack", wrapper)
        return model

    run = RUNS[kind] | {"steps": 4}
    wanted = models.sample(hooking(patchers[kind]), **run)
    assert error(wanted, models.sample(patchers[kind], **run)) > 1e-3
    assert error(models.sample(hooking(warm[kind]), **run), wanted) < CLOSE


# torch.compile by others ------------------------------------------------------------------------------------------

TINY = {
    "num_res_blocks": [1, 1],
    "channel_mult": (1, 2),
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1] * 4,
}
PARTS = {
    "unet": ["diffusion_model.middle_block.1.transformer_blocks.0", "diffusion_model.out"],
    "flux": ["diffusion_model.double_blocks.0", "diffusion_model.single_blocks.1"],
}


@pytest.fixture(scope="module")
def tiny(models, patchers):
    """Models that torch.compile traces in seconds."""
    return {"unet": models.unet("sd15", torch.float32, **SMALL_UNET | TINY), "flux": patchers["flux"]}


@pytest.mark.parametrize("parts", ["the whole model", "some blocks"])
@pytest.mark.parametrize("kind", ["unet", "flux"])
def test_torch_compile(models, tiny, kind, parts):
    """ComfyUI's TorchCompileModel (the whole model: ours steps aside), and other packs' use of its function."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    def compiling(model):
        if parts == "the whole model":
            return node("nodes_torch_compile", "TorchCompileModel", "eager")(model)
        model = model.clone()
        set_torch_compile_wrapper(model, "eager", keys=PARTS[kind])
        return model

    fast, plain = compiled(tiny[kind]), models.sample(tiny[kind], **RUNS[kind])
    for both in (compiling(fast), compiled(compiling(tiny[kind]))):
        assert error(models.sample(both, **RUNS[kind]), plain) < CLOSE
    if parts == "some blocks":
        assert {s["state"] for s in shapes()} == {"regions"} and "replaced" in shapes()[0]["reason"]
    else:
        assert shapes() == []
    assert error(models.sample(fast, **RUNS[kind]), plain) < CLOSE
    assert shapes()[-1]["state"] == "regions" and shapes()[-1]["reason"] == ""


def test_a_compiled_model_as_an_object_patch(models, tiny):
    """The older way: the diffusion model itself is exchanged for a compiled one."""
    for order in ("before", "after"):
        model = compiled(tiny["unet"]) if order == "before" else tiny["unet"].clone()
        model.add_object_patch("diffusion_model", torch.compile(model.model.diffusion_model, backend="eager"))
        model = compiled(model) if order == "after" else model
        assert error(models.sample(model, **RUNS["unet"]), models.sample(tiny["unet"], **RUNS["unet"])) < CLOSE
