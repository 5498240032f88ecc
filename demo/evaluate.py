"""The proof that the demo model has learned its emoji: is a picture nearer to its own emoji than to 49 others?

    python -m demo.evaluate [--architecture unet|transformer] [--model FILE] [--out DIR] [--sweep]

For 50 prompts, evenly spread over those of the training, and three sizes, one picture each is sampled through
`comfy.sample.sample` with seed 1000 + i. Its features (features.py) are compared with those of the 50 reference
pictures in proof_emoji.png. Writes proof.json and samples.png, or proof_transformer.json and samples_transformer.png.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from . import headless  # noqa: F401  (sets ComfyUI up before the imports below)

# isort: split
import comfy.sample
import comfy.sd
from comfy.model_patcher import ModelPatcher

from . import model
from .data import FILL, place
from .features import features, nearest
from .text import TextEncoder

HERE = Path(__file__).parent
REFERENCES = HERE / "proof_emoji.png"
COUNT, COLUMNS, SIDE = 50, 10, 48  # emoji in the proof; the sheet of references: pictures a row, pixels a picture
SIZES = ((256, 256), (320, 192), (200, 264))  # width, height
NEEDED = (0.6, 0.4, 0.4)
FIRST_SEED = 1000


@dataclass(frozen=True)
class Setting:
    """How the pictures are sampled."""

    sampler: str = "euler"
    scheduler: str = "simple"
    steps: int = 8
    cfg: float = 2.0


def proof_indices(total: int) -> list[int]:
    """Which of `total` emoji the proof uses: evenly spread, first and last included."""
    return [round(i) for i in np.linspace(0, total - 1, COUNT)]


def save_references(images: torch.Tensor, path: Path) -> None:
    """The sheet of reference pictures, drawn as in training but exactly in the centre: images [N, 3, G, G] uint8."""
    chosen = images[proof_indices(len(images))]
    fill, shift = torch.full((COUNT,), FILL, device=images.device), torch.zeros(COUNT, 2, device=images.device)
    small = F.interpolate(place(chosen, 4 * SIDE, 4 * SIDE, fill, shift), (SIDE, SIDE), mode="area")
    rows = [torch.cat(list(row), dim=2) for row in small.split(COLUMNS)]
    to_image(torch.cat(rows, dim=1)).save(path, optimize=True)


def load_references() -> torch.Tensor:
    """[50, 3, 48, 48] in 0..1, in the order of the proof's prompts."""
    sheet = torch.from_numpy(np.array(Image.open(REFERENCES).convert("RGB"))).permute(2, 0, 1).float() / 255
    return torch.stack([cell for row in sheet.split(SIDE, dim=1) for cell in row.split(SIDE, dim=2)])


def to_image(picture: torch.Tensor) -> Image.Image:
    """[3, H, W] in 0..1 to a Pillow image."""
    return Image.fromarray((picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy())


def generate(
    loaded: tuple, prompts: list[str], seeds: list[int], size: tuple[int, int], setting: Setting
) -> torch.Tensor:
    """One picture a prompt as one batch, size in (width, height): [B, 3, height, width] in 0..1, on the CPU."""
    return decode(loaded[1], sample(loaded[0], loaded[2], prompts, seeds, size, setting))


def decode(vae: comfy.sd.VAE, samples: torch.Tensor) -> torch.Tensor:
    """Latents [B, 4, H, W] to pictures [B, 3, 8 H, 8 W] in 0..1, on the CPU."""
    return vae.decode(samples).movedim(-1, 1).float().cpu()


def sample(
    patcher: ModelPatcher, text: TextEncoder, prompts: list[str], seeds: list[int], size: tuple[int, int],
    setting: Setting,
) -> torch.Tensor:  # fmt: skip
    """The latents of ``generate``, [B, 4, height / 8, width / 8]."""
    latent = torch.zeros(len(prompts), 4, size[1] // 8, size[0] // 8)
    noise = torch.cat([comfy.sample.prepare_noise(latent[:1], seed) for seed in seeds])
    context = torch.cat([text.encode(prompt) for prompt in prompts])
    positive, negative = [[context, {}]], model.encode(text, "")
    return comfy.sample.sample(
        patcher,
        noise,
        setting.steps,
        setting.cfg,
        setting.sampler,
        setting.scheduler,
        positive,
        negative,
        latent,
        disable_pbar=True,
        seed=seeds[0],
    )


def prove(loaded: tuple, setting: Setting, sizes: tuple = SIZES, batch: int = 25) -> tuple[dict, dict]:
    """Figures a size, and the pictures a size."""
    names = [loaded[2].prompts[i] for i in proof_indices(len(loaded[2].prompts))]
    own = features(load_references())
    figures, pictures = {}, {}
    for size in sizes:
        seeds = [FIRST_SEED + i for i in range(COUNT)]
        parts = [
            generate(loaded, names[i : i + batch], seeds[i : i + batch], size, setting) for i in range(0, COUNT, batch)
        ]
        pictures[size] = torch.cat(parts)
        figures[f"{size[0]}x{size[1]}"] = _figures(features(pictures[size]), own, names)
    return figures, pictures


def _figures(made: torch.Tensor, own: torch.Tensor, names: list[str]) -> dict:
    """How many pictures are nearest to their own emoji, how near, and which are not."""
    found, cosines = nearest(made, own), made @ own.T
    right = found == torch.arange(len(found))
    others = cosines - 2 * torch.eye(len(found))
    return {
        "right": int(right.sum()),
        "of": len(found),
        "share": round(right.float().mean().item(), 3),
        "cosine_own": round(cosines.diagonal().mean().item(), 4),
        "cosine_best_other": round(others.amax(1).mean().item(), 4),
        "wrong": {names[i]: names[found[i]] for i in range(len(found)) if not right[i]},
    }


def grid(pictures: dict, height: int = 64, columns: int = 3) -> Image.Image:
    """For each prompt a strip: the reference emoji, then its picture at each size, all at one height."""
    references = load_references()
    sources = [references, *pictures.values()]
    widths = [round(height * s.shape[3] / s.shape[2]) for s in sources]
    cell, rows = sum(widths) + 24, -(-COUNT // columns)
    sheet = Image.new("RGB", (cell * columns, rows * (height + 4)), "white")
    for i in range(COUNT):
        x, y = (i // rows) * cell, (i % rows) * (height + 4)
        for source, width in zip(sources, widths, strict=True):
            sheet.paste(to_image(source[i]).resize((width, height), Image.Resampling.LANCZOS), (x, y))
            x += width + 2
    return sheet.quantize(256, method=Image.Quantize.MEDIANCUT)


def sweep(loaded: tuple) -> list[dict]:
    """The proof at 256 x 256 for several samplers, step counts and guidance scales."""
    out = []
    tried = [
        ("euler", "simple", steps, cfg) for steps, cfg in ((6, 2.0), (8, 1.0), (8, 1.5), (8, 2.0), (8, 3.0), (10, 2.0))
    ]
    tried += [("euler", "normal", 8, 2.0), ("dpmpp_2m", "simple", 8, 2.0), ("dpmpp_2m", "karras", 8, 2.0)]
    for setting in (Setting(*values) for values in tried):
        figures = prove(loaded, setting, SIZES[:1], COUNT)[0]["256x256"]
        out.append({**vars(setting), "share": figures["share"], "cosine_own": figures["cosine_own"]})
        logging.info("%s", out[-1])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default=model.UNET, choices=model.ARCHITECTURES)
    parser.add_argument("--model", type=Path, help="another file with its weights")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--dtype", default="auto", choices=["auto", *model.DTYPES])
    parser.add_argument("--sweep", action="store_true", help="also try other samplers and settings")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    with torch.inference_mode():
        loaded = model.load(options.dtype, options.architecture, options.model)
        setting = Setting()
        figures, pictures = prove(loaded, setting)
        others = sweep(loaded) if options.sweep else None
    proof = {
        "setting": vars(setting),
        "dtype": str(loaded[0].model.get_dtype()),
        "feature": " ".join(features.__doc__.split()),
        "first_seed": FIRST_SEED,
        "needed": dict(zip(figures, NEEDED, strict=True)),
        "sizes": figures,
    }
    logging.info("%s", json.dumps(figures))
    options.out.mkdir(parents=True, exist_ok=True)
    of = "" if options.architecture == model.UNET else f"_{options.architecture}"
    proof |= {"sweep_256x256": others} if others else {}
    (options.out / f"proof{of}.json").write_text(json.dumps(proof, indent=1) + "\n")
    grid(pictures).save(options.out / f"samples{of}.png", optimize=True)


if __name__ == "__main__":
    main()
