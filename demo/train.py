"""Trains the demo model from nothing: the autoencoder, then the UNet with its word table, within the minutes given.

    python -m demo.train --font NotoColorEmoji.ttf --out DIR --vae-minutes 3 --unet-minutes 6

Writes DIR/emoji.safetensors, DIR/proof_emoji.png (reference pictures) and DIR/training.json (what was done, and the
loss). How the committed file was made: TRAINING.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from . import headless  # noqa: F401  (sets ComfyUI up before the imports below)

# isort: split
from . import evaluate, model, train_unet, train_vae
from .data import Bank, buckets, load_bank
from .optim import Master, initialise


def save(path: Path, unet: dict, vae: dict, text: dict, metadata: dict) -> None:
    """One fp16 file; the metadata's values are JSON."""
    parts = {model.MODEL_PREFIX: unet, model.VAE_PREFIX: vae, model.TEXT_PREFIX: text}
    tensors = {
        prefix + key: value.detach().to("cpu", torch.float16).contiguous()
        for prefix, weights in parts.items()
        for key, value in weights.items()
    }
    save_file(tensors, str(path), {key: json.dumps(value) for key, value in metadata.items()})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--font", required=True, help="NotoColorEmoji.ttf")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--resume", type=Path, help="an emoji.safetensors to continue from")
    parser.add_argument("--vae-minutes", type=float, default=2.0, help="0 keeps the resumed autoencoder")
    parser.add_argument("--unet-minutes", type=float, default=6.0)
    parser.add_argument("--emoji", type=int, default=520, help="at most this many, evenly chosen")
    parser.add_argument("--no-well-known", action="store_true", help="without the well-known emoji on top")
    parser.add_argument("--sizes", type=int, default=40, help="picture sizes to train on")
    parser.add_argument("--copies", type=int, default=4, help="placements of each emoji at each size")
    parser.add_argument("--pixels", type=int, default=2**19, help="pixels in a batch of the autoencoder")
    parser.add_argument("--cells", type=int, default=2**17, help="latent positions in a batch of the UNet")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate of the UNet")
    parser.add_argument("--average", type=float, default=0.999, help="decay of the UNet's moving average, per step")
    parser.add_argument(
        "--boost", type=float, default=4.0, help="when resumed, how much more often new emoji are drawn"
    )
    parser.add_argument("--vae-rate", type=float, default=1e-3, help="highest learning rate of the autoencoder")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_vae(options: argparse.Namespace, bank: Bank, weights: dict, old: dict) -> tuple[nn.Module, dict, dict]:
    """The autoencoder, trained or taken over; its latents' scale and preview colours; what was done."""
    vae = train_vae.build(model.VAE_CONFIG, bank.images.device)
    if weights:
        vae.load_state_dict(model.under(weights, model.VAE_PREFIX))
    if weights and not options.vae_minutes:
        return vae.requires_grad_(False), old["latent"], old["training"]["vae"]
    sizes = buckets(options.sizes)
    report = train_vae.train(vae, bank, sizes, options.vae_minutes, options.pixels, options.vae_rate)
    scale = train_vae.centre(vae, bank, sizes, options.pixels)
    factors, bias = train_vae.rgb_factors(vae, bank, sizes, options.pixels, scale)
    report["psnr_256"] = round(train_vae.psnr(vae, bank, (256, 256)), 2)
    return vae.requires_grad_(False), {"scale_factor": scale, "rgb_factors": factors, "rgb_bias": bias}, report


def make_lesson(
    options: argparse.Namespace, bank: Bank, vocab: dict, vae: nn.Module, latent: dict, weights: dict, old: dict
) -> train_unet.Lesson:
    """An untrained or resumed UNet with all that it learns from. Leaves the autoencoder in bf16."""
    device = bank.images.device
    base = model.build(model.UNET, model.UNET_CONFIG, latent).to(device)
    unet, text = base.diffusion_model, train_unet.TextTables(len(vocab) + 1).to(device)
    initialise(unet)
    if weights:
        unet.load_state_dict(model.under(weights, model.MODEL_PREFIX))
        train_unet.resume_text(text, model.under(weights, model.TEXT_PREFIX), old["vocab"], vocab)
    scale, known = latent["scale_factor"], set(old.get("codepoints", bank.codepoints))
    return train_unet.Lesson(
        unet,
        text,
        train_unet.prompt_ids(bank.prompts, vocab).to(device),
        train_unet.encode_bank(vae, bank, buckets(options.sizes), options.copies, scale, options.pixels),
        torch.tensor([1.0 if p in known else options.boost for p in bank.codepoints], device=device),
        base.model_sampling.sigmas.to(device),
    )


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    started = time.monotonic()
    weights, old = model.read_file(options.resume) if options.resume else ({}, {})
    bank = load_bank(options.font, options.emoji, not options.no_well_known, old.get("codepoints"))
    bank.images = bank.images.to("cuda" if torch.cuda.is_available() else "cpu")
    vocab = train_unet.vocabulary(bank.prompts)
    evaluate.save_references(bank.images, options.out / evaluate.REFERENCES.name)
    logging.info("%d emoji, %d words", len(bank.prompts), len(vocab))

    vae, latent, vae_report = make_vae(options, bank, weights, old)
    vae_weights = {key: value.float().clone() for key, value in vae.state_dict().items()}
    logging.info("vae %s, %s", vae_report, latent)
    lesson = make_lesson(options, bank, vocab, vae, latent, weights, old)
    logging.info("starting on the UNet after %.0f s", time.monotonic() - started)

    metadata = {"unet": model.UNET_CONFIG, "vae": model.VAE_CONFIG, "latent": latent, "vocab": vocab}
    metadata |= {"prompts": bank.prompts, "codepoints": bank.codepoints}
    path = options.out / model.FILE.name

    def checkpoint(master: Master) -> None:
        values = dict(zip(master.params, master.average, strict=True))
        named = [{k: values[p] for k, p in part.named_parameters()} for part in (lesson.unet, lesson.text)]
        save(path, named[0], vae_weights, named[1], metadata | {"training": {"vae": vae_report}})

    minutes, cells = options.unet_minutes, options.cells
    report = train_unet.train(lesson, minutes, cells, options.rate, options.average, checkpoint)
    curve = report.pop("curve")
    metadata["training"] = {"vae": vae_report, "unet": [*old.get("training", {}).get("unet", []), report]}
    save(path, lesson.unet.state_dict(), vae_weights, lesson.text.state_dict(), metadata)
    done = {**metadata["training"], "curve": curve, "sizes": buckets(options.sizes)}
    (options.out / "training.json").write_text(json.dumps(done))
    logging.info("unet %s", report)
    logging.info("wrote %s: %d bytes, %.0f s in all", path.name, path.stat().st_size, time.monotonic() - started)


if __name__ == "__main__":
    main()
