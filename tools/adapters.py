"""An adapter as packs have them: layers for each block whose attention to the prompt it patches, by noise level."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tools.patching import run, with_patch

Patcher = Any  # comfy.model_patcher.ModelPatcher
CONTEXT = 64  # channels of what an image is embedded in
Block = tuple[str, int]  # as patches see it
BLOCKS: list[Block] = [("input", 1), ("input", 2), ("output", 3), ("output", 4)]


class Adapter(nn.Module):
    """As IPAdapter's: layers for each block that it patches. widths: see below."""

    def __init__(self, widths: dict[Block, int]) -> None:
        super().__init__()
        self.widths = widths
        layers = enumerate(widths.values())
        self.layers = nn.ModuleDict({str(n): nn.Linear(CONTEXT, width, bias=False) for n, width in layers})


class Attend:
    """A patch of one block's attention to the prompt, in a range of noise levels. Many share an adapter."""

    def __init__(self, adapter: Adapter, image: Tensor, number: int, **settings: float) -> None:
        self.adapter, self.image, self.number, self.settings = adapter, image, number, settings

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        sigma = options["sigmas"].detach().cpu()[0].item()
        out = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        if self.settings["end"] <= sigma <= self.settings["start"]:
            key = self.adapter.layers[str(self.number)](self.image).repeat(len(q), 1, 1)
            weights = (q @ key.transpose(1, 2)).softmax(-1)
            out = out + weights @ key * self.settings["weight"] * self.settings.get("mask", 1.0)
        return out


def widths(models: Any, patcher: Patcher) -> dict[Block, int]:
    """Of the queries of those of ``BLOCKS`` that the model has."""
    found: dict[Block, int] = {}

    def note(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        found[options["block"]] = q.shape[-1]
        return nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]

    def all_of(patcher: Patcher) -> None:
        for block in BLOCKS:
            patcher.set_model_attn2_replace(note, *block)

    run(models, with_patch(patcher, all_of), steps=1)
    return {block: found[block] for block in BLOCKS if block in found}


def attending(adapter: Adapter, seed: int = 0, **settings: float) -> Callable[[Patcher], None]:
    """Sets its patches on a model. seed: of the image."""
    settings = {"weight": 1.0, "start": 20.0, "end": 0.0} | settings
    weight = next(adapter.parameters())
    image = torch.randn(1, 4, CONTEXT, generator=torch.Generator().manual_seed(seed)).to(weight)

    def set_patches(patcher: Patcher) -> None:
        for number, block in enumerate(adapter.widths):
            patcher.set_model_attn2_replace(Attend(adapter, image, number, **settings), *block)

    return set_patches


def tripled(calls: list[bool]) -> Callable[[Patcher], None]:
    """Sets a patch before self-attention, which gets one tensor as queries, keys and values, as HyperTile does.

    Whether it does is added to ``calls``, by whose number the queries are scaled.
    """

    def patch(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(q is k is v)
        return q * (1 + len(calls) / 500), k, v

    return lambda patcher: patcher.set_model_attn1_patch(patch)


def counting(calls: list[float], noted: Callable[[Tensor], object] = lambda query: None) -> Callable[[Patcher], None]:
    """Sets patches that must be called: attention that adds the noise level to ``calls``, and a scale by their count.

    noted: gets each query.
    """

    def set_patches(patcher: Patcher) -> None:
        def replace(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
            calls.append(float(options["sigmas"][0]))
            noted(q)
            out = v.mean(1, keepdim=True).expand_as(q)
            return out * 1.5 if calls[-1] < 5.0 else out

        patcher.set_model_attn2_replace(replace, "output", 3)
        patcher.set_model_attn2_replace(replace, "input", 1)
        patcher.set_model_input_block_patch(lambda h, options: h * (1 + len(calls) / 500))

    return set_patches
