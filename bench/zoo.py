"""The models that the benchmarks know by name: ComfyUI's own classes at full size, with random weights.

The configs are those that ComfyUI finds in the published checkpoints (``comfy.model_detection``).
"""

from typing import Any, NamedTuple

import comfy.model_patcher
import comfy.supported_models
import comfyui_version
import torch
from comfy.ldm.chroma.model import ChromaParams
from comfy.model_patcher import ModelPatcher

from bench import models


class Entry(NamedTuple):
    """A class of ``comfy.supported_models``, which an older ComfyUI may not have, and its config."""

    family: str
    config: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16


PREDICT2 = {  # of 2 B parameters
    "image_model": "cosmos_predict2", "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16,
    "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 2048,
    "concat_padding_mask": True, "crossattn_emb_channels": 1024, "pos_emb_cls": "rope3d",
    "pos_emb_learnable": True, "pos_emb_interpolation": "crop", "min_fps": 1, "max_fps": 30, "use_adaln_lora": True,
    "adaln_lora_dim": 256, "num_blocks": 28, "num_heads": 16, "extra_per_block_abs_pos_emb": False,
    "rope_h_extrapolation_ratio": 4.0, "rope_w_extrapolation_ratio": 4.0, "rope_t_extrapolation_ratio": 1.0,
}  # fmt: skip
ZOO = {
    "zimage": Entry("ZImage", {
        "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 3840, "cap_feat_dim": 2560, "n_layers": 30,
        "qk_norm": True, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
        "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0,
        "pad_tokens_multiple": 32,
    }),
    "qwen": Entry("QwenImage", {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60}),
    "sd35l": Entry("SD3", {
        "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 38, "input_size": None,
        "adm_in_channels": 2048, "num_patches": 192 * 192, "pos_embed_max_size": 192, "qk_norm": "rms",
        "pos_embed_scaling_factor": None, "x_block_self_attn_layers": [],
        "context_embedder_config": {
            "target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 2432},
        },
    }),
    "chroma": Entry("Chroma", {
        "image_model": "chroma", "in_channels": 64, "out_channels": 64, "patch_size": 2, "context_in_dim": 4096,
        "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19, "depth_single_blocks": 38,
        "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True, "in_dim": 64, "out_dim": 3072, "hidden_dim": 5120,
        "n_layers": 5,
    }),
    "wan": Entry("WAN21_T2V", {
        "image_model": "wan2.1", "model_type": "t2v", "dim": 5120, "out_dim": 16, "num_heads": 40, "ffn_dim": 13824,
        "num_layers": 40, "patch_size": (1, 2, 2), "freq_dim": 256, "window_size": (-1, -1), "qk_norm": True,
        "cross_attn_norm": True, "eps": 1e-6, "in_dim": 16,
    }),
    "cosmos": Entry("CosmosT2IPredict2", PREDICT2),
    "anima": Entry("Anima", PREDICT2 | {"image_model": "anima"}),
    "ltxv": Entry("LTXV", {
        "image_model": "ltxv", "num_layers": 48, "attention_head_dim": 128, "num_attention_heads": 32,
        "cross_attention_dim": 4096, "caption_channels": 4096, "in_channels": 128,
    }),
    "ltx2": Entry("LTXAV", {
        "image_model": "ltxav", "num_layers": 48, "attention_head_dim": 128, "num_attention_heads": 32,
        "cross_attention_dim": 4096, "caption_channels": 3840, "in_channels": 128,
    }),
    "klein": Entry("Flux2", {  # of 9 B parameters
        "image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None,
        "context_in_dim": 12288, "hidden_size": 4096, "mlp_ratio": 3.0, "num_heads": 32, "depth": 8,
        "depth_single_blocks": 24, "axes_dim": [32, 32, 32, 32], "theta": 2000, "qkv_bias": False, "ops_bias": False,
        "global_modulation": True, "mlp_silu_act": True, "default_ref_method": "index", "ref_index_scale": 10.0,
        "guidance_embed": False,
    }),
    "krea": Entry("Krea2", {
        "image_model": "krea2", "features": 6144, "channels": 16, "patch": 2, "layers": 28, "heads": 48, "kvheads": 12,
        "txtlayers": 12, "txtdim": 2560,
    }),
    "minimax": Entry("MiniMaxH3", {"image_model": "minimax_h3", "num_layers": 20}),  # of 50, which take 64 GB
}  # fmt: skip
if "vec_in_dim" in ChromaParams.__dataclass_fields__:  # newer than ComfyUI 0.3.75
    ZOO["chroma"].config.update(txt_ids_dims=[], vec_in_dim=None)
    ZOO["klein"].config.update(txt_ids_dims=[3])
FORMS = {  # of weights
    "int8": "int8_tensorwise", "convrot": "int8_convrot", "fp8": "float8_e4m3fn", "mxfp8": "mxfp8", "nvfp4": "nvfp4",
    "w4a4": "convrot_w4a4", "w4a8": "asym_w4a8_int8",
}  # fmt: skip
NAMES = (*models.UNETS, "flux", *ZOO)


class NotThere(RuntimeError):
    """The ComfyUI at hand is too old for a model."""


def known(name: str) -> bool:
    """Whether ``name`` is a model, or a model and a form of its weights: "zimage-int8"."""
    model, _, form = name.partition("-")
    return model in NAMES and (not form or form in FORMS)


def make(name: str, dtype: torch.dtype | None = None, **changes: Any) -> ModelPatcher:
    """The model ``name`` on ComfyUI's device; ``changes`` to its config make a smaller one. Raises NotThere.

    name: one of NAMES, or with a form of its weights ("zimage-int8"), which needs comfy-kitchen. dtype: the one that
    the model is used in, if not given.
    """
    name, _, form = name.partition("-")
    if form:
        return _quantised(make(name, dtype, **changes), form)
    given = {} if dtype is None else {"dtype": dtype}
    if name in models.UNETS:
        return models.unet(name, **given, **changes)
    if name == "flux":
        return models.flux(**given, **changes)
    entry = ZOO[name]
    family = getattr(comfy.supported_models, entry.family, None)
    if family is None:
        raise NotThere(f"ComfyUI {comfyui_version.__version__} has no {entry.family}; {name} needs a newer one")
    return models.random_model(family(entry.config | changes), dtype or entry.dtype)


def _quantised(plain: ModelPatcher, form: str) -> ModelPatcher:
    """The same model with the weights of its large linear layers in ``form``."""
    from tools.architectures import quantised

    own = plain.model.model_config
    config = type(own)(own.unet_config)
    # A patcher that copies weights does so while it samples, in inference mode, and then takes only those made there.
    with torch.inference_mode(getattr(comfy.model_patcher, "CoreModelPatcher", ModelPatcher) is ModelPatcher):
        model = quantised.of_config(
            config, plain.model.diffusion_model, FORMS[form], plain.model.get_dtype(), plain.load_device
        )
    return ModelPatcher(model, load_device=plain.load_device, offload_device=plain.offload_device)
