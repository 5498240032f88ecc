"""ComfyUI's KL autoencoder of pictures (SD, SDXL, SD3, Flux) in fused operations; all other VAEs are recorded.

``Decoder.forward`` and ``Encoder.forward`` (comfy/ldm/modules/diffusionmodules/model.py) are mirrored; quantisation,
latent batch norm, tiling and everything else around them stay ComfyUI's own code, run on a shallow copy of the
autoencoder whose decoder and encoder are ours. The shared autoencoder is never touched.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.ldm.modules.diffusionmodules.model as blocks
import comfy.ops
import torch
from comfy.ldm.models.autoencoder import AutoencodingEngine
from torch import Tensor, nn

from ..attempt import Theirs, failed
from ..engine import Call, Engine, Settings
from ..key import shape_key
from ..ops import FusedOps
from ..reasons import say
from ..weights import ChannelsLastWeights
from .attach import engine_for
from .compat import outside_memory_plan
from .layers import INTERRUPTS, Survey, autocast, conv, is_altered, norm_of, pointwise, product, to_image, to_tokens

_KNOWN = (
    blocks.Decoder, blocks.Encoder, blocks.ResnetBlock, blocks.AttnBlock, blocks.Upsample, blocks.Downsample,
    nn.Module, nn.ModuleList, nn.SiLU, nn.Dropout,
)  # fmt: skip


def unsupported(model: nn.Module) -> str:
    """Why this autoencoder is not one whose forward is mirrored here; "" if it is."""
    if not isinstance(model, AutoencodingEngine):
        return say("unknown_vae", name=type(model).__name__)
    for part, wanted in ((model.decoder, blocks.Decoder), (model.encoder, blocks.Encoder)):
        foreign = {type(m).__name__ for m in part.modules() if type(m) not in _KNOWN and not _is_layer(m)}
        if type(part) is not wanted or foreign:
            return say("vae_parts", names=", ".join(sorted(foreign)) or type(part).__name__)
    return ""


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv2d, nn.GroupNorm))


def with_fused_parts(model: nn.Module, settings: Settings) -> nn.Module:
    """A shallow copy of the autoencoder: the same layers, weights and code, but a fused decoder and encoder."""
    shadow = copy.copy(model)
    shadow._modules = dict(model._modules)
    pixels = 2 ** (model.decoder.num_resolutions - 1)
    shadow._modules["decoder"] = _fused_part(model.decoder, decode, pixels, settings)
    shadow._modules["encoder"] = _fused_part(model.encoder, encode, 1, settings)
    return shadow


def _fused_part(part: nn.Module, fused: Callable[..., Tensor], pixels: int, settings: Settings) -> nn.Module:
    """A shallow copy of a decoder or encoder whose forward goes through the engine.

    pixels: image pixels a side of one element of the input (8 for a latent, 1 for an image).
    """
    shadow = copy.copy(part)
    shadow._forward_hooks, shadow._forward_pre_hooks = OrderedDict(), OrderedDict()  # or the part's own run twice
    engine = engine_for(part, f"VAE {type(part).__name__.lower()}", "vae", uses_graphs=False)
    shadow.forward = _Forward(engine, part, fused, pixels, settings)
    return shadow


class _Forward:
    """The forward of one decoder or encoder through its engine."""

    def __init__(
        self, engine: Engine, part: nn.Module, fused: Callable[..., Tensor], pixels: int, settings: Settings
    ) -> None:
        self._engine, self._part, self._fused, self._pixels, self._settings = engine, part, fused, pixels, settings

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        """x [N, C, H, W]: a latent for the decoder, an image for the encoder."""
        theirs = Theirs(lambda: self._part(x, **options))
        if torch.compiler.is_compiling():
            return theirs()
        ours = partial(self._through_engine, x, options, theirs)
        return theirs.rescue(ours, failed(self._engine.stats.name, "a forward"), INTERRUPTS)

    def _through_engine(self, x: Tensor, options: dict[str, Any], theirs: Theirs) -> Tensor:
        inputs = {"x": x}
        call = Call(
            key=shape_key(inputs),
            inputs=inputs,
            forward=self._run,
            eager=theirs,
            weights=0,
            width=x.shape[-1] * self._pixels,
            height=x.shape[-2] * self._pixels,
            batch=x.shape[0],
            obstacle=_obstacle(self._part, x, options),
            plain_eager=True,
        )
        with outside_memory_plan():
            return self._engine(call, self._settings)

    def _run(self, ops: FusedOps, tensors: dict[str, Tensor]) -> Tensor:
        layout = ChannelsLastWeights()
        try:
            if ops.channels_last:
                layout.apply(self._part)
            return self._fused(ops, self._part, tensors["x"])
        finally:
            layout.restore()


def _obstacle(part: nn.Module, x: Tensor, options: dict[str, Any]) -> str:
    if torch.is_grad_enabled():
        return say("training", what="VAE")
    if autocast(x.device):
        return autocast(x.device)
    if options:
        return say("unknown_argument", what="VAE", names=", ".join(sorted(options)))
    if x.ndim != 4 or getattr(part, "give_pre_end", False):
        return say("vae_images")
    survey = Survey(part)
    if is_altered(part) or survey.altered:
        return say("foreign_vae", whose=survey.whose())
    if survey.obstacle():
        return survey.obstacle()
    if survey.unknown:
        return say("vae_layers", names=", ".join(sorted(survey.unknown)))
    return ""


def decode(ops: FusedOps, m: blocks.Decoder, z: Tensor) -> Tensor:
    """Decoder.forward; z [N, C, h, w] -> image [N, 3, 8h, 8w]."""
    h = _middle(ops, m.mid, m.conv_in(_laid_out(ops, z)))
    for level in reversed(range(m.num_resolutions)):
        h = _level(ops, m.up[level], h)
        if level != 0:
            h = _upsample(ops, m.up[level].upsample, h)
    h = m.conv_out(ops.group_norm(h, norm_of(m.norm_out, h))).contiguous()
    return torch.tanh(h) if m.tanh_out else h


def encode(ops: FusedOps, m: blocks.Encoder, x: Tensor) -> Tensor:
    """Encoder.forward; image [N, 3, H, W] -> moments [N, 2C, H/8, W/8]."""
    h = m.conv_in(_laid_out(ops, x))
    for level in range(m.num_resolutions):
        h = _level(ops, m.down[level], h)
        if level != m.num_resolutions - 1:
            h = m.down[level].downsample(h)
    h = _middle(ops, m.mid, h)
    return m.conv_out(ops.group_norm(h, norm_of(m.norm_out, h))).contiguous()


def _laid_out(ops: FusedOps, x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if ops.channels_last else x


def _level(ops: FusedOps, level: nn.Module, h: Tensor) -> Tensor:
    for index, block in enumerate(level.block):
        h = res_block(ops, block, h)
        if len(level.attn) > 0:
            h = attn_block(ops, level.attn[index], h)
    return h


def _middle(ops: FusedOps, mid: nn.Module, h: Tensor) -> Tensor:
    h = attn_block(ops, mid.attn_1, res_block(ops, mid.block_1, h))
    return res_block(ops, mid.block_2, h)


def _upsample(ops: FusedOps, m: blocks.Upsample, x: Tensor) -> Tensor:
    """Upsample.forward for images; bf16 included, which old torch versions cannot interpolate."""
    if m.scale_factor != 2.0:
        return m(x)
    x = ops.upsample2x(x, (2 * x.shape[2], 2 * x.shape[3]))
    return m.conv(x) if m.with_conv else x


def res_block(ops: FusedOps, m: blocks.ResnetBlock, x: Tensor) -> Tensor:
    """ResnetBlock.forward without a time embedding; x [N, C, H, W]."""
    h, bias = conv(ops, m.conv1, ops.group_norm(x, norm_of(m.norm1, x)))
    pending = () if bias is None else (bias,)
    h, bias = conv(ops, m.conv2, ops.group_norm(h, norm_of(m.norm2, h), pending=pending))
    if m.in_channels != m.out_channels:
        x = m.conv_shortcut(x) if m.use_conv_shortcut else m.nin_shortcut(x)
    return ops.bias_add(h, bias, x)


def attn_block(ops: FusedOps, m: blocks.AttnBlock, x: Tensor) -> Tensor:
    """AttnBlock.forward; single-head attention over the pixels of x [N, C, H, W]."""
    if not ops.channels_last or m.optimized_attention is not blocks.pytorch_attention:
        return m(x)
    tokens = to_tokens(ops.group_norm(x, norm_of(m.norm, x), silu=False))
    q, k, v = (pointwise(layer, tokens)[:, None] for layer in (m.q, m.k, m.v))
    # SDPA as ComfyUI's pytorch_attention calls it, without its three copies: the tokens lie right already
    out = comfy.ops.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False)
    h, bias = product(ops, m.proj_out, out[:, 0])
    return ops.bias_add(to_image(h, x), bias, x)
