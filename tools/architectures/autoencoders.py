"""Every VAE of ComfyUI's in a tiny configuration with random weights, and latents and pictures of many sizes for each.

    from tools.architectures import autoencoders

    for entry in autoencoders.present():                      # those that this ComfyUI has
        vae = autoencoders.make(entry.name)                   # a real comfy.sd.VAE around the real first-stage model
        out = vae.first_stage_model.decode(*entry.inputs("decode", 3))

``comfy.sd.VAE`` tells a VAE by its weights and builds it full size. So the tiny model is made first, and given to the
constructor in place of the full-size one; everything else is what that does.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tools.architectures import version

VARIANTS = 4
# Height and width of a latent (halved where one of its elements is many pixels, or a video), its frames, the batch.
SIZES = ((4, 6), (5, 4), (3, 7), (4, 4))
FRAMES = (4, 5, 3, 1)
BATCHES = (1, 2, 1, 3)
WAYS = ("decode", "encode")

KL = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 2, 4, 4], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
HUNYUAN = {
    "in_channels": 3, "out_channels": 3, "num_res_blocks": 1, "downsample_match_channel": True,
    "upsample_match_channel": True,
}  # fmt: skip
HUNYUAN_VIDEO = HUNYUAN | {
    "block_out_channels": [32, 32, 32, 64, 64], "ffactor_spatial": 16, "ffactor_temporal": 4, "z_channels": 32,
}  # fmt: skip
WAN = {
    "dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "attn_scales": [],
    "temperal_downsample": [False, True, True], "dropout": 0.0,
}  # fmt: skip
COSMOS = {
    "z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 1024, "in_channels": 3, "out_channels": 3,
    "channels": 32, "channels_mult": [2, 4, 4], "num_res_blocks": 1, "attn_resolutions": [32], "dropout": 0.0,
    "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Autoencoder:
    """A VAE in a tiny configuration.

    build: the first-stage model. target: what comfy.sd.VAE calls to make it, as "module:name".
    channels, dimensions: of its latent (3 with frames, 1 for sound). scale: pixels, or samples, of one of its elements.
    frames: what a latent's frames are in pictures. colours: channels of a picture.
    ways: what it can do. latent: a latent of other dimensions, from (batch, height, width, frames).
    since: the first ComfyUI that has it.
    marks: names of weights that comfy.sd.VAE tells the class by, and that the tiny model lacks. batches: that it takes.
    """

    name: str
    build: Callable[[], nn.Module]
    target: str
    channels: int
    dimensions: int = 2
    scale: int = 8
    frames: Callable[[int], int] = lambda frames: frames
    colours: int = 3
    ways: tuple[str, ...] = WAYS
    latent: Callable[[int, int, int, int], tuple[int, ...]] | None = None
    since: tuple[int, ...] = ()
    marks: tuple[str, ...] = ()
    batches: tuple[int, ...] = BATCHES

    def shape(self, way: str, k: int) -> tuple[int, ...]:
        """Of what variant ``k`` decodes or encodes."""
        many = self.scale > 8 or self.dimensions == 3
        height, width = ((side + 1) // 2 if many else side for side in SIZES[k % len(SIZES)])
        batch, frames = self.batches[k % len(self.batches)], FRAMES[k % len(FRAMES)]
        if self.dimensions == 1:
            length = height * width
            return (batch, self.channels, length) if way == "decode" else (batch, self.colours, length * self.scale)
        time = (frames,) if self.dimensions == 3 else ()
        if way == "decode":
            if self.latent:
                return self.latent(batch, height, width, frames)
            return (batch, self.channels, *time, height, width)
        time = (self.frames(frames),) if time else ()
        return (batch, self.colours, *time, height * self.scale, width * self.scale)

    def inputs(self, way: str, k: int) -> tuple[Tensor]:
        """The arguments of ``decode`` or ``encode`` for variant ``k``: random, the same for the same ``k``."""
        generator = torch.Generator().manual_seed(100 + k)
        return (torch.randn(self.shape(way, k), generator=generator),)


def _class(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _engine(encoder: str, decoder: str, config: dict, regularizer: str = "Diagonal", **more: Any) -> nn.Module:
    """comfy's AutoencodingEngine of these two."""
    regularizers = {"Diagonal": "DiagonalGaussianRegularizer", "Empty": "EmptyRegularizer"}
    return _class("comfy.ldm.models.autoencoder:AutoencodingEngine")(
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizers[regularizer]}"},
        encoder_config={"target": encoder, "params": config},
        decoder_config={"target": decoder, "params": config | more},
    )


def _kl(**changes: Any) -> nn.Module:
    config = KL | changes
    return _class("comfy.ldm.models.autoencoder:AutoencoderKL")(ddconfig=config, embed_dim=config["z_channels"])


def _known(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """What of ``given`` this ComfyUI's class takes."""
    return {name: value for name, value in given.items() if name in inspect.signature(kind).parameters}


def _wan(kind: str, **changes: Any) -> nn.Module:
    made = _class(kind)
    return made(**_known(made, WAN | changes))


def _mochi() -> nn.Module:
    kind = _class("comfy.ldm.genmo.vae.model:VideoVAE")
    module = importlib.import_module("comfy.ldm.genmo.vae.model")
    narrow = {"num_res_blocks": [1, 1, 1, 1, 1]}
    with (
        _narrowed(module, "Encoder", base_channels=32, **narrow),
        _narrowed(module, "Decoder", base_channels=32, **narrow),
    ):
        return kind()


@contextlib.contextmanager
def _narrowed(module: Any, name: str, **changes: Any) -> Iterator[None]:
    """The class ``name`` of ``module`` is made with these arguments over its own."""
    kind = getattr(module, name)
    with mock.patch.object(module, name, lambda *args, **given: kind(*args, **given | changes)):
        yield


def _ltx(version: int) -> nn.Module:
    config = {
        "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "norm_layer": "pixel_norm",
        "patch_size": 4, "latent_log_var": "uniform", "causal_decoder": False, "timestep_conditioning": version == 1,
        "encoder_blocks": [
            ["res_x", 1], ["compress_all", 1], *[["res_x_y", 1], ["compress_all", 1]] * 2, ["res_x", 1],
        ],
        "decoder_blocks": [
            ["res_x", {"num_layers": 1, "inject_noise": version == 1}],
            ["compress_all", {"residual": True, "multiplier": 2}],
            ["res_x", {"num_layers": 1, "inject_noise": version == 1}],
            ["compress_all", {"residual": True, "multiplier": 2}],
            ["res_x", {"num_layers": 1, "inject_noise": False}], ["compress_all", {"residual": True, "multiplier": 2}],
            ["res_x", {"num_layers": 1, "inject_noise": False}],
        ],
    }  # fmt: skip
    module = importlib.import_module("comfy.ldm.lightricks.vae.causal_video_autoencoder")
    narrow = {"base_channels": 32}  # which older ComfyUIs do not read from the configuration
    with _narrowed(module, "Encoder", **narrow), _narrowed(module, "Decoder", **narrow):
        return module.VideoVAE(version=version, config=config)


def _stage_c() -> nn.Module:
    module = importlib.import_module("comfy.ldm.cascade.stage_c_coder")
    with _narrowed(module, "Previewer", c_hidden=32):
        return module.StageC_coder()


def _mage() -> nn.Module:
    module = importlib.import_module("comfy.ldm.mage_flow.vae")
    small = {"hidden_size": 64}
    with (
        _narrowed(module, "DConvEncoder", **small, num_blocks=1, head_size=64, num_head_blocks=1),
        _narrowed(module, "DConvDenoiser", **small, num_blocks=3, num_cond_blocks=2),
    ):
        return module.MageVAE()


def _minimax() -> nn.Module:
    module = importlib.import_module("comfy.ldm.minimax.vae")
    with _narrowed(module, "ViT3DDecoder", num_layers=2, heads=2, dim_head=32):
        return module.MiniMaxH3VideoVAE(ch=32, ch_mult=(1, 1, 1, 2, 2, 2), num_res_blocks=1)


def _seedvr() -> nn.Module:
    module = importlib.import_module("comfy.ldm.seedvr.vae")
    with mock.patch.object(module, "BYTEDANCE_BLOCK_OUT_CHANNELS", (32, 32, 64, 64)):
        return module.VideoAutoencoderKLWrapper()


def present(comfyui: Path | None = None) -> list[Autoencoder]:
    """The entries that this ComfyUI has."""
    this = version(comfyui)
    return [entry for entry in TABLE.values() if this >= entry.since]


def model(name: str, seed: int = 0) -> nn.Module:
    """The first-stage model of ``name``, with random weights that are the same for the same ``seed``."""
    from tools.architectures import patchers

    made = TABLE[name].build().eval()
    patchers.randomise(made, seed)
    generator = torch.Generator().manual_seed(seed)
    for path, buffer in made.named_buffers():  # statistics, which come from a checkpoint
        if buffer.is_floating_point() and any(part in path for part in ("running_", "-of-", "latents_")):
            spread = torch.rand(buffer.shape, generator=generator)
            buffer.copy_(spread - 0.5 if "mean" in path and "std-" not in path else 0.5 + spread)
    return made


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A ``comfy.sd.VAE`` around ``model``, made by ComfyUI's own constructor."""
    import comfy.sd

    entry, tiny = TABLE[name], model(name, seed)
    place, _, attribute = entry.target.partition(":")
    weights = tiny.state_dict()
    for mark in entry.marks:  # perhaps one of the model's own, by the name that a checkpoint has for it
        weights.setdefault(mark, weights.get(mark.partition(".")[2], torch.zeros(1)))
    with mock.patch.object(importlib.import_module(place), attribute, lambda *args, **kwargs: tiny):
        return comfy.sd.VAE(sd=weights, dtype=dtype)


def _first(frames: int, each: int) -> int:
    """The first latent frame is one picture, the others are ``each``."""
    return 1 + (frames - 1) * each


SD = "comfy.sd:"
REFINER = "comfy.ldm.hunyuan_video.vae_refiner."
BLOCKS = "comfy.ldm.modules.diffusionmodules.model."
TABLE = {
    entry.name: entry
    for entry in (
        Autoencoder("SD", _kl, SD + "AutoencoderKL", 4),
        Autoencoder("SD x4 upscaler", lambda: _kl(ch_mult=[1, 2, 4]), SD + "AutoencoderKL", 4, scale=4),
        Autoencoder(
            "Flux",
            lambda: _engine(BLOCKS + "Encoder", BLOCKS + "Decoder", KL | {"z_channels": 16}),
            SD + "AutoencodingEngine", 16,
        ),
        Autoencoder("Flux.2", lambda: _kl(z_channels=32, batch_norm_latent=True), SD + "AutoencoderKL", 128, scale=16),
        Autoencoder(
            "SVD",
            lambda: _engine(
                BLOCKS + "Encoder", "comfy.ldm.modules.temporal_ae.VideoDecoder", KL, video_kernel_size=[3, 1, 1],
                alpha=0.0,
            ),
            SD + "AutoencodingEngine", 4,
        ),
        Autoencoder("TAESD", lambda: _class("comfy.taesd.taesd:TAESD")(), "comfy.taesd.taesd:TAESD", 4),
        Autoencoder(
            "TAESD Flux.2", lambda: _class("comfy.taesd.taesd:TAESD")(latent_channels=128), "comfy.taesd.taesd:TAESD",
            128, scale=16, since=(0, 4),
        ),
        Autoencoder(
            "Cascade stage A",
            lambda: _class("comfy.ldm.cascade.stage_a:StageA")(c_hidden=32, bottleneck_blocks=2, codebook_size=16),
            SD + "StageA", 4, scale=4,
        ),
        Autoencoder("Cascade stage C", _stage_c, SD + "StageC_coder", 16, scale=32),
        Autoencoder(
            "HunyuanImage 2.1",
            lambda: _engine(
                "comfy.ldm.hunyuan_video.vae.Encoder", "comfy.ldm.hunyuan_video.vae.Decoder",
                HUNYUAN | {"block_out_channels": [32, 32, 64, 64, 128, 128], "ffactor_spatial": 32, "z_channels": 64},
            ),
            SD + "AutoencodingEngine", 64, scale=32,
        ),
        Autoencoder(
            "HunyuanImage 2.1 refiner",
            lambda: _engine(REFINER + "Encoder", REFINER + "Decoder", HUNYUAN_VIDEO | {"refiner_vae": False}),
            SD + "AutoencodingEngine", 32, 3, 16, lambda frames: 4 * frames,
        ),
        Autoencoder(
            "HunyuanVideo 1.5",
            lambda: _engine(REFINER + "Encoder", REFINER + "Decoder", HUNYUAN_VIDEO, "Empty"),
            SD + "AutoencodingEngine", 32, 3, 16, lambda frames: _first(frames, 4),
        ),
        Autoencoder(
            "HunyuanVideo", lambda: _kl(conv3d=True, time_compress=4, z_channels=16), SD + "AutoencoderKL", 16, 3, 8,
            lambda frames: _first(frames, 4),
        ),
        Autoencoder(
            "Wan 2.1, Qwen-Image", lambda: _wan("comfy.ldm.wan.vae:WanVAE", z_dim=16), "comfy.ldm.wan.vae:WanVAE", 16,
            3, 8, lambda frames: _first(frames, 4),
        ),
        Autoencoder(
            "Wan 2.2", lambda: _wan("comfy.ldm.wan.vae2_2:WanVAE", z_dim=48, dec_dim=16),
            "comfy.ldm.wan.vae2_2:WanVAE", 48, 3, 16, lambda frames: _first(frames, 4),
        ),
        Autoencoder(
            "Mochi", _mochi, "comfy.ldm.genmo.vae.model:VideoVAE", 12, 3, 8, lambda frames: _first(frames, 6),
            marks=("decoder.blocks.2.blocks.3.stack.5.weight",),
        ),
        Autoencoder(
            "LTX", lambda: _ltx(0), "comfy.ldm.lightricks.vae.causal_video_autoencoder:VideoVAE", 128, 3, 32,
            lambda frames: _first(frames, 8),
        ),
        Autoencoder(
            "LTX 0.9.5", lambda: _ltx(1), "comfy.ldm.lightricks.vae.causal_video_autoencoder:VideoVAE", 128, 3, 32,
            lambda frames: _first(frames, 8), batches=(1,),
        ),
        Autoencoder(
            "Cosmos", lambda: _class("comfy.ldm.cosmos.vae:CausalContinuousVideoTokenizer")(**COSMOS),
            "comfy.ldm.cosmos.vae:CausalContinuousVideoTokenizer", 16, 3, 8, lambda frames: _first(frames, 8),
            marks=("decoder.unpatcher3d.wavelets",),
        ),
        Autoencoder(
            "TAEHV", lambda: _class("comfy.taesd.taehv:TAEHV")(latent_channels=16), "comfy.taesd.taehv:TAEHV", 16, 3,
            8, lambda frames: 4 * frames,
        ),
        Autoencoder(
            "CogVideoX",
            lambda: _class("comfy.ldm.cogvideo.vae:AutoencoderKLCogVideoX")(
                latent_channels=16, block_out_channels=(32, 32, 32, 32), layers_per_block=1
            ),
            "comfy.ldm.cogvideo.vae:AutoencoderKLCogVideoX", 16, 3, 8, lambda frames: _first(frames, 4), since=(0, 4),
        ),
        Autoencoder(
            "Mage-Flow", _mage, "comfy.ldm.mage_flow.vae:MageVAE", 128, scale=16, since=(0, 4),
            marks=("student.dconv_encoder.proj_out.weight",),
        ),
        Autoencoder(
            "SeedVR2", _seedvr, "comfy.ldm.seedvr.vae:VideoAutoencoderKLWrapper", 16, 3, 8,
            lambda frames: _first(frames, 4), since=(0, 4),
        ),
        Autoencoder(
            "MiniMax H3", _minimax, "comfy.ldm.minimax.vae:MiniMaxH3VideoVAE", 24, 3, 16,
            lambda frames: _first(frames, 4), since=(0, 4),
        ),
        Autoencoder(
            "Stable Audio",
            lambda: _class("comfy.ldm.audio.autoencoder:AudioOobleckVAE")(channels=8),
            SD + "AudioOobleckVAE", 64, 1, 2048, colours=2,
        ),
    )
}  # fmt: skip
