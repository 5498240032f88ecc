"""The models of the table, made: real ModelPatchers around real models. Call `tools.embed.use_comfyui()` first."""

from typing import Any

import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from tools.architectures import TABLE, version
from tools.architectures.table import moved, parts_of

# Buffers that are read from a checkpoint, and hold nothing until then.
EMPTY_BUFFERS = ("pos_embed", "y_embedding", "positive_conditioning", "negative_conditioning")


# The numbers of blocks among a model's settings.
BLOCKS = ("depth", "depth_single_blocks", "num_layers", "n_layers", "num_blocks", "num_visual_blocks", "layers")


def make(
    name: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0, blocks: int = 0
) -> ModelPatcher:
    """The model ``name`` with random weights that are the same for the same ``seed``.

    blocks: how many each of its lists of blocks has, if not as many as the table says.
    """
    architecture = TABLE[name]
    kind = getattr(comfy.supported_models, architecture.family_name)
    tiny = dict(architecture.config) | (dict(architecture.newer) if version() > (0, 3, 75) else {})
    if blocks:
        tiny |= {key: blocks for key in BLOCKS if isinstance(tiny.get(key), int)}
        if "context_embedder_config" in tiny:  # SD3 has 64 channels for each of its blocks
            embedder = tiny["context_embedder_config"]
            params = embedder["params"] | {"out_features": 64 * blocks}
            tiny["context_embedder_config"] = embedder | {"params": params}
    config = kind(kind.unet_config | tiny)
    config.unet_config.update(tiny)  # over what the class adds by itself
    config.set_inference_dtype(dtype, None)
    state = architecture.state(architecture.config) if architecture.state else {}
    device = torch.device(device)
    with torch.no_grad():
        model = config.get_model(state, "", device=device)
        if architecture.finish:
            architecture.finish(model.diffusion_model)
        randomise(model, seed, architecture.centred)
    return ModelPatcher(model.to(device), load_device=device, offload_device=device)


def randomise(model: nn.Module, seed: int = 0, centred: bool = False) -> None:
    """Random weights near unit gain, so that activations stay near unit scale whatever the model's depth.

    Layers that a training begins at zero get random weights too: else nothing would flow through them. ``centred``:
    the weights of its norms are differences from 1.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        norm = "Norm" in type(layer).__name__
        for name, weight in layer.named_parameters(recurse=False):
            value = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                value *= weight[0].numel() ** -0.5
            else:
                value *= 0.1
            gain = norm and not centred and weight.ndim == 1 and "bias" not in name
            if gain or name == "weights":  # shares of a sum, which divides by them
                value += 1.0
            weight.data.copy_(value)
        for name, buffer in layer.named_buffers(recurse=False):
            if name in EMPTY_BUFFERS:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    model.requires_grad_(False)


def forward(patcher: ModelPatcher, name: str, k: int) -> Tensor:
    """The diffusion model's result for variant ``k``, or its first part, called as inside a sampling run."""
    arguments, named = TABLE[name].inputs(k)
    options = patcher.model_options["transformer_options"] | named["transformer_options"]
    named["transformer_options"] = options | {"wrappers": patcher.wrappers}
    with torch.inference_mode():
        return parts_of(patcher.model.diffusion_model(*arguments, **named))[0]


def apply(patcher: ModelPatcher, k: int, name: str, options: dict[str, Any] | None = None) -> list[Tensor]:
    """The parts of what ``apply_model`` gives for variant ``k``, called as the sampler does.

    That is with a sigma instead of a time step, and with the added channels by themselves.
    """
    architecture, model = TABLE[name], patcher.model
    device = patcher.load_device
    parts = moved(architecture.request(k, torch.float32), device)
    conditions, latents = parts["conditions"], parts_of(parts["latent"])
    sigma = float(model.model_sampling.percent_to_sigma(0.1 + 0.8 * (k % 7) / 7))
    latent = latents[0]
    if len(latents) > 1:  # as the sampler packs them
        latent, conditions["latent_shapes"] = comfy.utils.pack_latents(latents)
    out = model.apply_model(
        latent,
        torch.full((latent.shape[0],), sigma, device=device),
        c_concat=parts["concat"],
        c_crossattn=conditions.pop("context", None),
        transformer_options=parts["options"] | (options or {}),
        **conditions,
    )
    return comfy.utils.unpack_latents(out, conditions["latent_shapes"]) if len(latents) > 1 else [out]
