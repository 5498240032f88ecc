"""Models of pictures: UNets, Stable Cascade and the diffusion transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tools.architectures.table import Architecture, Draw

UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "use_spatial_transformer": True, "legacy": False,
    "model_channels": 32, "num_res_blocks": [1, 1], "channel_mult": (1, 2), "context_dim": 24,
    "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1,
    "use_linear_in_transformer": True, "adm_in_channels": None, "num_heads": -1, "num_head_channels": 16,
    "use_temporal_attention": False,
}  # fmt: skip
CONV_PROJECTION = {"use_linear_in_transformer": False, "num_heads": 2, "num_head_channels": -1}
POOLED = {"adm_in_channels": 48, "num_classes": "sequential"}
DEEP = {"transformer_depth": [0, 2], "transformer_depth_output": [0, 0, 2, 2], "transformer_depth_middle": 2}
FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 24,
    "context_in_dim": 40, "hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [8, 12, 12], "theta": 10000, "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
FLUX2 = FLUX | {
    "image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None,
    "axes_dim": [8, 8, 8, 8], "theta": 2000, "mlp_ratio": 3.0, "qkv_bias": False, "ops_bias": False,
    "global_modulation": True, "mlp_silu_act": True, "default_ref_method": "index", "ref_index_scale": 10.0,
}  # fmt: skip
CHROMA = {
    "image_model": "chroma", "in_channels": 64, "out_channels": 64, "patch_size": 2, "context_in_dim": 40,
    "hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [8, 12, 12], "theta": 10000, "qkv_bias": True, "in_dim": 64, "out_dim": 64, "hidden_dim": 48,
    "n_layers": 2,
}  # fmt: skip
RADIANCE = CHROMA | {
    "image_model": "chroma_radiance", "in_channels": 3, "out_channels": 3, "patch_size": 4, "nerf_hidden_size": 16,
    "nerf_mlp_ratio": 2, "nerf_depth": 2, "nerf_max_freqs": 4, "nerf_tile_size": 512, "nerf_final_head_type": "conv",
    "nerf_embedder_dtype": torch.float32,
}  # fmt: skip
SD3 = {
    "in_channels": 16, "out_channels": 16, "patch_size": 2, "depth": 2, "input_size": None, "adm_in_channels": 24,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 40, "out_features": 128}},
    "num_patches": 1600, "pos_embed_max_size": 40, "qk_norm": "rms", "pos_embed_scaling_factor": None,
    "x_block_self_attn_layers": [],
}  # fmt: skip
PIXART = {
    "image_model": "pixart_alpha", "num_heads": 2, "patch_size": 2, "hidden_size": 48, "in_channels": 4, "depth": 2,
    "mlp_ratio": 2.0, "caption_channels": 40, "model_max_length": 40, "input_size": 64, "pe_interpolation": 1,
    "micro_condition": True,
}  # fmt: skip
HYDIT = {
    "image_model": "hydit", "depth": 4, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2.0, "text_states_dim": 24,
    "text_states_dim_t5": 40,
}  # fmt: skip
LUMINA2 = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 96, "cap_feat_dim": 40, "n_layers": 2,
    "n_refiner_layers": 1, "qk_norm": True, "n_heads": 4, "n_kv_heads": 2, "axes_dims": [8, 8, 8],
    "axes_lens": [64, 64, 64], "rope_theta": 10000.0, "ffn_dim_multiplier": 2.0, "multiple_of": 32,
}  # fmt: skip
ZIMAGE = LUMINA2 | {
    "dim": 256, "n_heads": 8, "n_kv_heads": 8, "axes_dims": [8, 12, 12], "rope_theta": 256.0,
    "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 8,
}  # fmt: skip
CASCADE_C = {
    "stable_cascade_stage": "c", "c_r": 16, "c_cond": 32, "c_hidden": [32, 32], "nhead": [2, 2],
    "blocks": [[1, 1], [1, 1]], "c_clip_text": 24, "c_clip_text_pooled": 24, "c_clip_img": 24, "c_clip_seq": 2,
}  # fmt: skip
CASCADE_B = {
    "stable_cascade_stage": "b", "c_r": 16, "c_cond": 32, "c_hidden": [16, 16, 32, 32], "nhead": [-1, -1, 2, 2],
    "blocks": [[1, 1, 1, 1], [1, 1, 1, 1]], "block_repeat": [[1, 1, 1, 1], [2, 2, 1, 1]], "c_clip": 24, "c_clip_seq": 2,
}  # fmt: skip
HIDREAM = {
    "image_model": "hidream", "attention_head_dim": 32, "axes_dims_rope": [16, 8, 8], "caption_channels": [40, 40],
    "max_resolution": [32, 32], "in_channels": 16, "out_channels": 16, "llama_layers": [0, 1, 1, 1],
    "num_attention_heads": 2, "num_routed_experts": 4, "num_activated_experts": 2, "num_layers": 2,
    "num_single_layers": 2, "patch_size": 2, "text_emb_dim": 24,
}  # fmt: skip
OMNIGEN2 = {
    "image_model": "omnigen2", "axes_dim_rope": [8, 8, 8], "axes_lens": [128, 64, 64], "ffn_dim_multiplier": None,
    "hidden_size": 96, "in_channels": 16, "multiple_of": 32, "norm_eps": 1e-5, "num_attention_heads": 4,
    "num_kv_heads": 2, "num_layers": 2, "num_refiner_layers": 1, "out_channels": None, "patch_size": 2,
    "text_feat_dim": 40, "timestep_scale": 1000.0,
}  # fmt: skip
QWEN = {
    "image_model": "qwen_image", "in_channels": 64, "out_channels": 16, "patch_size": 2, "num_layers": 2,
    "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 40, "axes_dims_rope": (8, 12, 12),
}  # fmt: skip
AURA = {
    "dim": 64, "n_layers": 3, "n_double_layers": 1, "n_heads": 2, "global_conddim": 64, "cond_seq_dim": 40,
    "max_seq": 1600,
}  # fmt: skip
# What ComfyUIs after 0.3.75 ask for besides.
NEWER_FLUX = {"txt_ids_dims": []}
NEWER_FLUX2 = {"txt_ids_dims": [3]}
NEWER_CHROMA = {"txt_ids_dims": [], "vec_in_dim": None}
NEWER_RADIANCE = NEWER_CHROMA | {"use_x0": False, "use_sequential_txt_ids": False}


def reference(draw: Draw) -> list[Tensor]:
    """A picture to edit, of a size of its own."""
    return [draw.normal(draw.batch, 16, 12, 10)]


def _projection(config: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        "cc_projection.weight": torch.zeros(config["context_dim"], config["context_dim"] + 4),
        "cc_projection.bias": torch.zeros(config["context_dim"]),
    }


def _hydit(draw: Draw) -> dict[str, Any]:
    return {
        "context": draw.prompt(draw.config["text_states_dim"], 77),
        "text_embedding_mask": draw.mask(77),
        "encoder_hidden_states_t5": draw.prompt(draw.config["text_states_dim_t5"], 256),
        "text_embedding_mask_t5": draw.mask(256),
        "image_meta_size": draw.uniform(256.0, 1024.0, draw.batch, 6).to(draw.dtype),
    }


HYDIT_CONDITIONS = {
    name: lambda draw, name=name: _hydit(draw)[name]
    for name in (
        "context", "text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5", "image_meta_size",
    )
}  # fmt: skip
TOKEN_COUNT = {"num_tokens": lambda draw: draw.tokens}

UNETS = (
    Architecture("SD15", 4, UNET | CONV_PROJECTION),
    Architecture("SD20", 4, UNET),
    Architecture("SD21UnclipL", 4, UNET | POOLED),
    Architecture("SD21UnclipH", 4, UNET | POOLED),
    Architecture(
        "SDXLRefiner", 4, UNET | POOLED | {"transformer_depth": [0, 1], "transformer_depth_output": [0, 0, 1, 1]},
    ),
    Architecture("SDXL", 4, UNET | POOLED | DEEP),
    Architecture("SSD1B", 4, UNET | POOLED | DEEP),
    Architecture("Segmind_Vega", 4, UNET | POOLED | {"transformer_depth_middle": -1}),
    Architecture("KOALA_700M", 4, UNET | POOLED | DEEP | {"transformer_depth_middle": -2}),
    Architecture("KOALA_1B", 4, UNET | POOLED | DEEP),
    Architecture("LotusD", 4, UNET | {"adm_in_channels": 4, "num_classes": "sequential"}),
    Architecture("Stable_Zero123", 4, UNET | CONV_PROJECTION | {"in_channels": 8}, concat=4, state=_projection),
    Architecture("SD15_instructpix2pix", 4, UNET | CONV_PROJECTION | {"in_channels": 8}, concat=4),
    Architecture("SDXL_instructpix2pix", 4, UNET | POOLED | {"in_channels": 8}, concat=4),
    Architecture(
        "SD_X4Upscaler", 4,
        UNET | {"in_channels": 7, "num_classes": 50, "num_heads": 2, "num_head_channels": -1,
                "disable_self_attentions": [True, False]},
        concat=3, conditions={"y": lambda draw: draw.integers(50, draw.batch)},
    ),
)  # fmt: skip
CASCADE = (
    Architecture(
        "Stable_Cascade_C", 16, CASCADE_C, timesteps=1.0,
        conditions={
            "clip_text": lambda draw: draw.prompt(24),
            "clip_text_pooled": lambda draw: draw.normal(draw.batch, 1, 24),
            "clip_img": lambda draw: draw.normal(draw.batch, 1, 24),
            "sca": lambda draw: torch.zeros(draw.batch), "crp": lambda draw: torch.zeros(draw.batch),
        },
    ),
    Architecture(
        "Stable_Cascade_B", 4, CASCADE_B, timesteps=1.0, scale=4, multiple=2,
        conditions={
            "clip": lambda draw: draw.normal(draw.batch, 1, 24),
            "effnet": lambda draw: draw.normal(draw.batch, 16, draw.height // 3, draw.width // 3),
            "sca": lambda draw: torch.zeros(draw.batch),
        },
    ),
)  # fmt: skip
TRANSFORMERS = (
    Architecture("Flux", 16, FLUX, timesteps=1.0, newer=NEWER_FLUX),
    Architecture(
        "Flux Kontext", 16, FLUX, family="Flux", timesteps=1.0, newer=NEWER_FLUX, conditions={"ref_latents": reference},
    ),
    Architecture("FluxInpaint", 16, FLUX | {"in_channels": 96}, timesteps=1.0, newer=NEWER_FLUX, concat=80),
    Architecture("FluxSchnell", 16, FLUX | {"guidance_embed": False}, timesteps=1.0, newer=NEWER_FLUX),
    Architecture("Flux2", 128, FLUX2, timesteps=1.0, newer=NEWER_FLUX2),
    Architecture(
        "Flux2 Klein", 128, FLUX2 | {"guidance_embed": False}, family="Flux2", timesteps=1.0, newer=NEWER_FLUX2,
    ),
    Architecture(
        "Chroma", 16, CHROMA, timesteps=1.0, newer=NEWER_CHROMA,
        conditions={"guidance": lambda draw: draw.uniform(0.0, 4.0)},
    ),
    Architecture(
        "ChromaRadiance", 3, RADIANCE, timesteps=1.0, newer=NEWER_RADIANCE, scale=2,
        conditions={"guidance": lambda draw: draw.uniform(0.0, 4.0)},
    ),
    Architecture("SD3", 16, SD3, conditions={"context": lambda draw: draw.prompt(40)}),
    Architecture(
        "SD3.5 medium", 16, SD3 | {"x_block_self_attn_layers": [0]}, family="SD3",
        conditions={"context": lambda draw: draw.prompt(40)},
    ),
    Architecture("AuraFlow", 4, AURA, timesteps=1.0),
    Architecture(
        "PixArtAlpha", 4, PIXART, base=32, multiple=2, conditions={
            "c_size": lambda draw: draw.uniform(256.0, 1024.0, draw.batch, 2),
            "c_ar": lambda draw: draw.uniform(0.5, 2.0, draw.batch, 1),
        },
    ),
    Architecture(
        "PixArtSigma", 4, PIXART | {"image_model": "pixart_sigma", "micro_condition": False}, base=32, multiple=2,
    ),
    Architecture(
        "HunyuanDiT", 4, HYDIT, conditions=HYDIT_CONDITIONS | {"image_meta_size": None},
        note="writes into its prompts",
    ),
    Architecture(
        "HunyuanDiT1", 4, HYDIT | {"image_model": "hydit1", "size_cond": True, "use_style_cond": True},
        conditions=HYDIT_CONDITIONS, note="writes into its prompts",
    ),
    Architecture("Lumina2", 16, LUMINA2, timesteps=1.0, conditions=TOKEN_COUNT),
    Architecture("ZImage", 16, ZIMAGE, timesteps=1.0, conditions=TOKEN_COUNT),
    Architecture(
        "HiDream", 16, HIDREAM, conditions={
            "y": lambda draw: draw.normal(draw.batch, 24), "context": lambda draw: draw.prompt(40),
            "encoder_hidden_states_llama3": lambda draw: draw.normal(draw.batch, 2, draw.tokens + 1, 40),
        },
        note="its mixture of experts picks rows by a mask",
    ),
    Architecture("Omnigen2", 16, OMNIGEN2, timesteps=1.0, conditions=TOKEN_COUNT),
    Architecture(
        "Omnigen2 edit", 16, OMNIGEN2, family="Omnigen2", timesteps=1.0,
        conditions=TOKEN_COUNT | {"ref_latents": reference},
    ),
    Architecture("QwenImage", 16, QWEN, dimensions=3, frames=1, timesteps=1.0),
    Architecture(
        "QwenImage edit", 16, QWEN, family="QwenImage", dimensions=3, frames=1, timesteps=1.0,
        conditions={"ref_latents": lambda draw: [draw.normal(draw.batch, 16, 1, 12, 10)]},
    ),
)  # fmt: skip
ARCHITECTURES = UNETS + CASCADE + TRANSFORMERS
