"""Full-size models with random weights (speed does not depend on them), and one sampling run as ComfyUI does it.

``bench.zoo`` has more of them, by name.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import comfy.controlnet
import comfy.ldm.wan.vae
import comfy.model_management as mm
import comfy.model_patcher
import comfy.ops
import comfy.sample
import comfy.sd
import comfy.supported_models
import torch
from comfy.cldm.cldm import ControlNet
from comfy.ldm.flux.model import FluxParams
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.model_patcher import ModelPatcher
from comfy.t2i_adapter.adapter import Adapter
from torch import Tensor, nn

SPATIAL = {"image_size": 32, "in_channels": 4, "out_channels": 4, "use_spatial_transformer": True, "legacy": False}
UNETS = {
    "sdxl": (
        comfy.supported_models.SDXL,
        {"model_channels": 320, "num_res_blocks": [2, 2, 2], "channel_mult": (1, 2, 4), "context_dim": 2048,
         "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
         "transformer_depth_middle": 10, "use_linear_in_transformer": True, "adm_in_channels": 2816,
         "num_classes": "sequential", "num_head_channels": 64},
    ),
    "sd15": (
        comfy.supported_models.SD15,
        {"model_channels": 320, "num_res_blocks": [2, 2, 2, 2], "channel_mult": (1, 2, 4, 4), "context_dim": 768,
         "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1, "num_head_channels": -1,
         "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], "use_linear_in_transformer": False,
         "num_heads": 8},
    ),
}  # fmt: skip
FLUX = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 768,
    "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19,
    "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
if "txt_ids_dims" in FluxParams.__dataclass_fields__:  # newer than ComfyUI 0.3.75
    FLUX["txt_ids_dims"] = []
VAE_CONFIG = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
    "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
WAN_VAE = {
    "dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [],
    "temperal_downsample": [False, True, True], "dropout": 0.0,
}  # fmt: skip


# Buffers that a model leaves without values, because a checkpoint has them. All others hold tables that it computed.
EMPTY_BUFFERS = (".pos_embed", ".rope.inv_freq")


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Random weights that keep activations near unit scale, so that fp16 neither overflows nor rounds to nothing."""
    generator = torch.Generator(next(module.parameters()).device).manual_seed(seed)
    for parameter in module.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 0
        value = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter.data.copy_(value * fan_in**-0.5 if fan_in else value * 0.1)
    for layer in module.modules():
        if isinstance(layer, (nn.GroupNorm, nn.LayerNorm)) and layer.weight is not None:
            layer.weight.data.add_(1.0)
        if type(layer).__name__ == "RMSNorm":  # torch's, or a model's own, which may call the weight scale or have none
            scale = getattr(layer, "scale", getattr(layer, "weight", None))
            if scale is not None:
                scale.data.add_(1.0)
    for name, buffer in module.named_buffers():
        if f".{name}".endswith(EMPTY_BUFFERS):
            value = torch.randn(buffer.shape, generator=generator, device=generator.device)
            buffer.data.copy_(value * 0.02)  # which may lie elsewhere than the parameters
    module.requires_grad_(False)


def unet(name: str, dtype: torch.dtype = torch.float16, **changes: object) -> ModelPatcher:
    """The UNet ``name`` ("sdxl" or "sd15"), on ComfyUI's device; ``changes`` to its config make a smaller one."""
    family, config = UNETS[name]
    model_config = family(SPATIAL | config | changes)
    model_config.unet_config.update({k: v for k, v in config.items() if k in ("num_heads", "num_head_channels")})
    model_config.unet_config.update(changes)
    return random_model(model_config, dtype)


def flux(dtype: torch.dtype = torch.bfloat16, **changes: object) -> ModelPatcher:
    """Flux.1 dev, on ComfyUI's device; ``changes`` to its config make a smaller one or another Flux."""
    config = FLUX | changes
    family = comfy.supported_models.Flux if config["guidance_embed"] else comfy.supported_models.FluxSchnell
    return random_model(family(config), dtype)


def random_model(model_config: comfy.supported_models_base.BASE, dtype: torch.dtype) -> ModelPatcher:
    """The model of a config, made and filled with random weights on ComfyUI's device."""
    model_config.set_inference_dtype(dtype, None)
    device = mm.get_torch_device()
    model = model_config.get_model({}, "", device=device)
    randomise(model)
    return ModelPatcher(model, load_device=device, offload_device=mm.unet_offload_device())


def controlnet(
    name: str, dtype: torch.dtype = torch.float16, cast_to: torch.dtype | None = None, **changes: object
) -> comfy.controlnet.ControlNet:
    """A ControlNet for the UNet ``name``, on ComfyUI's device; ``changes`` to its config make a smaller or a union one.

    cast_to: the dtype that weights are cast to at each call, as on hardware that cannot compute in theirs.
    """
    return _controlnet(SPATIAL | UNETS[name][1] | changes, dtype, cast_to)


def controlnet_for(patcher: ModelPatcher) -> comfy.controlnet.ControlNet:
    """A ControlNet for the UNet of ``patcher``, in its dtypes."""
    config = {name: value for name, value in patcher.model.model_config.unet_config.items() if name != "out_channels"}
    control = _controlnet(config, patcher.model.get_dtype(), patcher.model.manual_cast_dtype)
    control.control_model.to(mm.unet_offload_device())  # where ComfyUI's loader leaves it
    return control


def _controlnet(
    config: dict[str, object], dtype: torch.dtype, cast_to: torch.dtype | None
) -> comfy.controlnet.ControlNet:
    device = mm.get_torch_device()
    operations = comfy.ops.disable_weight_init if cast_to is None else comfy.ops.manual_cast
    layers = {
        "hint_channels": config.get("hint_channels", 3),
        "dtype": dtype,
        "device": device,
        "operations": operations,
    }
    model = ControlNet(**config | layers).eval()
    randomise(model)  # zero convolutions too: a trained ControlNet's are not zero
    return comfy.controlnet.ControlNet(model, load_device=device, manual_cast_dtype=cast_to)


def control_lora(patcher: ModelPatcher, rank: int = 4, seed: int = 0) -> comfy.controlnet.ControlLora:
    """A Control-LoRA of random weights for the UNet of ``patcher``, through ComfyUI's loader.

    It has small matrices for each product and convolution that the UNet has too, and weights for all others.
    """
    network, theirs = controlnet_for(patcher).control_model, patcher.model.diffusion_model.state_dict()
    generator = torch.Generator().manual_seed(seed)
    weights = {"lora_controlnet": torch.zeros(0)}
    for name, weight in network.state_dict().items():
        if name not in theirs:
            weights[name] = weight.cpu()
        elif weight.ndim > 1:
            layer, rows = name.removesuffix(".weight"), weight.flatten(1)
            weights[f"{layer}.up"] = torch.randn(len(rows), rank, generator=generator) * 0.1
            weights[f"{layer}.down"] = torch.randn(rank, rows.shape[1], generator=generator) * rows.shape[1] ** -0.5
    return comfy.controlnet.load_controlnet_state_dict(weights)


def t2i_adapter(name: str, **changes: object) -> comfy.controlnet.T2IAdapter:
    """A T2I-Adapter for the UNet ``name`` in float32, through ComfyUI's loader; ``changes`` to the UNet's config."""
    channels = (UNETS[name][1] | changes)["model_channels"]
    sizes, cin = [channels * factor for factor in (1, 2, 4, 4)], 768 if name == "sdxl" else 192
    model = Adapter(cin=cin, channels=sizes, nums_rb=2, ksize=1, sk=True, use_conv=False, xl=name == "sdxl")
    randomise(model)
    return comfy.controlnet.load_t2i_adapter(model.state_dict())


def vae(dtype: torch.dtype | None = None, **changes: object) -> comfy.sd.VAE:
    """The KL autoencoder of SD and SDXL."""
    config = VAE_CONFIG | changes
    model = AutoencoderKL(ddconfig=config, embed_dim=config["z_channels"])
    randomise(model)
    return comfy.sd.VAE(
        sd=model.state_dict(), config={"params": {"ddconfig": config, "embed_dim": config["z_channels"]}}, dtype=dtype
    )


def flux_vae(dtype: torch.dtype | None = None) -> comfy.sd.VAE:
    """That of SD3 and Flux: 16 channels and no quantisation layers, which ComfyUI builds from another class."""
    config, blocks = VAE_CONFIG | {"z_channels": 16}, "comfy.ldm.modules.diffusionmodules.model."
    model = AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": blocks + "Encoder", "params": config},
        decoder_config={"target": blocks + "Decoder", "params": config},
    )
    randomise(model)
    return comfy.sd.VAE(sd=model.state_dict(), dtype=dtype)


def wan_vae(dtype: torch.dtype | None = None, **changes: object) -> comfy.sd.VAE:
    """That of Wan 2.1 and Qwen-Image: videos, in pieces of four frames. Its norms have scales near 1."""
    model = comfy.ldm.wan.vae.WanVAE(**WAN_VAE | changes)
    randomise(model)
    for layer in model.modules():
        if isinstance(layer, comfy.ldm.wan.vae.RMS_norm):
            layer.gamma.data.add_(1.0)
    return comfy.sd.VAE(sd=model.state_dict(), dtype=dtype)


# What a prompt of a model is ---------------------------------------------------------------------------------------


class Traits(NamedTuple):
    """What a kind of model takes: its prompts, how it is usually sampled, what a pixel of its latents stands for."""

    tokens: int
    width: Callable[[dict[str, Any]], int]  # of a token, from the model's config
    pooled: Callable[[dict[str, Any]], int] = lambda config: 1
    extra: Callable[[int], dict[str, Any]] = lambda tokens: {}  # more entries of a CONDITIONING
    cfg: float = 1.0
    scheduler: str = "simple"
    scale: int = 8  # image pixels a latent pixel, per side
    frames: int = 4  # of a video, a latent frame; the first one stands for itself
    channels: int = 0  # of pictures, where the latent's format counts those of sound too
    sound: Callable[[int], tuple[int, ...]] | None = None  # the shape of its latent with so many latent frames


def _sd3_width(config: dict[str, Any]) -> int:
    return config["context_embedder_config"]["params"]["in_features"]


def _guidance(tokens: int) -> dict[str, Any]:
    return {"guidance": 3.5}


def _mask(tokens: int) -> dict[str, Any]:
    return {"attention_mask": torch.ones(1, tokens, dtype=torch.int64)}


UNET = Traits(77, lambda config: config["context_dim"], lambda config: 1280, cfg=7.0, scheduler="normal")
TRAITS = {  # by class of comfy.model_base; everything else is a UNet
    "Flux": Traits(512, lambda c: c["context_in_dim"], lambda c: c["vec_in_dim"], _guidance),
    "Flux2": Traits(512, lambda c: c["context_in_dim"], scale=16),
    "Chroma": Traits(256, lambda c: c["context_in_dim"], extra=lambda tokens: {"guidance": 0.0}),
    "SD3": Traits(154, _sd3_width, lambda c: c["adm_in_channels"], cfg=5.0),
    "Lumina2": Traits(100, lambda c: c["cap_feat_dim"]),
    "QwenImage": Traits(100, lambda c: c.get("joint_attention_dim", 3584)),
    "WAN21": Traits(512, lambda c: c.get("text_dim", 4096)),
    "Anima": Traits(512, lambda c: c.get("crossattn_emb_channels", 1024)),
    "CosmosPredict2": Traits(512, lambda c: c["crossattn_emb_channels"]),
    "LTXV": Traits(256, lambda c: c["caption_channels"], extra=_mask, scale=32, frames=8),
    "LTXAV": Traits(
        1024,
        lambda c: 2 * c["caption_channels"],
        scale=32,
        frames=8,
        channels=128,
        sound=lambda time: (8, 8 * time, 16),
    ),
    "MiniMaxH3": Traits(
        256, lambda c: c.get("text_dim", 5120), scale=16, channels=24, sound=lambda time: (32, 2, 4 * time)
    ),
    "Krea2": Traits(128, lambda c: c["txtlayers"] * c["txtdim"]),
}


def traits(patcher: ModelPatcher) -> Traits:
    """Those of the nearest class that is known."""
    names = (each.__name__ for each in type(patcher.model).__mro__)
    return next((TRAITS[name] for name in names if name in TRAITS), UNET)


def conditioning(patcher: ModelPatcher, tokens: int | None = None, seed: int = 0) -> list:
    """A random prompt as CONDITIONING, with the pooled embedding and whatever else the model takes.

    tokens: as many as are usual for the model (77 for a UNet, 512 for Flux), if not given.
    """
    generator = torch.Generator().manual_seed(seed)
    config, kind = patcher.model.model_config.unet_config, traits(patcher)
    tokens = tokens or kind.tokens
    pooled = torch.randn(1, kind.pooled(config), generator=generator)
    prompt = torch.randn(1, tokens, kind.width(config), generator=generator)
    return [[prompt, {"pooled_output": pooled} | kind.extra(tokens)]]


def empty_latent(patcher: ModelPatcher, width: int, height: int, batch: int = 1, frames: int = 1) -> Tensor:
    """Zeros [batch, C, H, W], or [batch, C, T, H, W] for a model of videos; sizes in image pixels.

    Of a model of videos with sound both, as ComfyUI nests them.
    """
    kind, form = traits(patcher), patcher.model.latent_format
    time = [(frames - 1) // kind.frames + 1] if form.latent_dimensions == 3 else []
    channels = kind.channels or form.latent_channels
    latent = torch.zeros(batch, channels, *time, height // kind.scale, width // kind.scale)
    if kind.sound is None:
        return latent
    from comfy.nested_tensor import NestedTensor

    return NestedTensor([latent, torch.zeros(batch, *kind.sound(time[0]))])


def sample(
    patcher: ModelPatcher, width: int, height: int, batch: int = 1, steps: int = 20, cfg: float | None = None,
    tokens: int | None = None, seed: int = 0, sampler: str = "euler", scheduler: str | None = None,
    steer: Callable[[list, list], tuple[list, list]] | None = None, callback: Callable[..., None] | None = None,
    frames: int = 1,
) -> Tensor:  # fmt: skip
    """One txt2img run through ``comfy.sample``; the latent, as large as that of ``empty_latent``.

    If not given, ``cfg`` and ``scheduler`` are those of the model's ``Traits``. ``steer``: what a node does to the
    positive and the negative CONDITIONING; ``callback``: the sampler's; ``frames``: of a video.
    """
    latent, usual = empty_latent(patcher, width, height, batch, frames), traits(patcher)
    noise = comfy.sample.prepare_noise(latent, seed)
    positive, negative = (conditioning(patcher, tokens, seed + i) for i in (1, 2))
    if steer is not None:
        positive, negative = steer(positive, negative)
    cfg, scheduler = usual.cfg if cfg is None else cfg, scheduler or usual.scheduler
    with torch.inference_mode():
        return comfy.sample.sample(
            patcher, noise, steps, cfg, sampler, scheduler, positive, negative, latent, callback=callback, seed=seed,
            disable_pbar=True,
        )  # fmt: skip
