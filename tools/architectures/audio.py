"""Models of sound and of shapes in space: latents that are a sequence, or a spectrum over time."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tools.architectures.table import Architecture

STABLE_AUDIO = {
    "audio_model": "dit1.0", "io_channels": 64, "embed_dim": 64, "depth": 2, "num_heads": 2, "cond_token_dim": 32,
    "global_cond_dim": 48,
}  # fmt: skip
ACE = {
    "audio_model": "ace", "attention_head_dim": 32, "in_channels": 8, "inner_dim": 64, "max_height": 16,
    "max_position": 256, "max_width": 256, "mlp_ratio": 2.0, "num_attention_heads": 2, "num_layers": 2,
    "out_channels": 8, "patch_size": [16, 1], "rope_theta": 1000000.0, "speaker_embedding_dim": 512,
    "text_embedding_dim": 40, "ssl_encoder_depths": [2, 2], "ssl_latent_dims": [24, 24], "ssl_names": ["a", "b"],
    "lyric_encoder_vocab_size": 50, "lyric_hidden_size": 1024,
}  # fmt: skip
HUNYUAN3D = {
    "image_model": "hunyuan3d2", "in_channels": 64, "context_in_dim": 40, "hidden_size": 64, "mlp_ratio": 2.0,
    "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "qkv_bias": True, "guidance_embed": False,
}  # fmt: skip
HUNYUAN3D21 = {
    "image_model": "hunyuan3d2_1", "in_channels": 64, "context_dim": 40, "hidden_size": 64, "mlp_ratio": 2.0,
    "num_heads": 2, "depth": 3, "qkv_bias": False, "guidance_cond_proj_dim": None, "num_moe_layers": 1,
    "num_experts": 4, "moe_top_k": 2,
}  # fmt: skip


def _seconds(config: Mapping[str, Any]) -> dict[str, Tensor]:
    from comfy.ldm.audio.embedders import NumberConditioner

    names = NumberConditioner(768).state_dict()
    return {
        f"conditioner.conditioners.{which}.{name}": torch.zeros_like(weight)
        for which in ("seconds_start", "seconds_total")
        for name, weight in names.items()
    }


def rotary_frequencies(model: Any) -> None:
    """The frequencies of its rotary embedding are read from a checkpoint, and nothing until then."""
    frequencies = model.transformer.rotary_pos_emb.inv_freq
    frequencies.copy_(10000.0 ** -torch.linspace(0.0, 1.0, len(frequencies) + 1)[:-1])


def _fewer_lyric_layers(model: Any) -> None:
    """The lyric encoder's width is fixed; one layer of it is enough."""
    del model.lyric_encoder.encoders[1:]


ARCHITECTURES = (
    Architecture(
        "StableAudio", 64, STABLE_AUDIO, dimensions=1, timesteps=1.0, state=_seconds, finish=rotary_frequencies,
        conditions={"global_embed": lambda draw: draw.normal(draw.batch, 48)},
    ),
    Architecture(
        "ACEStep", 8, ACE, latent=lambda draw: draw.normal(draw.batch, 8, 16, draw.height * draw.width // 4),
        finish=_fewer_lyric_layers,
        conditions={
            "lyric_token_idx": lambda draw: draw.integers(50, draw.batch, draw.tokens + 2),
            "speaker_embeds": lambda draw: torch.zeros(draw.batch, 512, dtype=draw.dtype),
            "lyrics_strength": lambda draw: 1.0,
        },
    ),
    Architecture("Hunyuan3Dv2", 64, HUNYUAN3D, dimensions=1, timesteps=1.0),
    Architecture("Hunyuan3Dv2mini", 64, HUNYUAN3D, dimensions=1, timesteps=1.0),
    Architecture(
        "Hunyuan3Dv2_1", 64, HUNYUAN3D21, dimensions=1, timesteps=1.0, batches=(2, 4),
        note="takes a prompt's two halves of one batch, so a batch is even; its mixture of experts counts on the host",
    ),
)  # fmt: skip
