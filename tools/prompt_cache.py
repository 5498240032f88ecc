"""A small model that computes keys and values of its prompt once in a sampling run, as Qwen-Image 2.1 does.

ComfyUI has that model since 0.37, which the tests cannot have. Its idioms: what is kept lies in an object that the run
puts into the model, and is found again by comparing prompts; blocks get their attention as a function, which holds the
kept tensors, and write into their input. Call `tools.embed.use_comfyui()` first.
"""

from collections.abc import Callable
from typing import Any

import comfy.model_base
import comfy.supported_models
import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from tools.architectures.patchers import randomise

WIDTH, HEADS, PATCH, PROMPT = 64, 2, 2, 48


class PromptCache:
    """Keys and values of each prompt, by block."""

    def __init__(self) -> None:
        self.slots: list[dict[str, Any]] = []
        self.slot: dict[str, Any] | None = None

    def find(self, prompt: Tensor) -> bool:
        """Whether there is anything of this prompt [B, N, C]; makes room for it if not."""
        for slot in self.slots:
            if slot["prompt"].shape == prompt.shape and torch.equal(slot["prompt"], prompt):
                self.slot = slot
                return True
        self.slot = {"prompt": prompt.clone(), "blocks": {}}
        self.slots.append(self.slot)
        return False


def filling(cache: PromptCache, block: int, options: dict[str, Any]) -> Callable[..., Tensor]:
    """The attention of the prompt to itself, which keeps its keys and values."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.slot["blocks"][block] = torch.stack([k, v], dim=1)
        return optimized_attention(q, k, v, HEADS, transformer_options=options)

    return attend


def joined(keys: Tensor, values: Tensor, options: dict[str, Any]) -> Callable[..., Tensor]:
    """The attention of the picture to the prompt and itself."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = torch.cat([keys, k], dim=1), torch.cat([values, v], dim=1)
        return optimized_attention(q, k, v, HEADS, transformer_options=options)

    return attend


class Block(nn.Module):
    def __init__(self, operations: Any, **form: Any) -> None:
        super().__init__()
        self.norm = operations.LayerNorm(WIDTH, elementwise_affine=False, **form)
        self.qkv = operations.Linear(WIDTH, 3 * WIDTH, bias=False, **form)
        self.out = operations.Linear(WIDTH, WIDTH, **form)
        self.up, self.down = (operations.Linear(*size, **form) for size in ((WIDTH, 256), (128, WIDTH)))

    def forward(
        self, x: Tensor, scale: Tensor, gate: Tensor, attend: Callable[..., Tensor],
        transformer_options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """x [B, N, C] is written into."""
        q, k, v = self.qkv(self.norm(x) * (1 + scale)).chunk(3, dim=-1)
        for patch in transformer_options.get("patches", {}).get("attn1_patch", ()):
            q = patch(q, k, v, extra_options={**transformer_options, "tokens": x.shape[1]})["q"]
        x.addcmul_(self.out(attend(q, k, v)), gate)
        a, b = self.up(self.norm(x) * (1 + scale)).chunk(2, dim=-1)
        return x.addcmul_(self.down(nn.functional.silu(a) * b), gate)


class Network(nn.Module):
    """Pictures [B, 16, H, W] and prompts [B, N, 48]."""

    def __init__(self, blocks: int, device: Any = None, dtype: Any = None, operations: Any = None, **_: Any) -> None:
        super().__init__()
        form = {"device": device, "dtype": dtype}
        self.dtype = dtype
        self.enter = operations.Linear(16 * PATCH**2, WIDTH, **form)
        self.read = operations.Linear(PROMPT, WIDTH, **form)
        self.time = operations.Linear(1, 2 * WIDTH, **form)
        self.blocks = nn.ModuleList([Block(operations, **form) for _ in range(blocks)])
        self.leave = operations.Linear(WIDTH, 16 * PATCH**2, **form)
        self.cache: PromptCache | None = None
        self.is_sampled = False

    def forward(
        self, x: Tensor, timesteps: Tensor, context: Tensor, transformer_options: dict[str, Any], **_: Any
    ) -> Tensor:  # fmt: skip
        rows, _, height, width = x.shape
        tokens = self.enter(nn.functional.pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2))
        scale, gate = self.time(timesteps[:, None, None].to(x.dtype)).tanh().chunk(2, dim=-1)
        still = self.time(timesteps.new_zeros(1, 1, 1).to(x.dtype)).tanh().chunk(2, dim=-1)
        off = transformer_options.get("no_prompt_cache") or transformer_options.get("patches")
        if self.is_sampled and self.cache is None and not off:
            self.cache = PromptCache()
        cache = None if off else self.cache
        found = cache is not None and cache.find(context)
        prompt, kept = None if found else self.read(context), cache or PromptCache()
        if cache is None:
            kept.find(context)
        for number, block in enumerate(self.blocks):
            if not found:
                prompt = block(prompt, *still, filling(kept, number, transformer_options), transformer_options)
            keys, values = kept.slot["blocks"][number].unbind(1)
            tokens = block(tokens, scale, gate, joined(keys, values, transformer_options), transformer_options)
        out = self.leave(tokens).transpose(1, 2).reshape(rows, -1, height // PATCH, width // PATCH)
        return nn.functional.pixel_shuffle(out, PATCH)


class Model(comfy.model_base.Lumina2):
    """Drops what is kept before and after each run, as ComfyUI tells it of them."""

    def __init__(self, config: Any, device: Any) -> None:
        comfy.model_base.BaseModel.__init__(
            self, config, comfy.model_base.ModelType.FLOW, device=device, unet_model=Network
        )
        self.memory_usage_factor_conds = ()

    @property
    def current_patcher(self) -> Any:
        return self.__dict__.get("_patcher")

    @current_patcher.setter
    def current_patcher(self, patcher: Any) -> None:
        self.__dict__["_patcher"] = patcher
        if hasattr(self, "diffusion_model"):
            self.diffusion_model.cache, self.diffusion_model.is_sampled = None, patcher is not None


def make(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", blocks: int = 5) -> ModelPatcher:
    """The model with random weights."""
    kind, device = comfy.supported_models.Lumina2, torch.device(device)
    config = kind(kind.unet_config | {"cap_feat_dim": PROMPT, "blocks": blocks})
    config.set_inference_dtype(dtype, None)
    model = Model(config, device)
    randomise(model)
    return ModelPatcher(model.to(device), load_device=device, offload_device=device)
