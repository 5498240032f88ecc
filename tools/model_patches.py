"""ComfyUI's nodes that hang a network into a transformer, with tiny networks: each a function of a model."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import comfy.model_patcher
import comfy.ops
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from bench.models import randomise
from tools.comfy_nodes import extras, node
from tools.driving import randn

Model = Any  # comfy.model_patcher.ModelPatcher
MANUAL = comfy.ops.manual_cast
PICTURE = randn(1, 128, 128, 3, seed=4).sigmoid()  # [B, H, W, C]


class Encoder:
    """In the place of a VAE, of which these nodes want latents of the right size. frames: it encodes a video."""

    def __init__(self, model: Model, dimensions: int = 4, frames: bool = False) -> None:
        self._device, self._dimensions, self._frames = model.load_device, dimensions, frames

    def encode(self, picture: Tensor) -> Tensor:
        """[B, 16, (T,) H / 8, W / 8] of a picture [B, H, W, 3], or of a video, whose first dimension is time."""
        time = [(len(picture) - 1) // 4 + 1] if self._frames else [1] * (self._dimensions - 4)
        rows = 1 if self._frames else len(picture)
        return randn(rows, 16, *time, picture.shape[1] // 8, picture.shape[2] // 8, seed=3).to(self._device)

    def spacial_compression_encode(self) -> int:
        """Pixels per latent pixel."""
        return 8

    def temporal_compression_decode(self) -> int:
        """Frames per latent frame."""
        return 4


def _hung(model: Model, network: nn.Module) -> ModelPatcher:
    """A network of a node's, with random weights, beside the model."""
    randomise(network.eval(), 3)
    kind = getattr(comfy.model_patcher, "CoreModelPatcher", ModelPatcher)  # under DynamicVRAM it maps weights in
    return kind(network.to(model.model.get_dtype()), model.load_device, torch.device("cpu"))


def _patches() -> Any:
    return extras("nodes_model_patch")


def diffsynth(model: Model) -> Model:
    """QwenImageDiffsynthControlnet: a block's network adds to the tokens of the picture, in place."""
    inner = model.model.diffusion_model
    network = _patches().QwenImageBlockWiseControlNet(
        len(inner.transformer_blocks), dim=inner.img_in.out_features, operations=MANUAL
    )
    apply = _patches().QwenImageDiffsynthControlnet().diffsynth_controlnet
    return apply(model, _hung(model, network), Encoder(model, 5), PICTURE, 0.8)[0]


def fun(**settings: Any) -> Callable[[Model], Model]:
    """ZImageFunControlnet: it keeps its own tokens from block to block, and writes into a part of the model's."""

    def apply(model: Model) -> Model:
        control, inner = importlib.import_module("comfy.ldm.lumina.controlnet"), model.model.diffusion_model
        network = control.ZImage_Control(
            dim=inner.dim, n_heads=inner.n_heads, n_kv_heads=inner.n_heads, operations=MANUAL, **settings
        )
        chosen = _patches().ZImageFunControlnet().diffsynth_controlnet
        return chosen(model, _hung(model, network), Encoder(model), PICTURE, 0.8)[0]

    return apply


def uni3c(model: Model) -> Model:
    """WanUni3CControlnetApply, for a part of the noise levels."""
    wan, inner = importlib.import_module("comfy.ldm.wan.uni3c"), model.model.diffusion_model
    network = wan.WanUni3CControlnet(
        in_channels=36, conv_out_dim=64, dim=64, ffn_dim=128, num_heads=2, num_layers=len(inner.blocks),
        time_embed_dim=inner.dim, out_proj_dim=inner.dim, add_channels=7, mid_channels=16,
        device=torch.device("cpu"), dtype=torch.float32, operations=MANUAL,
    )  # fmt: skip
    video = randn(5, 128, 128, 3, seed=9).sigmoid()
    apply = _patches().WanUni3CControlnetApply().apply_patch
    return apply(model, _hung(model, network), Encoder(model, frames=True), video, 1.0, 0.0, 0.6)[0]


def lllite(start: float = 0.0, end: float = 1.0) -> Callable[[Model], Model]:
    """AnimaLLLiteApply: three patches, of which the first leaves a tensor among the options for the others."""

    def apply(model: Model) -> Model:
        anima, inner = importlib.import_module("comfy.ldm.anima.lllite"), model.model.diffusion_model
        conditioning = anima.AnimaLLLiteConditioning(3, 32, 16, 1, (), operations=MANUAL)
        layer = anima.AnimaLLLiteModule(inner.model_channels, 16, 8, operations=MANUAL)
        layers = "self_attn_q_proj", "self_attn_k_proj", "self_attn_v_proj", "cross_attn_q_proj", "mlp_layer1"
        names = [f"lllite_dit_blocks_{number}_{name}" for number in range(len(inner.blocks)) for name in layers]
        parts = {"lllite_conditioning1": conditioning} | dict.fromkeys(names, layer)
        state = {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.state_dict().items()}
        network = anima.AnimaLLLite(state, {}, operations=MANUAL)
        return _patches().AnimaLLLiteApply().apply_patch(model, _hung(model, network), PICTURE, 1.0, start, end)[0]

    return apply


def uso(model: Model) -> Model:
    """USOStyleReference: tokens of a picture's style before those of the text."""
    network = _patches().SigLIPMultiFeatProjModel(9, 4, 24, model.model.diffusion_model.hidden_size, operations=MANUAL)
    seen = [randn(1, 9, 24, seed=seed) for seed in range(20)]
    vision = SimpleNamespace(all_hidden_states=torch.stack(seen, dim=1), penultimate_hidden_states=seen[-1])
    return _patches().USOStyleReference().apply_patch(model, _hung(model, network), vision)[0]


nag = node("nodes_nag", "NAGuidance", 5.0, 0.5, 1.5)
skipped = node("nodes_slg", "SkipLayerGuidanceDiT", 3.0, 0.0, 1.0, "1", "0, 1", 0.2)
VIDEO = {"frames": 5, "cfg": 3.0}
NODES = {  # by name: (the kind of model in tools.architectures, the node, its sampling run)
    "QwenImageDiffsynthControlnet": ("QwenImage", diffsynth, {"cfg": 3.0}),
    "ZImageFunControlnet": ("ZImage", fun(), {}),
    "ZImageFunControlnet 2": ("ZImage", fun(n_control_layers=15, additional_in_dim=17, refiner_control=True), {}),
    "WanUni3CControlnetApply": ("WAN21_T2V", uni3c, VIDEO),
    "AnimaLLLiteApply": ("Anima", lllite(), {"cfg": 3.0}),
    "AnimaLLLiteApply, a range": ("Anima", lllite(0.3, 0.8), {"cfg": 3.0}),
    "USOStyleReference": ("Flux", uso, {}),
    "NAGuidance": ("Flux", nag, {"cfg": 3.0}),
    "NAGuidance, UNet": ("SD15", nag, {"cfg": 3.0}),
    "SkipLayerGuidanceDiT": ("QwenImage", skipped, {"cfg": 3.0}),
    "SkipLayerGuidanceDiT, Wan": ("WAN21_T2V", skipped, VIDEO),
    "LTXVSpatioTemporalGuidance": ("LTXAV", node("nodes_lt", "LTXVSpatioTemporalGuidance", 1.0, "1"), VIDEO),
    "LTXVModalityGuidance": ("LTXAV", node("nodes_lt", "LTXVModalityGuidance", 3.0), VIDEO),
    "CFGOverride": ("Flux", node("nodes_custom_sampler", "CFGOverride", 3.0, 0.0, 0.5), {"cfg": 2.0}),
}
