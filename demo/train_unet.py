"""Trains the UNet and the table of words on latents that were encoded beforehand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from . import model, train_vae
from .data import Bank, place_jittered
from .optim import Clock, Master
from .text import CHUNK, PAD

DROPOUT = 0.1  # share of the pictures whose prompt is left empty, for classifier-free guidance
SHORTENED = 0.15  # share of the pictures whose prompt loses some words, so that "pizza" is enough for "slice of pizza"
WORD_DROPOUT = 0.4  # chance of each word of these to go


class TextTables(nn.Module):
    """The learned vectors of words and positions."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, model.CONTEXT_DIM)
        self.position = nn.Embedding(CHUNK, model.CONTEXT_DIM)
        nn.init.normal_(self.position.weight, std=0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, 77] -> [B, 77, D]."""
        return self.token(ids) + self.position.weight


def vocabulary(prompts: list[str]) -> dict[str, int]:
    """Word -> row; row 0 is the padding."""
    known = sorted({word for prompt in prompts for word in prompt.split()})
    return {word: row for row, word in enumerate(known, start=PAD + 1)}


def prompt_ids(prompts: list[str], vocab: dict[str, int]) -> torch.Tensor:
    """[N, 77] token ids."""
    rows = [[vocab[word] for word in prompt.split()] for prompt in prompts]
    return torch.tensor([row + [PAD] * (CHUNK - len(row)) for row in rows])


def shorten(rows: torch.Tensor) -> torch.Tensor:
    """Token ids [B, 77] as the training shows them: some empty, some without some of their words."""
    count, device = len(rows), rows.device
    shortened = torch.rand(count, 1, device=device) < SHORTENED
    gone = shortened & (torch.rand(rows.shape, device=device) < WORD_DROPOUT)
    gone = gone | (torch.rand(count, 1, device=device) < DROPOUT)
    rows = rows.masked_fill(gone, PAD)
    return rows.gather(1, (rows == PAD).int().argsort(dim=1, stable=True))  # the words that are left move up


def resume_text(text: TextTables, weights: dict, old: dict[str, int], new: dict[str, int]) -> None:
    """Takes over the vectors of the words known to both vocabularies."""
    with torch.no_grad():
        text.position.weight.copy_(weights["position.weight"])
        text.token.weight[PAD] = weights["token.weight"][PAD].to(text.token.weight)
        for word in old.keys() & new.keys():
            text.token.weight[new[word]] = weights["token.weight"][old[word]].to(text.token.weight)


@torch.no_grad()
def encode_bank(
    vae: nn.Module, bank: Bank, sizes: list[tuple[int, int]], copies: int, scale: float, pixels: int
) -> list[torch.Tensor]:
    """For each size, scaled latents [copies, N, 4, h, w] bf16 of every emoji, each copy placed elsewhere."""
    vae.bfloat16()
    out = []
    for height, width in sizes:
        every = bank.images.repeat(copies, 1, 1, 1)
        parts = [
            train_vae.moments(vae, (place_jittered(part, height, width) * 2 - 1).bfloat16())[0] * scale
            for part in every.split(max(1, pixels // (height * width)))
        ]
        out.append(torch.cat(parts).bfloat16().unflatten(0, (copies, len(bank.prompts))))
    return out


def batch(latents: list[torch.Tensor], cells: int, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled latents [B, 4, h, w] of one size, with about `cells` positions in all, and their emoji [B].

    A quarter of the batches have the first size, the others any. share [N]: how often each emoji is drawn.
    """
    which = 0 if torch.rand(()) < 0.25 else int(torch.randint(len(latents), (1,)))
    copies, _, _, height, width = latents[which].shape
    emoji = torch.multinomial(share, max(1, cells // (height * width)), replacement=True)
    return latents[which][torch.randint(copies, emoji.shape, device=share.device), emoji].float(), emoji


def v_loss(unet: nn.Module, x: torch.Tensor, context: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the predicted v; the timesteps of a batch are spread evenly over the schedule."""
    count = len(x)
    t = ((torch.arange(count, device=x.device) + torch.rand(count, device=x.device)) / count * len(sigmas)).long()
    t = t.clamp(max=len(sigmas) - 1)  # the last of them can be rounded up to the length
    sigma = sigmas[t].view(-1, 1, 1, 1)
    alpha = (1 + sigma**2).rsqrt()
    noise = torch.randn_like(x)
    noisy = alpha * (x + sigma * noise)
    target = alpha * (noise - sigma * x)
    return F.mse_loss(unet(noisy.bfloat16(), t.float(), context=context).float(), target)


@dataclass
class Lesson:
    """What the UNet learns from: all on one device."""

    unet: nn.Module
    text: TextTables
    ids: torch.Tensor  # [N, 77], each emoji's prompt
    latents: list[torch.Tensor]  # a size each: [copies, N, 4, h, w]
    share: torch.Tensor  # [N], how often each emoji is drawn
    sigmas: torch.Tensor  # [1000], the schedule

    def loss(self, cells: int) -> tuple[torch.Tensor, int]:
        """The loss of a fresh batch of about `cells` latent positions, and how many pictures it has."""
        x, emoji = batch(self.latents, cells, self.share)
        return v_loss(self.unet, x, self.text(shorten(self.ids[emoji])), self.sigmas), len(x)


def train(
    lesson: Lesson, minutes: float, cells: int, rate: float, average: float, checkpoint: Callable[[Master], None]
) -> dict:
    """Trains in place; `checkpoint(master)` is called every two minutes. Leaves the averaged weights in the modules."""
    clock, master = Clock(minutes), Master([lesson.unet, lesson.text], rate, average)
    seen, logged, saved, running, curve = 0, 0.0, 0.0, None, []
    while clock.progress < 1:
        loss, count = lesson.loss(cells)
        loss.backward()
        master.step(clock.progress)
        seen += count
        running = loss.detach() if running is None else torch.lerp(running, loss.detach(), 0.01)
        if clock.seconds - logged > 20:
            logged = clock.seconds
            curve.append([round(logged), master.steps, round(running.item(), 5)])
            logging.info("unet %5.0f s step %d loss %.5f seen %d", logged, master.steps, running.item(), seen)
        if clock.seconds - saved > 120:
            saved = clock.seconds
            checkpoint(master)
    master.load_average()
    figures = {"steps": master.steps, "pictures": seen, "seconds": round(clock.seconds)}
    return {**figures, "loss": round(running.item(), 5), "curve": curve}
