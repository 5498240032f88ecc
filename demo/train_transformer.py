"""Trains the demo's transformer from nothing, by rectified flow, on the UNet's emoji, latents and words.

    python -m demo.train_transformer --font NotoColorEmoji.ttf --out DIR --seconds 500

Autoencoder and words are those of emoji.safetensors, and stay as they are. Writes DIR/emoji_transformer.safetensors
(the averaged weights, every two minutes and at the end), DIR/training.json and DIR/check.json (the proof at several
settings). `--bank FILE` takes pictures that `--write-bank` has drawn before, where there is no font. How the committed
file was made: TRAINING.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from . import headless  # noqa: F401  (sets ComfyUI up before the imports below)

# isort: split
import comfy.model_management
import comfy.ops

from . import evaluate, model, train_unet
from .data import Bank, buckets, load_bank
from .optim import Clock, Master
from .text import CHUNK

HIDDEN = ("qkv.weight", "out.weight", "w1.weight", "w2.weight", "w3.weight")  # what Muon turns, in every block
ZERO = ("adaLN_modulation.1", "final_layer.linear")  # begin at zero: every block as the identity, the output as nothing
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
DECAY = 0.01  # of these matrices' weights: keeps them from growing, as norms behind them make their length idle
CHECK_SECONDS = 45  # kept free at the end for the proof
TRIED = 12  # steps by which compiled blocks and plain ones are compared


def initialise(transformer: nn.Module) -> None:
    """Torch's default initial weights, which ComfyUI's layers skip, and zeros where a name ends in one of ``ZERO``."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            nn.Linear.reset_parameters(module)
            if name.endswith(ZERO):
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)
        elif getattr(module, "weight", None) is not None:  # a norm's
            nn.init.ones_(module.weight)


# Optimiser ------------------------------------------------------------------------------------------------------------


def orthogonal(gradients: torch.Tensor) -> torch.Tensor:
    """The nearest (semi-)orthogonal matrices to [N, R, C], roughly: five rounds of Newton and Schulz in bf16."""
    a, b, c = NEWTON_SCHULZ
    x = gradients.bfloat16()
    turned = x.shape[1] > x.shape[2]
    x = x.mT if turned else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if turned else x).float()


class Muon(Master):
    """``Master`` whose hidden matrices are moved by Muon (Jordan et al. 2024), those of one shape together."""

    def __init__(self, modules: list[nn.Module], hidden: set[nn.Parameter], rates: tuple[float, float], average: float):
        super().__init__(modules, rates[0], average)
        by_shape = defaultdict(list)
        rest = []
        for param, master in zip(self.params, self.master, strict=True):
            by_shape[tuple(param.shape)].append(master) if param in hidden else rest.append(master)
        self.groups = list(by_shape.values())
        self.momenta = [torch.zeros_like(torch.stack(group)) for group in self.groups]
        self.muon_rate = rates[1]
        self.adam = torch.optim.AdamW(rest, lr=rates[0], betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def update(self, scale: float) -> None:
        """Adam's step and Muon's."""
        super().update(scale)
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradients = torch.stack([master.grad for master in group])
            momentum.lerp_(gradients, 0.05)
            step = orthogonal(torch.lerp(gradients, momentum, 0.95))
            rate = self.muon_rate * scale * max(1.0, step.shape[1] / step.shape[2]) ** 0.5
            torch._foreach_mul_(group, 1 - self.muon_rate * scale * DECAY)
            torch._foreach_add_(group, list(step.unbind()), alpha=-rate)


# Lesson ---------------------------------------------------------------------------------------------------------------


def flow_loss(transformer: nn.Module, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the predicted direction from picture to noise.

    Half of a batch's sigmas are spread evenly over 0 to 1, the others by a logit-normal law, which favours the middle.
    """
    count, device = len(x), x.device
    places = ((torch.arange(count, device=device) + torch.rand(count, device=device)) / count).clamp(1e-4, 1 - 1e-4)
    normal = torch.sigmoid(math.sqrt(2) * torch.erfinv(2 * places - 1))
    sigma = torch.where(torch.rand(count, device=device) < 0.5, places, normal)
    noise, share = torch.randn_like(x), sigma.view(-1, 1, 1, 1)
    noisy = torch.lerp(x, noise, share).bfloat16()
    made = transformer(noisy, sigma, context.bfloat16(), num_tokens=CHUNK)
    return F.mse_loss(made.float(), noise - x)


@dataclass
class Lesson:
    """What the transformer learns from: all on one device."""

    transformer: nn.Module
    words: torch.Tensor  # [V, D], and what is added by position
    positions: torch.Tensor  # [77, D]
    ids: torch.Tensor  # [N, 77], each emoji's prompt
    latents: list[torch.Tensor]  # a size each: [copies, N, 4, h, w]

    def loss(self, cells: int) -> tuple[torch.Tensor, int]:
        """The loss of a fresh batch of about ``cells`` latent positions, and how many pictures it has."""
        share = torch.ones(len(self.ids), device=self.ids.device)
        x, emoji = train_unet.batch(self.latents, cells, share)
        context = self.words[train_unet.shorten(self.ids[emoji])] + self.positions
        return flow_loss(self.transformer, x, context), len(x)


def pictures(options: argparse.Namespace, known: dict) -> Bank:
    """The emoji that the UNet was trained on: from the font, or drawn before."""
    points, prompts = known["codepoints"], known["prompts"]  # an older Python knows fewer names
    if options.bank:
        return Bank(prompts, points, torch.from_numpy(np.load(options.bank)["images"]))
    bank = load_bank(options.font, 0, well_known=False, known=points)
    return Bank(prompts, points, bank.images)


def for_training() -> None:
    """ComfyUI's layers as training wants them: this process does nothing else before its proof."""
    comfy.model_management.in_training = True  # newer ComfyUI: no kernels that know no gradient
    comfy.ops.scaled_dot_product_attention = F.scaled_dot_product_attention  # without a choice that graphs would hold
    torch.backends.cuda.enable_cudnn_sdp(False)  # its plans are made for each size, FlashAttention's kernels are not


def make_lesson(options: argparse.Namespace, device: torch.device) -> tuple[Lesson, dict]:
    """An untrained transformer with all that it learns from, and the metadata of its file."""
    weights, known = model.read_file()
    bank = pictures(options, known)
    bank.images = bank.images.to(device)
    vae = model.load_vae(weights, known, torch.float32).first_stage_model.to(device)
    config = model.TRANSFORMER_CONFIG | json.loads(options.config)
    transformer = model.build(model.TRANSFORMER, config, known["latent"]).to(device).diffusion_model
    initialise(transformer.requires_grad_(True))
    if hasattr(transformer, "norm_final"):  # older ComfyUI has it, and does not use it
        transformer.norm_final.requires_grad_(False)
    scale, sizes = known["latent"]["scale_factor"], buckets(options.sizes)
    latents = train_unet.encode_bank(vae, bank, sizes, options.copies, scale, options.pixels)
    tables = {key: value.to(device).float() for key, value in model.under(weights, model.TEXT_PREFIX).items()}
    ids = train_unet.prompt_ids(bank.prompts, known["vocab"]).to(device)
    lesson = Lesson(transformer, tables["token.weight"], tables["position.weight"], ids, latents)
    return lesson, {model.TRANSFORMER: config, "latent": known["latent"]}


def save(path: Path, transformer: nn.Module, master: Master, metadata: dict) -> None:
    """The averaged weights in fp16; the metadata's values are JSON."""
    averages = dict(zip(master.params, master.average, strict=True))
    state = {name: averages.get(p, p) for name, p in transformer.named_parameters()}
    tensors = {model.MODEL_PREFIX + k: v.detach().to("cpu", torch.float16).contiguous() for k, v in state.items()}
    save_file(tensors, str(path), {key: json.dumps(value) for key, value in metadata.items()})


# Training -------------------------------------------------------------------------------------------------------------


def step(lesson: Lesson, master: Master, cells: int, progress: float) -> tuple[torch.Tensor, int]:
    """One step: its loss and its pictures."""
    loss, count = lesson.loss(cells)
    loss.backward()
    master.step(progress)
    return loss.detach(), count


def speed(lesson: Lesson, master: Master, cells: int) -> float:
    """Seconds of a picture."""
    seen, started = 0, time.monotonic()
    for _ in range(TRIED):
        loss, count = step(lesson, master, cells, 0.0)
        seen += count
    loss.item()
    return (time.monotonic() - started) / seen


def compile_blocks(lesson: Lesson, master: Master, cells: int) -> dict:
    """Compiles the blocks with symbolic sizes, if that is faster than leaving them as they are."""
    blocks = [block for block in lesson.transformer.modules() if type(block).__name__ == "JointTransformerBlock"]
    started = time.monotonic()
    speed(lesson, master, cells)
    plain = speed(lesson, master, cells)
    try:
        for block in blocks:
            block.compile(dynamic=True)
        speed(lesson, master, cells)
        compiled = speed(lesson, master, cells)
    except Exception as error:  # noqa: BLE001  whatever the compiler meets: the blocks run without it as well
        logging.warning("not compiled: %s", error)
        compiled = math.inf
        master.forget()
    if compiled > plain:
        for block in blocks:
            block._compiled_call_impl = None
    return {"plain": plain, "compiled": compiled, "seconds": round(time.monotonic() - started, 1)}


def train(lesson: Lesson, master: Master, options: argparse.Namespace, seconds: float, metadata: dict) -> dict:
    """Trains in place for ``seconds``; writes the averaged weights every two minutes and at the end."""
    path = options.out / model.TRANSFORMER_FILE.name
    clock = Clock(seconds / 60)
    seen, logged, saved, running, curve = 0, 0.0, 0.0, None, []
    while clock.progress < 1 or not seen:
        loss, count = step(lesson, master, options.cells, clock.progress)
        seen += count
        running = loss if running is None else torch.lerp(running, loss, 0.01)
        if clock.seconds - logged > 10:
            logged = clock.seconds
            curve.append([round(logged), master.steps, round(running.item(), 5)])
            logging.info("transformer %5.0f s step %d loss %.5f seen %d", logged, master.steps, curve[-1][2], seen)
        if clock.seconds - saved > 120:
            saved = clock.seconds
            save(path, lesson.transformer, master, metadata)
    report = {
        "steps": master.steps,
        "pictures": seen,
        "seconds": round(clock.seconds),
        "loss": round(running.item(), 5),
    }
    save(path, lesson.transformer, master, metadata | {"training": report})
    return {**report, "curve": curve}


@torch.inference_mode()
def check(path: Path, deadline: float) -> list[dict]:
    """The proof by the file as it lies there, at as many settings as there is time for."""
    comfy.model_management.in_training = False
    loaded = model.load(None, model.TRANSFORMER, path)
    found = []
    for setting in (evaluate.Setting(), evaluate.Setting(steps=20), evaluate.Setting(steps=20, cfg=1.0)):
        if time.monotonic() < deadline:
            figures, shown = evaluate.prove(loaded, setting, batch=evaluate.COUNT)
            found.append({**vars(setting), **figures})
            logging.info("%s", {**vars(setting), **{size: one["share"] for size, one in figures.items()}})
            evaluate.grid(shown).save(path.with_name(f"samples-{len(found)}.png"), optimize=True)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--font", help="NotoColorEmoji.ttf")
    source.add_argument("--bank", type=Path, help="pictures that --write-bank has written")
    parser.add_argument("--write-bank", type=Path, help="only draw the emoji into this file (npz)")
    parser.add_argument("--out", type=Path, help="folder for what is written")
    parser.add_argument("--seconds", type=float, default=500.0, help="of the whole script")
    parser.add_argument("--sizes", type=int, default=24, help="picture sizes to train on")
    parser.add_argument("--copies", type=int, default=4, help="placements of each emoji at each size")
    parser.add_argument("--pixels", type=int, default=2**22, help="pixels in a batch of the autoencoder")
    parser.add_argument("--cells", type=int, default=2**17, help="latent positions in a batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate of Adam")
    parser.add_argument("--muon-rate", type=float, default=0.02, help="highest learning rate of Muon")
    parser.add_argument("--average", type=float, default=0.999, help="decay of the moving average, per step")
    parser.add_argument("--config", default="{}", help="JSON: what differs from model.TRANSFORMER_CONFIG")
    parser.add_argument("--plain", action="store_true", help="do not try to compile the blocks")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    started = time.monotonic()
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    if options.write_bank:
        np.savez_compressed(options.write_bank, images=pictures(options, model.read_file()[1]).images.numpy())
        return
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for_training()
    lesson, metadata = make_lesson(options, device)
    hidden = {p for name, p in lesson.transformer.named_parameters() if name.endswith(HIDDEN)}
    master = Muon([lesson.transformer], hidden, (options.rate, options.muon_rate), options.average)
    count = sum(p.numel() for p in lesson.transformer.parameters())
    logging.info("%d parameters; ready after %.0f s", count, time.monotonic() - started)
    compiling = {} if options.plain else compile_blocks(lesson, master, options.cells)
    logging.info("compiling %s", compiling)
    left = options.seconds - CHECK_SECONDS - (time.monotonic() - started)
    report = train(lesson, master, options, left, metadata)
    report |= {"parameters": count, "compiling": compiling, "sizes": buckets(options.sizes)}
    (options.out / "training.json").write_text(json.dumps(report))
    logging.info("trained after %.0f s", time.monotonic() - started)
    found = check(options.out / model.TRANSFORMER_FILE.name, started + options.seconds - 10)
    (options.out / "check.json").write_text(json.dumps(found, indent=1))
    logging.info("%.0f s in all", time.monotonic() - started)


if __name__ == "__main__":
    main()
