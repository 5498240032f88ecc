"""What the tests of Compile VAE in workflows share: a small VAE, latents and pictures for it, and how its calls ran."""

from typing import Any

import torch
from torch import Tensor

from tools.driving import randn
from tools.oracles import shapes

ODD = (9, 5)  # a latent's height and width


def build(models: Any, **changes: Any) -> Any:
    """A small VAE of SD in float32."""
    return models.vae(torch.float32, **{"ch": 32, "num_res_blocks": 1} | changes)


def latent(height: int = ODD[0], width: int = ODD[1], batch: int = 1) -> dict[str, Tensor]:
    """A LATENT of this height and width, which its values depend on."""
    return {"samples": randn(batch, 4, height, width, seed=height * 31 + width)}


def picture(height: int, width: int, batch: int = 1) -> Tensor:
    """An IMAGE of this height and width, which its values depend on."""
    return torch.rand(batch, height, width, 3, generator=torch.Generator().manual_seed(height * 31 + width))


def states() -> set[str]:
    """How the calls that were counted ran."""
    return {s["state"] for s in shapes()}
