"""What each block of a UNet costs, to choose how deep a skipped step goes."""

from collections.abc import Iterable

from comfy.ldm.modules.attention import BasicTransformerBlock
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, ResBlock, UNetModel, Upsample
from torch import nn

from .unet_stages import ending

TEXT_TOKENS = 77


def shares(model: UNetModel, height: int, width: int) -> list[float]:
    """For each depth, the share of a forward's FLOPs that a skipped step pays; latent of height x width.

    Depth k runs input blocks 0..k, the last k + 1 output blocks and the upsampling before them, if there is one.
    """
    pixels, down, up, upsamplings = height * width, [], [], []
    for stage in model.input_blocks:
        down.append(_stage(stage, pixels))
        pixels = _after(stage, pixels)
    middle = _stage(model.middle_block or [], pixels)
    for stage in model.output_blocks:
        up.append(_stage(stage, pixels))
        upsamplings.append(_stage(ending(stage), pixels))
        pixels = _after(stage, pixels)
    total = sum(down) + middle + sum(up)
    return [(sum(down[: k + 1]) + upsamplings[-k - 2] + sum(up[-k - 1 :])) / total for k in range(len(up) - 1)]


def _after(stage: Iterable[nn.Module], pixels: int) -> int:
    """The pixels of a stage's output for those of its input."""
    for layer in stage:
        grows = isinstance(layer, Upsample) or (isinstance(layer, ResBlock) and isinstance(layer.h_upd, Upsample))
        shrinks = isinstance(layer, Downsample) or (isinstance(layer, ResBlock) and isinstance(layer.h_upd, Downsample))
        pixels = pixels * 4 if grows else pixels // 4 if shrinks else pixels
    return pixels


def _stage(stage: Iterable[nn.Module], pixels: int) -> int:
    """FLOPs (two a multiplication) of convolutions, linear layers and attention."""
    flops = 0
    for layer in stage:
        pixels = _after([layer], pixels)  # a down- or upsampling convolution runs on the pixels that it gives
        for name, m in layer.named_modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                flops += 2 * m.weight.numel() * _rows(name, pixels)
            elif isinstance(m, BasicTransformerBlock):
                flops += _attention(m, pixels)
    return flops


def _rows(name: str, pixels: int) -> int:
    """How many rows the layer of this name multiplies."""
    if name.startswith("emb_layers"):
        return 1
    return TEXT_TOKENS if name.endswith(("attn2.to_k", "attn2.to_v")) else pixels


def _attention(m: BasicTransformerBlock, pixels: int) -> int:
    """Queries times keys and weights times values, of self-attention and cross-attention."""
    channels = m.attn1.to_q.weight.shape[0]
    return 4 * pixels * channels * (pixels + TEXT_TOKENS)
