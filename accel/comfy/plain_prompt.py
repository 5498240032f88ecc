"""Makes a prompt of random numbers for a model that is warmed up without one. The model says how wide it must be.

ComfyUI has no list of these widths: each model names them in its own way, or not at all. But the first layer that meets
a text of another width refuses it, and knows the right one. So a guess is sampled, on a clone without our wrappers,
until no layer refuses it.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import comfy.sample
import comfy.samplers
import torch
import torch.nn.functional as F
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.model_patcher import ModelPatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..attempt import attempt, named
from . import attach, skipping
from .latents import Latents
from .surroundings import INTERRUPTS

UNET_TOKENS, TOKENS = 77, 256  # of a short prompt: CLIP's, and the fewest that ComfyUI gives Flux
TEXT, POOLED = 61, 67  # guesses. No model has these widths, so that a layer's input tells which of them it is
MOST = 8  # guesses of one kind
SIDE = 256  # image pixels of the sample: a forward that nothing refuses is run to its end
CONNECT = "connect positive: no plain prompt fits this model"


def plain_prompt(model: ModelPatcher, latents: Latents) -> tuple[list, str]:
    """(a CONDITIONING, "") or ([], what the user should do)."""
    problem = ""
    # masked: some models ask which tokens are padding
    for pooled, masked in product(_pooled(model.model.model_config.unet_config), (False, True)):
        prompt, problem = attempt(partial(_fitting, model, latents, pooled, masked), named, INTERRUPTS)
        if prompt:
            return prompt, ""
    return [], f"{CONNECT} ({problem})"


def _pooled(config: dict[str, Any]) -> tuple[int, ...]:
    """The widths to try for a pooled embedding, 0 for none: the one that the text encoder most likely gives is first.

    Models that have a place for one do without it too, and Flux cuts one that is too long.
    """
    if own := config.get("vec_in_dim"):
        return (own,)
    return (POOLED, 0) if config.get("adm_in_channels") else (0, POOLED)


def _fitting(model: ModelPatcher, latents: Latents, pooled: int, masked: bool) -> list:
    """A CONDITIONING that no layer refuses; 0: it has no ``pooled`` embedding."""
    tokens = UNET_TOKENS if isinstance(model.model.diffusion_model, UNetModel) else TOKENS
    clone, text = attach.remove(model.clone()), TEXT
    skipping.remove(clone)
    for _ in range(MOST):
        prompt = _prompt(tokens, text, pooled, masked)
        refused = _first_refusal(clone, latents, prompt)
        if refused is None:
            return prompt
        if refused.given == text:
            text = refused.wanted
        elif pooled + refused.wanted > refused.given:  # the pooled embedding, which may be joined with other numbers
            pooled += refused.wanted - refused.given
        else:
            raise refused
    raise refused


def _prompt(tokens: int, text: int, pooled: int, masked: bool) -> list:
    more = {"attention_mask": torch.ones(1, tokens, dtype=torch.long)} if masked else {}
    return [[noise(1, tokens, text), {"pooled_output": noise(1, pooled) if pooled else None} | more]]


def noise(*shape: int) -> Tensor:
    """Normal random numbers that leave the global random state alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class _Refused(Exception):
    """A layer was given so many numbers per row and takes another number of them."""

    def __init__(self, given: int, wanted: int) -> None:
        super().__init__(f"a layer takes {wanted} numbers and was given {given}")
        self.given, self.wanted = given, wanted


def _first_refusal(model: ModelPatcher, latents: Latents, prompt: list) -> _Refused | None:
    """One forward of ComfyUI's own with this prompt; None if no layer refuses it."""
    start = noise(*latents.shape(SIDE, SIDE))
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 1)
    try:
        with _Watch():
            comfy.sample.sample_custom(
                model, start, 1.0, comfy.samplers.KSAMPLER(_one_call), sigmas, prompt, prompt, torch.zeros_like(start),
                disable_pbar=True, seed=0,
            )  # fmt: skip
    except _Refused as refused:
        return refused
    return None


def _one_call(model: Callable[..., Tensor], x: Tensor, sigmas: Tensor, extra_args: dict[str, Any], **_: Any) -> Tensor:
    """A sampler, by ComfyUI's protocol."""
    model(x, sigmas[0] * x.new_ones(len(x)), **extra_args)
    return x


class _Watch(TorchFunctionMode):
    """Raises ``_Refused`` before a layer fails at its input's width. Sees this thread's operations alone."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        wanted = _wanted(func, args)
        if wanted is not None and wanted != args[0].shape[-1]:
            raise _Refused(args[0].shape[-1], wanted)
        return func(*args, **(kwargs or {}))


def _wanted(func: Any, args: tuple) -> int | None:
    """How many numbers per row an operation takes; None for one that takes any."""
    if func is F.linear:
        return args[1].shape[-1]
    if func in (F.rms_norm, F.layer_norm):
        return args[1][-1]
    return None
