"""Models of video: Wan, Hunyuan Video, Cosmos, LTX, Mochi and the UNets of Stable Video Diffusion."""

from typing import Any

import torch
from torch import Tensor

from tools.architectures.image import POOLED, UNET
from tools.architectures.table import Architecture, Draw

WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 64, "out_dim": 16, "in_dim": 16, "num_heads": 2, "ffn_dim": 96,
    "num_layers": 2, "patch_size": (1, 2, 2), "freq_dim": 64, "text_dim": 40, "window_size": (-1, -1), "qk_norm": True,
    "cross_attn_norm": True, "eps": 1e-6,
}  # fmt: skip
HUNYUAN = {
    "image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 24,
    "context_in_dim": 40, "hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [8, 12, 12], "theta": 256, "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
    "use_cond_type_embedding": False, "vision_in_dim": None,
}  # fmt: skip
HUNYUAN_IMAGE = HUNYUAN | {
    "in_channels": 64, "out_channels": 64, "patch_size": [1, 1], "axes_dim": [16, 16], "vec_in_dim": None, "byt5": True,
    "guidance_embed": False,
}  # fmt: skip
REFINER = HUNYUAN_IMAGE | {
    "in_channels": 128, "patch_size": [1, 1, 1], "axes_dim": [8, 12, 12], "byt5": False, "meanflow": True,
}  # fmt: skip
HUNYUAN15 = HUNYUAN | {
    "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None, "guidance_embed": False,
    "byt5": True, "use_cond_type_embedding": True, "vision_in_dim": 48,
}  # fmt: skip
NEWER_HUNYUAN = {"meanflow_sum": False}  # what ComfyUIs after 0.3.75 ask for besides
COSMOS = {
    "image_model": "cosmos", "max_img_h": 64, "max_img_w": 64, "max_frames": 16, "in_channels": 16, "out_channels": 16,
    "patch_spatial": 2, "patch_temporal": 1, "model_channels": 64, "block_config": "FA-CA-MLP",
    "concat_padding_mask": True, "pos_emb_cls": "rope3d", "pos_emb_learnable": False, "pos_emb_interpolation": "crop",
    "block_x_format": "THWBD", "affline_emb_norm": True, "use_adaln_lora": True, "adaln_lora_dim": 16,
    "num_blocks": 2, "num_heads": 2, "mlp_ratio": 2.0, "crossattn_emb_channels": 40,
    "extra_per_block_abs_pos_emb": True, "extra_per_block_abs_pos_emb_type": "learnable",
    "rope_h_extrapolation_ratio": 1.0, "rope_w_extrapolation_ratio": 1.0, "rope_t_extrapolation_ratio": 2.0,
}  # fmt: skip
PREDICT2 = {
    "image_model": "cosmos_predict2", "max_img_h": 64, "max_img_w": 64, "max_frames": 16, "in_channels": 16,
    "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 64, "concat_padding_mask": True,
    "crossattn_emb_channels": 40, "pos_emb_cls": "rope3d", "pos_emb_learnable": True, "pos_emb_interpolation": "crop",
    "min_fps": 1, "max_fps": 30, "use_adaln_lora": True, "adaln_lora_dim": 16, "num_blocks": 2, "num_heads": 2,
    "mlp_ratio": 2.0, "extra_per_block_abs_pos_emb": False, "rope_h_extrapolation_ratio": 4.0,
    "rope_w_extrapolation_ratio": 4.0, "rope_t_extrapolation_ratio": 1.0, "extra_h_extrapolation_ratio": 1.0,
    "extra_w_extrapolation_ratio": 1.0, "extra_t_extrapolation_ratio": 1.0, "rope_enable_fps_modulation": False,
}  # fmt: skip
LTXV = {
    "image_model": "ltxv", "in_channels": 128, "cross_attention_dim": 64, "attention_head_dim": 32,
    "num_attention_heads": 2, "caption_channels": 40, "num_layers": 2,
}  # fmt: skip
# Mochi asserts that the hidden layer for the picture has 12288 channels.
MOCHI = {
    "image_model": "mochi_preview", "depth": 2, "patch_size": 2, "num_heads": 2, "hidden_size_x": 64,
    "hidden_size_y": 32, "mlp_ratio_x": 192.0, "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12,
    "qk_norm": True, "qkv_bias": False, "out_bias": True, "attn_drop": 0.0, "patch_embed_bias": True,
    "posenc_preserve_area": True, "timestep_mlp_bias": True, "attend_to_padding": False, "timestep_scale": 1000.0,
    "use_t5": True, "t5_feat_dim": 40, "t5_token_length": 40, "rope_theta": 10000.0,
}  # fmt: skip
SVD = UNET | POOLED | {
    "in_channels": 8, "use_temporal_attention": True, "use_temporal_resblock": True, "time_context_dim": 24,
    "extra_ff_mix_layer": True, "use_spatial_context": True, "merge_strategy": "learned_with_images",
    "merge_factor": 0.0, "video_kernel_size": [3, 1, 1], "disable_temporal_crossattention": False,
}  # fmt: skip


def first_frame(draw: Draw) -> Tensor:
    """A mask that keeps the first frame: 0 there, 1 in the others."""
    mask = torch.ones(draw.batch, 1, draw.frames, draw.height, draw.width)
    mask[:, :, 0] = 0.0
    return mask.to(draw.dtype)


def per_frame(timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """A time step per frame, as Wan 2.2 and Cosmos Predict2 make them of a mask."""
    return timesteps[:, None] * conditions["denoise_mask"].mean(dim=(1, 3, 4))


def per_token(timesteps: Tensor, conditions: dict[str, Any]) -> Tensor:
    """A time step per token, as LTX makes them of a mask."""
    return (timesteps[:, None, None] * conditions["denoise_mask"].flatten(2)).transpose(1, 2)


def step(draw: Draw) -> dict[str, Any]:
    """The sampler's place in its schedule, which a model of two time steps reads."""
    sigmas = torch.linspace(1.0, 0.0, 5)
    return {"sigmas": sigmas[1:2], "sample_sigmas": sigmas}


CLIP_IMAGE = {"clip_fea": lambda draw: draw.prompt(1280, 257)}
REFERENCE = {"reference_latent": lambda draw: draw.video(16, 1)}
GLYPHS = {"txt_byt5": lambda draw: draw.prompt(1472, 6)}
VISION = {"clip_fea": lambda draw: draw.prompt(48, 9)}
RATE = {"fps": lambda draw: None}
LTX_PROMPT = {"attention_mask": Draw.mask, "frame_rate": lambda draw: 25}
MASKED = {"denoise_mask": first_frame}
CAMERA = {"camera_conditions": lambda draw: draw.normal(draw.batch, 24, draw.frames, draw.height * 8, draw.width * 8)}
VACE = {
    "vace_context": lambda draw: draw.normal(draw.batch, 1, 96, draw.frames, draw.height, draw.width),
    "vace_strength": lambda draw: [0.75],
}
SPEECH = {
    "audio_embed": lambda draw: draw.normal(draw.batch, 25, 24, draw.frames * 4),
    "control_video": lambda draw: draw.video(16),
}
HUMO = {"audio_embed": lambda draw: draw.normal(draw.batch, draw.frames, 8, 5, 1280)}


def frames_as_batch(draw: Draw) -> Tensor:
    """A latent [batch x frames, 4, height, width]."""
    return draw.normal(draw.batch * draw.frames, 4, draw.height, draw.width)


SVD_CONDITIONS = {"num_video_frames": lambda draw: draw.frames, "context": lambda draw: draw.prompt(24, 1)}


def video(name: str, channels: int, config: dict[str, Any], **more: Any) -> Architecture:
    """An entry whose latent has frames."""
    return Architecture(name, channels, config, dimensions=3, **more)


def hunyuan(name: str, channels: int, config: dict[str, Any], **more: Any) -> Architecture:
    """An entry of Hunyuan's, with frames unless ``more`` says otherwise."""
    return Architecture(name, channels, config, newer=NEWER_HUNYUAN, **{"dimensions": 3} | more)


ARCHITECTURES = (
    Architecture("SVD_img2vid", 4, SVD, concat=4, batches=(1, 2), latent=frames_as_batch, conditions=SVD_CONDITIONS),
    Architecture("SV3D_u", 4, SVD, concat=4, batches=(1, 2), latent=frames_as_batch, conditions=SVD_CONDITIONS),
    Architecture("SV3D_p", 4, SVD, concat=4, batches=(1, 2), latent=frames_as_batch, conditions=SVD_CONDITIONS),
    video("WAN21_T2V", 16, WAN),
    video("WAN21_I2V", 16, WAN | {"model_type": "i2v", "in_dim": 36}, concat=20, conditions=CLIP_IMAGE),
    video("WAN21_FunControl2V", 16, WAN | {"model_type": "i2v", "in_dim": 48}, concat=32, conditions=CLIP_IMAGE),
    video(
        "WAN21_FunControl2V reference", 16, WAN | {"model_type": "i2v", "in_dim": 48, "in_dim_ref_conv": 16},
        family="WAN21_FunControl2V", concat=32, multiple=2,
        conditions=CLIP_IMAGE | {"reference_latent": lambda draw: draw.image(16)},
    ),
    video(
        "WAN21_Camera", 16, WAN | {"model_type": "camera", "in_dim": 32}, concat=16, multiple=2,
        conditions=CLIP_IMAGE | CAMERA,
    ),
    video(
        "WAN22_Camera", 16, WAN | {"model_type": "camera_2.2", "in_dim": 36}, concat=20, multiple=2, conditions=CAMERA,
    ),
    video(
        "WAN21_Vace", 16, WAN | {"model_type": "vace", "vace_layers": 2, "vace_in_dim": 96}, multiple=2,
        conditions=VACE,
    ),
    video("WAN21_HuMo", 16, WAN | {"model_type": "humo"}, multiple=2, conditions=HUMO | REFERENCE),
    video(
        "WAN22_S2V", 16, WAN | {"model_type": "s2v", "audio_dim": 24, "audio_inject_layers": [0, 1]}, multiple=2,
        conditions=SPEECH | REFERENCE,
    ),
    video(
        "WAN22_S2V motion", 16, WAN | {"model_type": "s2v", "audio_dim": 24, "audio_inject_layers": [0, 1]},
        family="WAN22_S2V", multiple=2, base=4,
        conditions=SPEECH | REFERENCE | {"reference_motion": lambda draw: draw.video(16, 19)},
    ),
    video(
        "WAN22_Animate", 16, WAN | {"model_type": "animate", "in_dim": 36}, concat=20, multiple=2,
        conditions=CLIP_IMAGE | {"pose_latents": lambda draw: draw.video(16)},
        note="without the face encoder, which takes faces of 512x512 only; adds to a slice in place",
    ),
    video("WAN22_T2V", 48, WAN | {"in_dim": 48, "out_dim": 48}),
    video(
        "WAN22_T2V first frame", 48, WAN | {"in_dim": 48, "out_dim": 48}, family="WAN22_T2V", conditions=MASKED,
        clock=per_frame,
    ),
    hunyuan("HunyuanVideo", 16, HUNYUAN, multiple=2),
    hunyuan(
        "HunyuanVideo mask", 16, HUNYUAN, family="HunyuanVideo", multiple=2, batches=(1,),
        conditions={"attention_mask": lambda draw: (torch.arange(draw.tokens)[None] < draw.tokens - 2).long()},
    ),
    hunyuan("HunyuanVideoI2V", 16, HUNYUAN | {"in_channels": 33}, concat=17, multiple=2),
    hunyuan(
        "HunyuanVideoI2V guiding frame", 16, HUNYUAN | {"in_channels": 33}, family="HunyuanVideoI2V", concat=17,
        multiple=2, batches=(1,), conditions={"guiding_frame_index": lambda draw: torch.zeros(draw.batch)},
    ),
    hunyuan("HunyuanVideoSkyreelsI2V", 16, HUNYUAN | {"in_channels": 32}, concat=16, multiple=2),
    hunyuan("HunyuanImage21", 64, HUNYUAN_IMAGE, dimensions=2, conditions=GLYPHS),
    hunyuan(
        "HunyuanImage21 distilled", 64, HUNYUAN_IMAGE | {"guidance_embed": True, "meanflow": True},
        family="HunyuanImage21", dimensions=2, conditions=GLYPHS, options=step,
        note="looks its sigma up in the schedule with torch.where, and branches on whether it is there",
    ),
    hunyuan(
        "HunyuanImage21Refiner", 64, REFINER, frames=2, concat=64, conditions={"disable_time_r": lambda draw: True},
        options=step,
    ),
    hunyuan("HunyuanVideo15", 32, HUNYUAN15, concat=33, conditions=GLYPHS | VISION),
    hunyuan(
        "HunyuanVideo15_SR_Distilled", 32, HUNYUAN15 | {"in_channels": 98, "meanflow": True}, concat=66,
        conditions=GLYPHS | VISION | {"disable_time_r": lambda draw: False}, options=step,
        note="looks its sigma up in the schedule with torch.where, and branches on whether it is there",
    ),
    video("CosmosT2V", 16, COSMOS, multiple=2, conditions=RATE),
    video("CosmosI2V", 16, COSMOS | {"in_channels": 17}, multiple=2, concat=1, conditions=RATE),
    video("CosmosT2IPredict2", 16, PREDICT2, multiple=2, timesteps=1.0, conditions=RATE),
    video(
        "CosmosI2VPredict2", 16, PREDICT2 | {"in_channels": 17}, multiple=2, timesteps=1.0, concat=1, conditions=RATE,
    ),
    video(
        "CosmosI2VPredict2 first frame", 16, PREDICT2 | {"in_channels": 17}, family="CosmosI2VPredict2", multiple=2,
        timesteps=1.0, concat=1, conditions=RATE | MASKED, clock=per_frame,
    ),
    video("LTXV", 128, LTXV, timesteps=1.0, conditions=LTX_PROMPT),
    video(
        "LTXV first frame", 128, LTXV, family="LTXV", timesteps=1.0, conditions=LTX_PROMPT | MASKED, clock=per_token,
    ),
    video(
        "GenmoMochi", 12, MOCHI, timesteps=1.0, multiple=2,
        conditions={"attention_mask": Draw.mask, "num_tokens": lambda draw: draw.tokens},
    ),
)  # fmt: skip
