"""Builds the demo's models out of ComfyUI's own classes: a UNet (`UNetModel`) and a transformer (`NextDiT`), each in a
`BaseModel`, and `AutoencoderKL` in a `VAE`.

One file holds all but the transformer: `model.diffusion_model.*`, `first_stage_model.*` and `text.*` in fp16, and in
its metadata the configuration, the vocabulary and the prompts that it was trained on. The transformer has a file of its
own, and shares autoencoder and text encoder with the UNet. ComfyUI must be importable.
"""

from __future__ import annotations

import json
from pathlib import Path

import comfy.latent_formats
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models
import comfy.supported_models_base
import torch
from safetensors import safe_open

from .text import TextEncoder

FILE = Path(__file__).with_name("emoji.safetensors")
TRANSFORMER_FILE = Path(__file__).with_name("emoji_transformer.safetensors")
UNET, TRANSFORMER = "unet", "transformer"
ARCHITECTURES = (UNET, TRANSFORMER)
MODEL_PREFIX, VAE_PREFIX, TEXT_PREFIX = "model.diffusion_model.", "first_stage_model.", "text."
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CONTEXT_DIM = 96

UNET_CONFIG = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 64,
    "channel_mult": [1, 1, 2],
    "num_res_blocks": [1, 1, 1],
    "use_spatial_transformer": True,
    "context_dim": CONTEXT_DIM,
    "use_linear_in_transformer": False,
    "legacy": False,
    # One entry a ResBlock, from the top down; the decoder's list is read from its end, deepest level first.
    "transformer_depth": [0, 1, 1],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 1, 1, 0, 1],
    "adm_in_channels": None,
    "use_temporal_attention": False,
}
TRANSFORMER_CONFIG = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 4,
    "dim": 160,
    "n_layers": 14,
    "n_refiner_layers": 1,
    "n_heads": 5,
    "n_kv_heads": 5,
    "multiple_of": 32,
    "ffn_dim_multiplier": 2.0,
    "qk_norm": True,
    "cap_feat_dim": CONTEXT_DIM,
    "axes_dims": [8, 12, 12],
    "axes_lens": [256, 64, 64],
    "time_scale": 1000.0,
}
VAE_CONFIG = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
}


class EmojiLatent(comfy.latent_formats.LatentFormat):
    """Latents whose mean is 0 in each channel; `scale_factor` is one over their measured standard deviation."""

    def __init__(
        self,
        scale_factor: float = 1.0,
        rgb_factors: list[list[float]] | None = None,
        rgb_bias: list[float] | None = None,
    ):
        self.scale_factor = scale_factor
        self.latent_rgb_factors = rgb_factors
        self.latent_rgb_factors_bias = rgb_bias


class EmojiSD(comfy.supported_models_base.BASE):
    """What ComfyUI needs to know to build the model: an SD 1.5 in miniature that predicts v."""

    unet_extra_config = {"num_heads": 4, "num_head_channels": -1}
    latent_format = EmojiLatent
    memory_usage_factor = 1.0

    def model_type(self, state_dict: dict, prefix: str = "") -> comfy.model_base.ModelType:
        return comfy.model_base.ModelType.V_PREDICTION


class EmojiTransformer(comfy.supported_models.Lumina2):
    """A Lumina 2 in miniature: ComfyUI's detection knows the two released sizes by their width, so this says it all."""

    sampling_settings = {"multiplier": 1.0, "shift": 2.0}
    latent_format = EmojiLatent
    memory_usage_factor = 1.0


SETTINGS = {UNET: EmojiSD, TRANSFORMER: EmojiTransformer}


def build(
    architecture: str,
    config: dict,
    latent: dict,
    dtype: torch.dtype = torch.float32,
    manual_cast: torch.dtype | None = None,
) -> comfy.model_base.BaseModel:
    """An empty model on the CPU: ComfyUI's layers come without initial weights."""
    settings = SETTINGS[architecture](config)
    settings.latent_format = EmojiLatent(**latent)
    settings.set_inference_dtype(dtype, manual_cast)
    return settings.get_model({}, "", device="cpu")


def read_file(path: Path = FILE) -> tuple[dict[str, torch.Tensor], dict]:
    """All tensors of the file, and its metadata with the JSON values decoded."""
    with safe_open(str(path), framework="pt") as file:
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
        return {key: file.get_tensor(key) for key in file.keys()}, metadata


def under(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries below a prefix, without it."""
    return {key[len(prefix) :]: value for key, value in weights.items() if key.startswith(prefix)}


def _dtypes(
    architecture: str, weights: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype | None]:
    """Weight dtype and cast dtype: ComfyUI's choice for this device, or the one asked for."""
    management, supported = comfy.model_management, SETTINGS[architecture].supported_inference_dtypes
    if dtype is None:
        count = sum(w.numel() for w in weights.values())
        dtype = management.unet_dtype(model_params=count, supported_dtypes=supported)
    return dtype, management.unet_manual_cast(dtype, management.get_torch_device(), supported)


def load_model(
    architecture: str, weights: dict[str, torch.Tensor], metadata: dict, dtype: torch.dtype | None = None
) -> comfy.model_patcher.ModelPatcher:
    """The UNet or the transformer as ComfyUI's MODEL."""
    own = under(weights, MODEL_PREFIX)
    model = build(architecture, metadata[architecture], metadata["latent"], *_dtypes(architecture, own, dtype))
    model.load_model_weights(own)
    model.requires_grad_(False).eval()
    management = comfy.model_management
    offload = management.unet_offload_device()
    return comfy.model_patcher.ModelPatcher(model.to(offload), management.get_torch_device(), offload)


def load_again(path: str, architecture: str, dtype: torch.dtype | None) -> comfy.model_patcher.ModelPatcher:
    """What ComfyUI calls for a second copy of a MODEL (on another GPU, say). It also tells which file that is from."""
    return load_model(architecture, *read_file(Path(path)), dtype)


def load_vae_again(path: str, dtype: torch.dtype | None) -> comfy.model_patcher.ModelPatcher:
    """The same of a VAE."""
    return load_vae(*read_file(Path(path)), dtype).patcher


def load_vae(weights: dict[str, torch.Tensor], metadata: dict, dtype: torch.dtype | None = None) -> comfy.sd.VAE:
    """The autoencoder as ComfyUI's VAE."""
    config = {"params": {"ddconfig": metadata["vae"], "embed_dim": metadata["vae"]["z_channels"]}}
    vae = comfy.sd.VAE(sd=under(weights, VAE_PREFIX), config=config, dtype=dtype)
    vae.first_stage_model.requires_grad_(False)
    return vae


def load_text(weights: dict[str, torch.Tensor], metadata: dict) -> TextEncoder:
    """The text encoder, in fp32 on the CPU: a table look-up needs no device."""
    tables = {key: value.float() for key, value in under(weights, TEXT_PREFIX).items()}
    return TextEncoder(metadata["vocab"], tables["token.weight"], tables["position.weight"], metadata["prompts"])


def load(
    dtype: torch.dtype | str | None = None, architecture: str = UNET, path: Path | None = None
) -> tuple[comfy.model_patcher.ModelPatcher, comfy.sd.VAE, TextEncoder]:
    """MODEL, VAE and text encoder.

    dtype: a torch dtype, "fp32", "fp16" or "bf16"; None or "auto" leaves it to ComfyUI. path: another file with the
    weights of the architecture.
    """
    if isinstance(dtype, str):
        dtype = DTYPES.get(dtype)
    shared_path = path if path and architecture == UNET else FILE
    own_path = shared_path if architecture == UNET else path or TRANSFORMER_FILE
    shared = read_file(shared_path)
    own = shared if architecture == UNET else read_file(own_path)
    patcher, vae = load_model(architecture, *own, dtype), load_vae(*shared, dtype)
    patcher.cached_patcher_init = load_again, (str(own_path), architecture, dtype)
    vae.patcher.cached_patcher_init = load_vae_again, (str(shared_path), dtype)
    return patcher, vae, load_text(*shared)


def encode(text_encoder: TextEncoder, text: str) -> list:
    """A prompt as ComfyUI's CONDITIONING; the empty prompt is the unconditional one."""
    context = text_encoder.encode(text)
    return [[context, {"pooled_output": context.mean(dim=1)}]]
