"""What a forward depends on outside its model: attention's backend, torch's settings, the user's interrupt."""

import comfy.ldm.modules.attention as attention
import comfy.model_management
import torch

from ..reasons import say

INTERRUPTS: tuple[type[BaseException], ...] = (comfy.model_management.InterruptProcessingException,)
_PRECISION = (
    "allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
)  # fmt: skip


def autocast(device: torch.device) -> str:
    """Why what was recorded is not right under torch's autocast; "" if it is off."""
    return say("autocast") if torch.is_autocast_enabled(device.type) else ""


def surroundings() -> int:
    """Changes with what decides a forward's result besides its inputs and weights, and that users and packs switch.

    Attention's backend, and how torch multiplies: a graph holds what was set when it was captured.
    """
    matmul, cuda = torch.backends.cuda.matmul, torch.backends.cuda
    precision = (getattr(matmul, name, None) for name in _PRECISION)  # not allow_tf32: reading it may raise
    sdpa = (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    )  # fmt: skip
    backends = (attention.optimized_attention, attention.optimized_attention_masked)
    return hash((*precision, torch.backends.cudnn.enabled, *sdpa, *backends))
