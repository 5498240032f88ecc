"""Trains the autoencoder, then centres its latents."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from comfy.ldm.models.autoencoder import AutoencoderKL

from .data import FILL, Bank, place, place_jittered
from .optim import Clock, Master, initialise

KL_WEIGHT = 1e-4
CROP = 128  # pixels a side of the crops that most of the training sees
CROP_UNTIL = 0.7  # share of the time after which only whole pictures are shown


def build(ddconfig: dict, device: torch.device) -> AutoencoderKL:
    """An untrained autoencoder."""
    vae = AutoencoderKL(ddconfig=ddconfig, embed_dim=ddconfig["z_channels"])
    initialise(vae, zero=())
    return vae.to(device)


def moments(vae: AutoencoderKL, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log-variance [B, 4, h, w] of the latents of pixels [B, 3, H, W] in -1..1."""
    mean, logvar = vae.quant_conv(vae.encoder(pixels)).float().chunk(2, dim=1)
    return mean, logvar.clamp(-30, 20)


def crops(bank: Bank, pixels: int) -> torch.Tensor:
    """Random 128 x 128 crops of canvases of 192 to 384 pixels: [B, 3, 128, 128] in 0..1."""
    device = bank.images.device
    count = max(1, pixels // CROP**2)
    images = bank.images[torch.randint(len(bank.prompts), (count,), device=device)]
    fill = FILL * (192 + 192 * torch.rand(count, device=device)) / CROP
    shift = (torch.rand(count, 2, device=device) - 0.5) * fill[:, None]
    return place(images, CROP, CROP, fill, shift)


def whole(bank: Bank, sizes: list[tuple[int, int]], pixels: int) -> torch.Tensor:
    """Whole pictures of one random size: [B, 3, H, W] in 0..1."""
    height, width = sizes[int(torch.randint(len(sizes), (1,)))]
    count = max(1, pixels // (height * width))
    device = bank.images.device
    return place_jittered(bank.images[torch.randint(len(bank.prompts), (count,), device=device)], height, width)


def edges(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Differences between neighbours, down and across."""
    return x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]


def reconstruction_loss(made: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """L1, plus L1 of the edges at full and half size: what keeps outlines sharp without a perceptual network."""
    loss = F.l1_loss(made, pixels)
    for scale in (1, 2):
        a, b = (F.avg_pool2d(x, scale) if scale > 1 else x for x in (made, pixels))
        loss = loss + sum(F.l1_loss(p, q) for p, q in zip(edges(a), edges(b), strict=True))
    return loss


def train(
    vae: AutoencoderKL, bank: Bank, sizes: list[tuple[int, int]], minutes: float, pixels: int, rate: float = 1e-3
) -> dict:
    """Trains in place for `minutes` with batches of about `pixels` pixels; leaves the averaged weights in it."""
    clock, master = Clock(minutes), Master([vae], rate)
    seen, logged, loss = 0, 0.0, torch.zeros(())
    while clock.progress < 1:
        small = clock.progress < CROP_UNTIL and master.steps % 4 != 0
        x = (crops(bank, pixels) if small else whole(bank, sizes, pixels)) * 2 - 1
        mean, logvar = moments(vae, x.bfloat16())
        latent = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        made = vae.decode(latent.bfloat16()).float()
        kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
        loss = reconstruction_loss(made, x) + KL_WEIGHT * kl
        loss.backward()
        master.step(clock.progress)
        seen += len(x)
        if clock.seconds - logged > 20:
            logged = clock.seconds
            logging.info(
                "vae %5.0f s step %d loss %.4f kl %.2f noise %.3f of %.3f",
                logged,
                master.steps,
                loss.item(),
                kl.item(),
                (0.5 * logvar).exp().mean().item(),
                mean.std().item(),
            )
    master.load_average()
    return {"steps": master.steps, "pictures": seen, "seconds": round(clock.seconds), "loss": round(loss.item(), 4)}


@torch.no_grad()
def centre(vae: AutoencoderKL, bank: Bank, sizes: list[tuple[int, int]], pixels: int) -> float:
    """Folds each channel's mean and relative spread into the two 1 x 1 convolutions; returns the scale factor.

    Afterwards every channel of the latents has mean 0 and the same standard deviation, one over the scale factor, so
    that the noise of the diffusion is as strong in each of them.
    """
    means = [moments(vae, whole(bank, sizes, pixels) * 2 - 1)[0] for _ in range(48)]
    flat = torch.cat([m.transpose(0, 1).flatten(1) for m in means], dim=1)
    shift, spread = flat.mean(1), flat.std(1)
    common = spread.mean()
    gain = common / spread
    quant, post = vae.quant_conv, vae.post_quant_conv
    quant.weight.data[:4] *= gain[:, None, None, None]
    quant.bias.data[:4] = (quant.bias.data[:4] - shift) * gain
    quant.bias.data[4:] += 2 * gain.log()
    post.bias.data += post.weight.data[:, :, 0, 0] @ shift
    post.weight.data /= gain[None, :, None, None]
    return float(1 / common)


@torch.no_grad()
def rgb_factors(
    vae: AutoencoderKL, bank: Bank, sizes: list[tuple[int, int]], pixels: int, scale: float
) -> tuple[list, list]:
    """Least-squares map from scaled latents to colours in -1..1, for ComfyUI's live preview."""
    x = whole(bank, sizes, pixels) * 2 - 1
    dtype = vae.quant_conv.weight.dtype
    latent = (moments(vae, x.to(dtype))[0] * scale).permute(0, 2, 3, 1).reshape(-1, 4)
    colour = F.avg_pool2d(x, 8).permute(0, 2, 3, 1).reshape(-1, 3)
    ones = torch.ones(len(latent), 1, device=latent.device)
    solution = torch.linalg.lstsq(torch.cat([latent, ones], dim=1), colour).solution
    return [[round(v, 4) for v in row] for row in solution[:4].tolist()], [round(v, 4) for v in solution[4].tolist()]


@torch.no_grad()
def psnr(vae: AutoencoderKL, bank: Bank, size: tuple[int, int]) -> float:
    """Of whole pictures at one size after encoding and decoding, in dB over all of them."""
    dtype = vae.quant_conv.weight.dtype
    x = place_jittered(bank.images[:: max(1, len(bank.prompts) // 64)], *size) * 2 - 1
    made = vae.decode(moments(vae, x.to(dtype))[0].to(dtype)).float().clamp(-1, 1)
    return float(10 * torch.log10(4 / F.mse_loss(made, x)))
