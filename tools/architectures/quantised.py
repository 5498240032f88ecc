"""Models of the table with quantised weights, as ComfyUI loads them from a checkpoint, with comfy-kitchen.

Call ``tools.embed.use_comfyui()`` first.
"""

import json

import comfy.ops
import comfy.supported_models
import torch
from comfy import quant_ops
from torch import Tensor, nn

from tools.architectures import TABLE, patchers, version

GROUP = 64  # a layer's sizes are multiples of it, or it stays as it is


def make(name: str, form: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The diffusion model ``name`` with random weights, those of large linear layers in ``form`` (``QUANT_ALGOS``)."""
    plain = patchers.make(name, dtype).model.diffusion_model
    architecture = TABLE[name]
    kind = getattr(comfy.supported_models, architecture.family_name)
    tiny = dict(architecture.config) | (dict(architecture.newer) if version() > (0, 3, 75) else {})
    config = kind(kind.unet_config | tiny)
    config.unet_config.update(tiny)
    config.set_inference_dtype(dtype, None)
    config.quant_config = {"mixed_ops": True}
    model = config.get_model({}, "", device="cpu").diffusion_model
    state: dict[str, Tensor] = {}
    for key, weight in plain.state_dict().items():
        layer = plain.get_submodule(key.rpartition(".")[0])
        large = weight.ndim == 2 and not any(n % GROUP for n in weight.shape)
        if key.endswith(".weight") and large and isinstance(layer, nn.Linear):
            state |= quantised(key.removesuffix("weight"), weight, form)
        else:
            state[key] = weight
    model.load_state_dict(state)
    return model.requires_grad_(False)


def quantised(prefix: str, weight: Tensor, form: str) -> dict[str, Tensor]:
    """A layer's part of a checkpoint."""
    layout = quant_ops.get_layout_class(quant_ops.QUANT_ALGOS[form]["comfy_tensor_layout"])
    numbers, params = layout.quantize(weight)
    note = torch.frombuffer(bytearray(json.dumps({"format": form}).encode()), dtype=torch.uint8)
    scales = {"weight_scale": params.scale}
    if form == "nvfp4":  # a scale for each block, and one for all
        scales = {"weight_scale": params.block_scale, "weight_scale_2": params.scale}
    parts = {"weight": numbers, "comfy_quant": note} | scales
    return {prefix + name: tensor for name, tensor in parts.items()}
