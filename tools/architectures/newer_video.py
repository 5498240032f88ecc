"""Models of video and of sound that came after ComfyUI 0.3.75."""

from typing import Any

import torch
from torch import Tensor

from tools.architectures.audio import rotary_frequencies
from tools.architectures.newer import KANDINSKY_IMAGE
from tools.architectures.table import Architecture, Draw
from tools.architectures.video import CLIP_IMAGE, LTXV, WAN, video

LTXAV = LTXV | {
    "image_model": "ltxav", "audio_in_channels": 128, "audio_cross_attention_dim": 32, "audio_attention_head_dim": 16,
    "audio_num_attention_heads": 2, "connector_attention_head_dim": 20, "connector_num_attention_heads": 2,
    "connector_num_layers": 1,
}  # fmt: skip
MINIMAX = {
    "image_model": "minimax_h3", "hidden_size": 64, "num_layers": 2, "token_refiner_num_layers": 1,
    "num_attention_heads": 2, "attention_head_dim": 32, "ffn_hidden_size": 96, "latents_dim": 24,
    "audio_latents_dim": 32, "text_dim": 40, "timestep_input_dim": 32, "time_embed_hidden_size": 64,
    "time_embed_dim": 48, "rope_inv_freq_len": 4,
}  # fmt: skip
ANIMATE2 = WAN | {"model_type": "animate2", "in_dim": 36}
TRIPOSPLAT = {
    "image_model": "triposplat", "q_token_length": 48, "model_channels": 64, "cond_channels": 40, "num_blocks": 2,
    "num_refiner_blocks": 1, "num_head_channels": 32, "mlp_ratio": 2,
}  # fmt: skip
SEEDVR2 = {
    "image_model": "seedvr2", "vid_dim": 64, "heads": 2, "head_dim": 32, "num_layers": 2, "mm_layers": 1,
    "norm_eps": 1e-5, "mlp_type": "swiglu", "vid_out_norm": True, "txt_in_dim": 40, "rope_dim": 32,
}  # fmt: skip
COGVIDEOX = {
    "image_model": "cogvideox", "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 16,
    "time_embed_dim": 32, "text_embed_dim": 40, "num_layers": 2, "use_rotary_positional_embeddings": True,
}  # fmt: skip
STABLE_AUDIO3 = {
    "audio_model": "dit1.0", "global_cond_shared_embed": True, "global_cond_type": "adaLN", "io_channels": 256,
    "embed_dim": 64, "depth": 2, "num_heads": 2, "cond_token_dim": 32, "global_cond_dim": 48, "input_concat_dim": 257,
    "num_memory_tokens": 4, "attn_kwargs": {"qk_norm": "rms", "differential": True}, "norm_type": "rms_norm",
    "timestep_features_type": "expo",
}  # fmt: skip
ACE15 = {
    "audio_model": "ace1.5", "hidden_size": 64, "text_hidden_dim": 40, "num_dit_layers": 2, "num_lyric_layers": 1,
    "num_timbre_layers": 1, "num_tokenizer_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
    "intermediate_size": 96, "sliding_window": 8, "fsq_dim": 64, "encoder_hidden_size": 64,
    "encoder_intermediate_size": 96, "encoder_num_heads": 2,
}  # fmt: skip


def _seconds(config: Any) -> dict[str, Tensor]:
    from comfy.ldm.audio.embedders import NumberConditioner

    names = NumberConditioner(768, fourier_features_type=config["timestep_features_type"]).state_dict()
    return {f"conditioner.conditioners.seconds_total.{name}": torch.zeros_like(value) for name, value in names.items()}


def _two_layers(model: Any) -> None:
    """Its widths are not in its settings, and it has 36 layers. What it reads from a file besides weights is empty."""
    transformer = model.diffusion_transformer.transformer
    del transformer.layers[2:]
    for name, buffer in transformer.named_buffers():
        buffer.copy_(torch.zeros(len(buffer)) if name.endswith("beta") else 1e4 ** -torch.linspace(0, 1, len(buffer)))


def _pose(draw: Draw) -> Tensor | None:
    """A frame for each but the first, which is the reference."""
    if draw.frames == 1:
        return None
    return draw.normal(draw.batch, 16, draw.frames - 1, draw.height, draw.width)


def _both(timesteps: Tensor, conditions: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return timesteps, timesteps


def _frequencies(model: Any) -> None:
    """The frequencies of its rotary embedding are read from a checkpoint, and nothing until then."""
    frequencies = model.rope.inv_freq
    frequencies.copy_(10000.0 ** -torch.linspace(0.0, 1.0, len(frequencies) + 1)[:-1])


SCAIL = {
    "reference_latent": lambda draw: draw.video(20, 1),
    "pose_latents": lambda draw: draw.normal(draw.batch, 20, draw.frames, draw.height // 2, draw.width // 2),
}
SCAIL2 = SCAIL | {
    "ref_mask_latents": lambda draw: draw.video(28, draw.frames + 1),
    "sam_latents": lambda draw: draw.normal(draw.batch, 28, draw.frames, draw.height // 2, draw.width // 2),
    "ref_mask_flag": lambda draw: True,
}

ARCHITECTURES = (
    video("WAN21_CausalAR_T2V", 16, WAN, note="block by block (SamplerARVideo) it is ComfyUI's own"),
    video("WAN21_FlowRVS", 16, WAN | {"model_type": "flow_rvs"}),
    video(
        "WAN21_SCAIL", 16, WAN | {"model_type": "scail", "in_dim": 20}, concat=4, multiple=4,
        conditions=SCAIL | CLIP_IMAGE,
    ),
    video(
        "WAN21_SCAIL2", 16, WAN | {"model_type": "scail2", "in_dim": 20}, concat=4, multiple=4,
        conditions=SCAIL2 | CLIP_IMAGE,
    ),
    video(
        "WAN22_WanDancer", 16,
        WAN | {"model_type": "wandancer", "in_dim": 36, "music_dim": 32, "music_heads": 2, "music_latent_dim": 32,
               "audio_inject_layers": [0, 1]},
        concat=20, base=3, multiple=8,
        conditions=CLIP_IMAGE | {
            "clip_fea_ref": lambda draw: draw.prompt(1280, 257),
            "audio_embed": lambda draw: draw.normal(draw.batch, draw.tokens, 35),
        },
    ),
    video(
        "LTXAV", 128, LTXAV, timesteps=1.0, clock=_both,
        latent=lambda draw: [draw.video(128), draw.normal(draw.batch, 8, draw.tokens, 16)],
        conditions={
            "context": lambda draw: draw.prompt(80), "attention_mask": Draw.mask, "frame_rate": lambda draw: 25,
        },
    ),
    video(
        "MiniMaxH3", 24, MINIMAX, batches=(1,),
        latent=lambda draw: [draw.video(24), draw.normal(draw.batch, 32, 2, draw.tokens)], finish=_frequencies,
        conditions={"context": lambda draw: draw.prompt(64)},
        note="reads its time step back to the host at every step and sorts with it; writes into slices",
    ),
    video("Kandinsky5", 16, KANDINSKY_IMAGE | {"visual_embed_dim": 132}, concat=17, multiple=2),
    video("CogVideoX_T2V", 16, COGVIDEOX, multiple=2),
    video("CogVideoX_I2V", 16, COGVIDEOX | {"in_channels": 32}, concat=16, multiple=2),
    video("CogVideoX_Inpaint", 16, COGVIDEOX | {"in_channels": 48}, concat=32, multiple=2),
    video(
        "CogVideoX_I2V 1.5", 16, COGVIDEOX | {"in_channels": 32, "patch_size_t": 2, "ofs_embed_dim": 32},
        family="CogVideoX_I2V", concat=16, multiple=2, conditions={"ofs": lambda draw: draw.uniform(1.0, 3.0)},
    ),
    video(
        "SeedVR2", 16, SEEDVR2, multiple=2, batches=(2, 4), conditions={"condition": lambda draw: draw.video(17)},
        options=lambda draw: {"cond_or_uncond": [1, 0]},
        note="makes windows of sizes that it reads back to the host",
    ),
    Architecture(
        "TripoSplat", 16, TRIPOSPLAT,
        latent=lambda draw: [draw.normal(draw.batch, 48, 16), draw.normal(draw.batch, 1, 5)],
        conditions={"ref_latents": lambda draw: [draw.normal(draw.batch, 128, 1, draw.tokens - 3)]},
    ),
    video("WAN_Animate2", 16, ANIMATE2, concat=20, multiple=2, conditions=CLIP_IMAGE),
    video(
        "WAN_Animate2 pose", 16, ANIMATE2, family="WAN_Animate2", concat=20, multiple=2,
        conditions=CLIP_IMAGE | {"pose_latents": _pose},
        note="without the cache of the pose, which compares it on the host",
    ),
    Architecture(
        "StableAudio3", 256, STABLE_AUDIO3, dimensions=1, timesteps=1.0, concat=257, state=_seconds,
        finish=rotary_frequencies,
        conditions={"global_embed": lambda draw: draw.normal(draw.batch, 48)},
    ),
    Architecture(
        "MiniMaxMusic3", 128, {"audio_model": "minimax_music3"}, dimensions=1, timesteps=1.0, finish=_two_layers,
        conditions={
            "context": lambda draw: draw.prompt(8 * 4096),
            "conditioning_scale": lambda draw: draw.uniform(0.5, 1.0)[:, None, None],
        },
        note="long sounds in windows, which are added up in place",
    ),
    Architecture(
        "ACEStep15", 64, ACE15, dimensions=1, timesteps=1.0,
        conditions={
            "lyric_embed": lambda draw: draw.prompt(40, draw.tokens + 2), "is_covers": lambda draw: False,
            "refer_audio": lambda draw: draw.normal(draw.batch, 64, draw.height * draw.width // 4),
        },
        note="counts the references of each sound on the host",
    ),
    Architecture(
        "ACEStep15 codes", 64, ACE15, family="ACEStep15", dimensions=1, timesteps=1.0,
        conditions={
            "lyric_embed": lambda draw: draw.prompt(40, draw.tokens + 2),
            "audio_codes": lambda draw: draw.integers(1000, draw.batch, -(-draw.height * draw.width // 20)),
            "refer_audio": lambda draw: draw.normal(draw.batch, 64, draw.height * draw.width // 4),
        },
        note="counts the references of each sound on the host",
    ),
)  # fmt: skip
