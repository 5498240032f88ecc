"""Models of pictures that came after ComfyUI 0.3.75."""

from typing import Any

import torch

from tools.architectures.image import FLUX, TOKEN_COUNT, ZIMAGE, reference
from tools.architectures.table import Architecture, Draw
from tools.architectures.video import PREDICT2

KREA2 = {
    "image_model": "krea2", "features": 64, "tdim": 32, "txtdim": 32, "heads": 2, "kvheads": 1, "multiplier": 2,
    "layers": 2, "patch": 2, "channels": 16, "txtlayers": 3, "txtheads": 2, "txtkvheads": 2,
}  # fmt: skip
PIXEL_ZIMAGE = ZIMAGE | {
    "image_model": "zimage_pixel", "patch_size": 4, "in_channels": 3, "decoder_in_channels": 48,
    "decoder_hidden_size": 32, "decoder_num_res_blocks": 2, "decoder_max_freqs": 4,
}  # fmt: skip
PIXELDIT = {
    "image_model": "pixeldit_t2i", "hidden_size": 64, "num_groups": 2, "pixel_hidden_size": 16,
    "pixel_attn_hidden_size": 32, "pixel_num_groups": 2, "patch_depth": 2, "pixel_depth": 1, "patch_size": 4,
    "txt_embed_dim": 40, "txt_max_length": 40,
}  # fmt: skip
PID = PIXELDIT | {
    "image_model": "pid", "lq_latent_channels": 16, "lq_hidden_dim": 32, "lq_num_res_blocks": 1, "lq_interval": 2,
}  # fmt: skip
BOOGU = {
    "image_model": "boogu", "hidden_size": 96, "num_layers": 2, "num_double_stream_layers": 1,
    "num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 32,
    "axes_dim_rope": (8, 8, 8), "axes_lens": (128, 64, 64), "instruction_feat_dim": 40,
}  # fmt: skip
MAGE = {
    "image_model": "mage_flow", "in_channels": 128, "out_channels": 128, "num_layers": 2, "attention_head_dim": 32,
    "num_attention_heads": 2, "joint_attention_dim": 40, "axes_dims_rope": (8, 12, 12),
}  # fmt: skip
JOY = {
    "image_model": "joyimage", "patch_size": [1, 2, 2], "in_channels": 16, "hidden_size": 64, "num_attention_heads": 2,
    "text_dim": 40, "mlp_width_ratio": 2.0, "num_layers": 2, "rope_dim_list": [8, 12, 12],
}  # fmt: skip
IDEOGRAM4 = {
    "image_model": "ideogram4", "in_channels": 128, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32,
    "intermediate_size": 96, "adaln_dim": 32, "llm_features_dim": 40, "mrope_section": [6, 5, 5],
}  # fmt: skip
LENS = {
    "image_model": "lens", "in_channels": 128, "out_channels": 32, "num_layers": 2, "attention_head_dim": 32,
    "num_attention_heads": 2, "enc_hidden_dim": 24, "axes_dims_rope": (8, 12, 12), "selected_layer_index": (0, 1),
}  # fmt: skip
KANDINSKY_IMAGE = {
    "image_model": "kandinsky5", "model_dim": 64, "ff_dim": 96, "time_dim": 32, "in_text_dim": 40, "in_text_dim2": 24,
    "axes_dims": (8, 12, 12), "num_text_blocks": 1, "num_visual_blocks": 2, "visual_embed_dim": 64,
    "rope_scale_factor": (1.0, 1.0, 1.0),
}  # fmt: skip
ERNIE = {
    "image_model": "ernie", "hidden_size": 64, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 96,
    "in_channels": 128, "out_channels": 128, "patch_size": 1, "text_in_dim": 40, "rope_axes_dim": (8, 12, 12),
}  # fmt: skip
HIDREAM_O1 = {
    "image_model": "hidream_o1",
    "text_config_overrides": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "rope_dims": [6, 5, 5],
    },
    "vision_config_overrides": {
        "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "depth": 1, "deepstack_visual_indexes": (),
    },
}  # fmt: skip
TIME_TOKEN = 151673  # the last of a prompt of HiDream-O1, where its time step goes in


def _hidream_o1(name: str) -> Any:
    """What ComfyUI makes of a prompt's tokens and of the picture's size."""

    def make(draw: Draw) -> Any:
        from comfy.ldm.hidream_o1.conditioning import build_extra_conds

        tokens = torch.randint(1000, (1, draw.tokens), generator=torch.Generator().manual_seed(draw.tokens))
        tokens[:, -1] = TIME_TOKEN
        value = build_extra_conds(tokens, torch.empty(draw.batch, 3, draw.height, draw.width)).get(name)
        if isinstance(value, torch.Tensor) and value.shape[0] == 1:
            value = value.expand(draw.batch, *value.shape[1:]).contiguous()
        return value

    return make


def _without_adapter(model: Any) -> None:
    """The adapter of the prompt is large, and ComfyUI runs it before sampling."""
    model.llm_adapter = None


def _bfloat16(timesteps: torch.Tensor, conditions: dict[str, Any]) -> torch.Tensor:
    return timesteps.bfloat16()


ARCHITECTURES = (
    Architecture(
        "LongCatImage", 16, FLUX | {"guidance_embed": False, "vec_in_dim": None, "txt_ids_dims": [1, 2]}, timesteps=1.0,
    ),
    Architecture(
        "Ovis", 16,
        FLUX | {"guidance_embed": False, "vec_in_dim": None, "txt_ids_dims": [1, 2], "yak_mlp": True, "txt_norm": True},
        family="FluxSchnell", since=(0, 4), timesteps=1.0,
    ),
    Architecture(
        "Krea2", 16, KREA2, dimensions=3, frames=1, timesteps=1.0, centred=True,
        conditions={"context": lambda draw: draw.prompt(96)},
    ),
    Architecture(
        "Krea2 edit", 16, KREA2, family="Krea2", dimensions=3, frames=1, timesteps=1.0, centred=True,
        conditions={
            "context": lambda draw: draw.prompt(96),
            "ref_latents": lambda draw: [draw.normal(draw.batch, 16, 1, 12, 10)],
            "ref_latents_method": lambda draw: "index_timestep_zero",
        },
        note="multiplies and adds to slices in place",
    ),
    Architecture(
        "Anima", 16, PREDICT2 | {"image_model": "anima"}, dimensions=3, frames=1, multiple=2, timesteps=1.0,
        finish=_without_adapter,
    ),
    Architecture("ZImagePixelSpace", 3, PIXEL_ZIMAGE, timesteps=1.0, scale=2, conditions=TOKEN_COUNT),
    Architecture("PixelDiTT2I", 3, PIXELDIT, scale=2),
    Architecture(
        "PiD", 3, PID, scale=2,
        conditions={
            "lq_latent": lambda draw: draw.normal(draw.batch, 16, max(draw.height // 8, 1), max(draw.width // 8, 1)),
            "degrade_sigma": lambda draw: draw.uniform(0.0, 0.5),
        },
    ),
    Architecture(
        "HiDreamO1", 3, HIDREAM_O1, scale=8, base=32, multiple=32,
        conditions={
            name: _hidream_o1(name) for name in ("input_ids", "attention_mask", "position_ids", "vinput_mask", "ar_len")
        },
        note="keeps keys and values of the prompt between calls, and compares the prompt with theirs on the host",
    ),
    Architecture("Boogu", 16, BOOGU, timesteps=1.0, conditions=TOKEN_COUNT),
    Architecture(
        "Boogu edit", 16, BOOGU, family="Boogu", timesteps=1.0, conditions=TOKEN_COUNT | {"ref_latents": reference},
    ),
    Architecture("MageFlow", 128, MAGE, timesteps=1.0, clock=_bfloat16),
    Architecture("JoyImage", 16, JOY, dimensions=3, frames=1, multiple=2),
    Architecture("Ideogram4", 128, IDEOGRAM4, timesteps=1.0),
    Architecture(
        "Ideogram4 mask", 128, IDEOGRAM4, family="Ideogram4", timesteps=1.0, conditions={"attention_mask": Draw.mask},
        note="writes by a mask",
    ),
    Architecture(
        "Lens", 128, LENS, timesteps=1.0,
        conditions={"context": lambda draw: draw.prompt(48), "attention_mask": Draw.mask},
    ),
    Architecture("Kandinsky5Image", 16, KANDINSKY_IMAGE, multiple=2),
    Architecture("ErnieImage", 128, ERNIE),
)  # fmt: skip
