"""The soak's models with all that other nodes put on them: LoRAs, ControlNet, prompts, patches; and their sampling.

Everything is ComfyUI's own class or function; only the weights are random (those of the demo model are trained).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import comfy.model_management as mm
import comfy.sample
import comfy.sd
import torch
from anyshape_demo import model as demo
from comfy.controlnet import ControlBase
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from torch import Tensor

import nodes
from bench import models, zoo
from bench.product import Settings, SkipSettings, compile_controlnet, compile_model, skip_blocks
from bench.soak_prompts import ADAPTER, CONDS, LORAS, Prompt, Scope
from tools import driving, dynamic_vram, loras, patching
from tools.adapters import Adapter, attending, widths

KEY = "soak"
RANK, LORA_LAYERS = 4, 40
SIDES = range(64, 161, 8)
ON_CPU = Scope(
    sizes=tuple((width, height) for width in SIDES for height in SIDES), images=(1, 1, 2, 3, 4), budgets_mb=(2048,),
    rebuild=0.05, unload=0.1, every=20, most_pixels=4 * 96 * 96,
)  # fmt: skip
ON_GPU = Scope(
    sizes=((512, 512), (512, 768), (768, 512), (544, 408), (728, 720), (960, 720), (640, 896), (768, 768), (520, 776),
           (584, 824), (640, 1024), (264, 200)),
    images=(1, 1, 2, 4), budgets_mb=(2048, 2048, 2048, 256, 0), rebuild=0.008, unload=0.02, every=50,
    modes=("auto",) * 15 + ("exact", "exact", "off", "off"), most_pixels=1024 * 768,
)  # fmt: skip
SHARES = (1.0,) * 7 + (0.7, 0.3, 0.0)  # of the weights
ROOM = 3 << 30  # bytes that sampling may take besides the weights, in eager and through our nodes
TRANSFORMERS = {  # few and narrow blocks, with heads as wide as the real ones
    "zimage": {"dim": 512, "n_heads": 4, "n_kv_heads": 4, "n_layers": 6, "cap_feat_dim": 64},
    "wan": {"dim": 512, "num_heads": 4, "num_layers": 6, "ffn_dim": 1024, "text_dim": 64},
}  # fmt: skip
WIDE = {  # few blocks as wide as the real ones: 2 to 3 GB, of which a part may not fit
    "zimage": {"n_layers": 6, "cap_feat_dim": 64},
    "wan": {"num_layers": 4, "text_dim": 64},
}
SMALL_VAE = {"ch": 32, "num_res_blocks": 1}
NAMES = ("demo", "small", "sd15", "sdxl", *TRANSFORMERS)


def known(name: str) -> bool:
    """Whether ``name`` is a model of the soak, or a transformer and a form of its weights: "zimage-int8"."""
    return name in NAMES or (_kind(name) in TRANSFORMERS and zoo.known(name))


def scope(name: str, cuda: bool, partly: bool = False, dynamic: bool = False) -> Scope:
    """What is drawn from for the model ``name``. partly: some prompts find room for a share of the weights alone.

    dynamic: with weights that are mapped in. ComfyUI reads such a model from its file once more for a LoRA of one
    prompt, and there is none. It has no such LoRAs of quantised weights.
    """
    whole, quantised, name = ON_GPU if cuda else ON_CPU, name not in NAMES, _kind(name)
    if partly:
        whole = replace(whole, shares=SHARES)
    if dynamic or quantised:
        whole = replace(whole, hooks=0.0)
    if name not in TRANSFORMERS:
        return whole
    whole = replace(whole, patches=("attention_values",), controls=0.0, rebuild=ON_CPU.rebuild, every=ON_CPU.every)
    if name != "wan":
        return whole
    # Areas are of pictures. A video's frames go through the VAE one after another.
    conds = tuple(kind for kind in CONDS if kind != "area")
    return replace(whole, conds=conds, frames=(1, 5, 9, 13), most_pixels=4 * whole.most_pixels)


@dataclass
class Way:
    """A prompt as one of its two ways samples it."""

    patcher: ModelPatcher
    positive: list
    negative: list
    calls: list[int] = field(default_factory=lambda: [0])  # of the diffusion model, by ComfyUI


class Parts:
    """The models of a soak: UNet, VAE, ControlNet, LoRAs."""

    def __init__(self, name: str, partly: bool = False, dynamic: bool = False) -> None:
        """partly: see ``scope``. dynamic: with weights that are mapped in."""
        self.name, self.partly, self.dynamic = name, partly, dynamic
        with dynamic_vram.with_weights() if dynamic else nullcontext():
            self.patcher, self.vae, self.text = _load(name, (WIDE if partly else TRANSFORMERS).get(_kind(name), {}))
            self.control = None if _kind(name) in TRANSFORMERS else models.controlnet_for(self.patcher)
        if dynamic:
            self.patcher = dynamic_vram.mapped(self.patcher)
        self.loras = [_lora(self.patcher, seed) for seed in range(LORAS)]
        self.adapter: Adapter | None = None  # once a prompt has one

    def room(self, share: float) -> AbstractContextManager[None]:
        """Within, only this share of the model's weights fits on the device."""
        if share == 1.0:
            return nullcontext()
        return dynamic_vram.ballast(self.patcher.model_size() * share + ROOM)

    def modules(self) -> list[torch.nn.Module]:
        """Everything that has weights."""
        control = [] if self.control is None else [self.control.control_model]
        return [self.patcher.model, self.vae.first_stage_model, *control]

    @property
    def rounding(self) -> float:
        """How far a latent may be off before the model reads it: where weights are quantised, by its rounding."""
        return 0.0 if self.name in NAMES else torch.finfo(self.dtype).eps / 2

    @property
    def dtype(self) -> torch.dtype:
        """In which the UNet computes."""
        return self.patcher.model.manual_cast_dtype or self.patcher.model.get_dtype()

    def way(self, prompt: Prompt, fast: bool) -> Way:
        """The prompt in eager or through our nodes. Blocks are skipped in both: in eager on ComfyUI's own layers."""
        patcher = self.patcher.clone()
        for number, strength in prompt.loras:
            patcher, _ = comfy.sd.load_lora_for_models(patcher, None, self.loras[number], strength, 0)
        if prompt.patch == ADAPTER:
            self._adapt(patcher, prompt.seed)
        elif prompt.patch:
            getattr(patching, prompt.patch)(patcher, [])
        if prompt.skip:
            patcher, _ = skip_blocks(patcher, SkipSettings(*prompt.skip), lambda line: None)
        if fast:
            patcher, _ = compile_model(patcher, Settings(prompt.mode, prompt.budget_mb))
        way = Way(patcher, *self._prompts(prompt, fast))
        patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, partial(_counting, way.calls))
        return way

    def _adapt(self, patcher: ModelPatcher, seed: int) -> None:
        """An adapter with one of four images, at all noise levels or in a range."""
        if self.adapter is None:
            self.adapter = Adapter(widths(models, self.patcher)).to(self.patcher.load_device, self.dtype)
        levels = {"start": 8.0, "end": 0.5} if seed // 4 % 2 else {}
        attending(self.adapter, seed % 4, **levels)(patcher)

    def _prompts(self, prompt: Prompt, fast: bool) -> tuple[list, list]:
        positive, negative = self._positive(prompt), self._cond(prompt, 1)
        if prompt.hook is not None:
            hook = prompt.hook
            positive = loras.hooked(positive, self.loras[hook.lora], hook.strength, hook.changes)
        if prompt.control is None:
            return positive, negative
        strength, start, end, compiled = prompt.control
        control = compile_control(self.control) if fast and compiled else self.control
        hint = torch.rand(1, prompt.height, prompt.width, 3, generator=torch.Generator().manual_seed(prompt.seed))
        return nodes.ControlNetApplyAdvanced().apply_controlnet(positive, negative, control, hint, strength, start, end)

    def _positive(self, prompt: Prompt) -> list:
        first, second = self._cond(prompt, 2), self._cond(prompt, 3)
        if prompt.conds == "one":
            return first
        if prompt.conds == "area":
            width, height = (max(64, side // 16 * 8) for side in (prompt.width, prompt.height))
            x, y = (max(0, side - 64) // 16 * 8 for side in (prompt.width, prompt.height))
            (second,) = nodes.ConditioningSetArea().append(second, width, height, x, y, 0.8)
        if prompt.conds == "late":
            (second,) = nodes.ConditioningSetTimestepRange().set_range(second, 0.4, 1.0)
        return nodes.ConditioningCombine().combine(first, second)[0]

    def _cond(self, prompt: Prompt, which: int) -> list:
        if self.text is None:
            return models.conditioning(self.patcher, prompt.tokens, prompt.seed % 1000 + which)
        words = self.text.prompts[(prompt.seed + 97 * which) % len(self.text.prompts)] if which > 1 else ""
        return demo.encode(self.text, " ".join([words] * (1 if prompt.tokens == 77 else 78)))


def _kind(name: str) -> str:
    """A model's name without the form of its weights."""
    return name.partition("-")[0]


def _load(name: str, changes: dict[str, Any]) -> tuple[ModelPatcher, comfy.sd.VAE, Any]:
    """MODEL, VAE and the demo's text encoder. changes: to a transformer's config."""
    if name == "demo":
        return demo.load(None if torch.cuda.is_available() else "fp32")
    if name == "small":
        patcher = models.unet("sdxl", torch.float32, **driving.UNETS["sdxl"])
        return patcher, models.vae(torch.float32, **SMALL_VAE), None
    dtype = None if torch.cuda.is_available() else torch.float32
    if _kind(name) == "zimage":
        return zoo.make(name, dtype, **changes), models.vae(dtype, **SMALL_VAE, z_channels=16), None
    if _kind(name) == "wan":
        return zoo.make(name, dtype, **changes), models.wan_vae(dtype, dim=32), None
    return models.unet(name), models.vae(), None


def compile_control(control: ControlBase) -> ControlBase:
    """The Compile ControlNet node's work."""
    compiled, message = compile_controlnet(control)
    assert message == "", message
    return compiled


def _lora(patcher: ModelPatcher, seed: int) -> dict[str, Tensor]:
    """A plain LoRA on random layers of the model; at strength 1 it changes a weight by about as much as it has."""
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator)
    weights = patcher.model.diffusion_model.named_parameters()  # as large as they are meant, where they are quantised
    layers = {name: weight for name, weight in weights if name.endswith(".weight") and weight.ndim > 1}
    chosen = torch.randperm(len(layers), generator=generator)[:LORA_LAYERS].tolist()
    lora = {}
    for name, weight in (list(layers.items())[index] for index in chosen):
        key, (out, into, *kernel) = f"diffusion_model.{name.removesuffix('.weight')}", weight.shape
        lora[f"{key}.lora_up.weight"] = randn(out, RANK, *(1 for _ in kernel)) * RANK**-0.5
        lora[f"{key}.lora_down.weight"] = randn(RANK, into, *kernel) * weight[0].numel() ** -0.5
    return lora


def failing(patcher: ModelPatcher, fails: Callable[[], bool], error: str) -> None:
    """Another pack's patch, which raises RuntimeError once ``fails`` says so: of a UNet's blocks, or of attention."""

    def check() -> None:
        if fails():
            raise RuntimeError(error)

    def block(h: Tensor, options: dict[str, Any]) -> Tensor:
        check()
        return h

    def override(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        check()
        return func(*args, **kwargs)

    if hasattr(patcher.model.diffusion_model, "input_blocks"):
        patcher.set_model_input_block_patch(block)
    else:
        patcher.model_options["transformer_options"]["optimized_attention_override"] = override


def _counting(calls: list[int], executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Tensor:
    """DIFFUSION_MODEL: another pack's wrapper, which counts."""
    calls[0] += 1
    return executor(*args, **kwargs)


def trembling(way: Way, out: float, into: float = 0.0) -> Way:
    """The same with each output of the diffusion model off by a relative L2 of ``out``, and each latent by ``into``."""
    generator = torch.Generator(way.patcher.load_device).manual_seed(0)

    def off(tensor: Tensor, amount: float) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        return (tensor + noise * (amount * tensor.float().square().mean().sqrt())).to(tensor.dtype)

    def tremble(executor: WrapperExecutor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return off(executor(off(x, into) if into else x, *args, **kwargs), out)

    patcher = way.patcher.clone()
    patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "soak.tremble", tremble)
    return Way(patcher, way.positive, way.negative, way.calls)


def sample(way: Way, prompt: Prompt, latent: Tensor, callback: Callable[..., None] | None = None) -> Tensor:
    """One sampling run, as ComfyUI's KSampler node does it: the final latent on the CPU.

    The model is loaded before: ComfyUI makes the schedule with the sampling tables where they lie at that moment, and
    CPU and GPU round differently. A sigma half-way between two timesteps, or just where a cond begins, then falls to
    one side in the first run after a load and to the other in the next, in eager too.
    """
    needed = way.patcher.memory_required([2 * len(latent), *latent.shape[1:]])  # as a sampling run asks for
    mm.load_models_gpu([way.patcher], memory_required=needed)
    noise = comfy.sample.prepare_noise(latent, prompt.seed)
    return comfy.sample.sample(
        way.patcher, noise, prompt.steps, prompt.cfg, prompt.sampler, "normal", way.positive, way.negative, latent,
        denoise=prompt.denoise, callback=callback, disable_pbar=True, seed=prompt.seed,
        noise_mask=_mask(prompt, latent) if prompt.masked else None,
    )  # fmt: skip


def _mask(prompt: Prompt, latent: Tensor) -> Tensor:
    """1 where the picture is sampled: [1, 1, height, width] of the latent, at random."""
    generator = torch.Generator().manual_seed(prompt.seed)
    small = torch.rand(1, 1, 3, 3, generator=generator).round()
    return torch.nn.functional.interpolate(small, latent.shape[-2:], mode="bilinear")
