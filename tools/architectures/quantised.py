"""Models of the table with quantised weights, as ComfyUI loads them from a checkpoint, with comfy-kitchen.

Call ``tools.embed.use_comfyui()`` first.
"""

import json

import comfy.ops
import comfy.supported_models
import comfy.supported_models_base
import torch
from comfy import quant_ops
from comfy.model_base import BaseModel
from torch import Tensor, nn

from tools.architectures import TABLE, patchers, version

GROUP = 64  # a layer's sizes are multiples of it, or it stays as it is
TURNED = 256  # columns that are turned together
CONVROT = {"int8_convrot": "int8_tensorwise"}  # weights that are turned before they are rounded, and what they are then
WIDE = (*CONVROT, "convrot_w4a4", "asym_w4a8_int8")  # forms for layers of such columns alone


def has(form: str) -> bool:
    """Whether this ComfyUI has such weights."""
    return CONVROT.get(form, form) in quant_ops.QUANT_ALGOS


def make(name: str, form: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The diffusion model ``name`` with random weights, those of large linear layers in ``form``.

    form: one of ComfyUI's ``QUANT_ALGOS``, or int8_convrot.
    """
    plain = patchers.make(name, dtype).model.diffusion_model
    architecture = TABLE[name]
    kind = getattr(comfy.supported_models, architecture.family_name)
    tiny = dict(architecture.config) | (dict(architecture.newer) if version() > (0, 3, 75) else {})
    config = kind(kind.unet_config | tiny)
    config.unet_config.update(tiny)
    return of_config(config, plain, form, dtype, torch.device("cpu")).diffusion_model


def of_config(
    config: comfy.supported_models_base.BASE, plain: nn.Module, form: str, dtype: torch.dtype, device: torch.device
) -> BaseModel:
    """The model of ``config`` with the weights of the diffusion model ``plain``, large linear layers in ``form``."""
    config.set_inference_dtype(dtype, dtype)  # ComfyUI always names the dtype to compute in with such weights
    config.quant_config = {"mixed_ops": True}
    model = config.get_model({}, "", device=device)
    state: dict[str, Tensor] = {}
    for key, weight in plain.state_dict().items():
        layer = plain.get_submodule(key.rpartition(".")[0])
        large = weight.ndim == 2 and not any(n % GROUP for n in weight.shape)
        if form in WIDE:
            large = large and weight.shape[1] % TURNED == 0
        if key.endswith(".weight") and large and isinstance(layer, nn.Linear):
            state |= quantised(key.removesuffix("weight"), weight, form)
        else:
            state[key] = weight
    model.diffusion_model.load_state_dict(state)
    return model.requires_grad_(False)


def quantised(prefix: str, weight: Tensor, form: str) -> dict[str, Tensor]:
    """A layer's part of a checkpoint."""
    algorithm, turned = CONVROT.get(form, form), form in CONVROT
    layout = quant_ops.get_layout_class(quant_ops.QUANT_ALGOS[algorithm]["comfy_tensor_layout"])
    options = {"is_weight": True, "per_channel": True, "convrot": True} if turned else {}
    numbers, params = layout.quantize(weight, **options)
    said = {"format": algorithm} | ({"convrot": True, "convrot_groupsize": TURNED} if turned else {})
    note = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    parts = {f"weight{end}": tensor for end, tensor in layout.state_dict_tensors(numbers, params).items()}
    return {prefix + name: tensor for name, tensor in (parts | {"comfy_quant": note}).items()}
