"""ComfyUI's nodes that patch a MODEL, each as a function of the model, for tests that put them next to ours."""

import importlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.driving import randn

Model = Any  # comfy.model_patcher.ModelPatcher
Apply = Callable[[Model], Model]
TAPED, CALLED = "written down", "called"  # what becomes of a node's patches; those without patches: written down


def node(module: str, name: str, *args: Any, **kwargs: Any) -> Apply:
    """ComfyUI's node applied to a model with these other inputs."""

    def apply(model: Model) -> Model:
        cls = getattr(extras(module), name)
        if hasattr(cls, "execute"):
            out = cls.execute(model, *args, **defaults(cls, len(args)) | kwargs)
            return (out if isinstance(out, tuple) else out.args)[0]  # HyperTile gives a plain tuple
        return getattr(cls(), cls.FUNCTION)(model, *args, **kwargs)[0]

    return apply


def torch_compiled(model: Model, backend: str, parts: tuple[str, ...] = ()) -> Model:
    """By ComfyUI's TorchCompileModel; parts of it by its function, as other packs use it."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    if not parts:
        return node("nodes_torch_compile", "TorchCompileModel", backend)(model)
    model = model.clone()
    set_torch_compile_wrapper(model, backend, keys=parts)
    return model


def first_output(name: str, *args: Any, **kwargs: Any) -> Any:
    """Of one of ComfyUI's own nodes, in inference mode as its executor runs it."""
    import nodes

    made = getattr(nodes, name)
    with torch.inference_mode():
        return getattr(made(), made.FUNCTION)(*args, **kwargs)[0]


def extras(module: str) -> types.ModuleType:
    """A file of ComfyUI's nodes. Of two that import one another, newer ones bear only one order."""
    importlib.import_module("comfy_extras.nodes_post_processing")
    return importlib.import_module(f"comfy_extras.{module}")


def defaults(cls: Any, given: int) -> dict[str, Any]:
    """What a node's inputs after the model and ``given`` others begin with: newer ComfyUI has more of them."""
    inputs = cls.define_schema().inputs[given + 1 :] if hasattr(cls, "define_schema") else ()
    return {each.id: each.default for each in inputs if getattr(each, "default", None) is not None}


def perp_neg(model: Model) -> Model:
    """PerpNeg takes an empty prompt."""
    from bench.models import conditioning

    tokens = 77 if model.model.latent_format.latent_channels == 4 else 20
    return node("nodes_perpneg", "PerpNeg", conditioning(model, tokens, 3), 0.7)(model)


def sharpen(model: Model) -> Model:
    """LatentApplyOperationCFG takes the latent operation of another node."""
    operation = extras("nodes_latent").LatentOperationSharpen.execute(5, 1.0, 0.2).args[0]
    return node("nodes_latent", "LatentApplyOperationCFG", operation)(model)


def hypernetwork(model: Model) -> Model:
    """HypernetworkLoader on weights of its own."""
    import folder_paths
    from comfy_extras.nodes_hypernetwork import HypernetworkLoader

    folder = folder_paths.get_folder_paths("hypernetworks")[0]
    state = {"layer_structure": [1, 1], "activation_func": "linear"}
    for dim in (64, 128):
        state[dim] = [
            {"linear.0.weight": randn(dim, dim, seed=s) * 0.1, "linear.0.bias": randn(dim, seed=s)} for s in (1, 2)
        ]
    path = Path(folder) / "anyshape_test.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    try:
        return HypernetworkLoader.execute(model, path.name, 1.0).args[0]
    finally:
        path.unlink()


def uso(model: Model) -> Model:
    """USOStyleReference with a small style projector of its own class."""
    import comfy.ops
    from comfy.model_patcher import ModelPatcher
    from comfy_extras.nodes_model_patch import SigLIPMultiFeatProjModel, USOStyleReference

    from bench.models import randomise

    device, width = model.load_device, model.model.model_config.unet_config["hidden_size"]
    projector = SigLIPMultiFeatProjModel(7, 5, 24, width, operations=comfy.ops.manual_cast)
    randomise(projector, 3)
    vision = types.SimpleNamespace(
        all_hidden_states=randn(1, 21, 7, 24, seed=1), penultimate_hidden_states=randn(1, 7, 24, seed=2)
    )
    return USOStyleReference().apply_patch(
        model, ModelPatcher(projector.to(device), device, torch.device("cpu")), vision
    )[0]


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
    "unet": {name: (apply, TAPED) for name, apply in GUIDANCE.items()}
    | {
        "ModelSamplingDiscrete v, zsnr": (node(SAMPLING, "ModelSamplingDiscrete", "v_prediction", True), TAPED),
        "ModelSamplingDiscrete lcm": (node(SAMPLING, "ModelSamplingDiscrete", "lcm", False), TAPED),
        "ModelSamplingContinuousEDM": (
            node(SAMPLING, "ModelSamplingContinuousEDM", "v_prediction", 90.0, 0.01), TAPED,
        ),  # fmt: skip
        "ModelSamplingContinuousV": (node(SAMPLING, "ModelSamplingContinuousV", "v_prediction", 90.0, 0.01), TAPED),
        "ModelComputeDtype": (node(SAMPLING, "ModelComputeDtype", "fp32"), TAPED),
        "SelfAttentionGuidance": (node("nodes_sag", "SelfAttentionGuidance", 0.8, 2.0), CALLED),
        "PerturbedAttentionGuidance": (node("nodes_pag", "PerturbedAttentionGuidance", 3.0), TAPED),
        "HyperTile": (node("nodes_hypertile", "HyperTile", 32, 2, 1, True), CALLED),
        "TomePatchModel": (node("nodes_tomesd", "TomePatchModel", 0.4), CALLED),
        "HypernetworkLoader": (hypernetwork, TAPED),
        "PatchModelAddDownscale": (
            node("nodes_model_downscale", "PatchModelAddDownscale", 3, 2.0, 0.0, 0.5, True, "bicubic", "bicubic"),
            TAPED,
        ),
        "PatchModelAddDownscale before the skip": (
            node("nodes_model_downscale", "PatchModelAddDownscale", 3, 1.5, 0.0, 0.5, False, "bislerp", "area"), CALLED,
        ),
        "FreeU_V2": (node("nodes_freelunch", "FreeU_V2", 1.3, 1.4, 0.9, 0.2), TAPED),
    },
    "flux": {name: (apply, TAPED) for name, apply in GUIDANCE.items()}
    | {
        "ModelSamplingFlux": (node(SAMPLING, "ModelSamplingFlux", 2.0, 0.5, 1024, 1024), TAPED),
        "ModelSamplingSD3": (node(SAMPLING, "ModelSamplingSD3", 3.0), TAPED),
        "ModelSamplingAuraFlow": (node(SAMPLING, "ModelSamplingAuraFlow", 1.7), TAPED),
        "ModelComputeDtype": (node(SAMPLING, "ModelComputeDtype", "fp32"), TAPED),
        "ScaleROPE": (node("nodes_rope", "ScaleROPE", 1.5, 2.0, 0.5, 3.0, 1.0, 1.0), TAPED),
        "SkipLayerGuidanceDiT": (node("nodes_slg", "SkipLayerGuidanceDiT", 3.0, 0.0, 1.0, "1", "0, 2", 0.2), TAPED),
        "SkipLayerGuidanceDiTSimple": (node("nodes_slg", "SkipLayerGuidanceDiTSimple", 0.0, 1.0, "1", "0"), TAPED),
        "SkipLayerGuidanceSD3": (node("nodes_sd3", "SkipLayerGuidanceSD3", "1", 3.0, 0.0, 1.0), TAPED),
        "USOStyleReference": (uso, TAPED),
        "PerturbedAttentionGuidance": (node("nodes_pag", "PerturbedAttentionGuidance", 3.0), TAPED),
    },
}  # fmt: skip
OWN_RUNS = {  # what a node needs to do anything
    "LazyCache": {"steps": 5}, "EasyCache": {"steps": 5}, "SelfAttentionGuidance": {"height": 128},
    "USOStyleReference": {"cfg": 1.0},
}  # fmt: skip
# PAG replaces a block's attention that Flux has not; a model in fp32 is computed in fp32 anyway, but cast at each call
WITHOUT_EFFECT = {("flux", "PerturbedAttentionGuidance"), ("unet", "ModelComputeDtype"), ("flux", "ModelComputeDtype")}
