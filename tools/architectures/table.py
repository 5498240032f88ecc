"""What an entry of the table is: a tiny configuration, and fresh random inputs of many sizes for its forward.

Imports no ComfyUI, so that a test can list the table before ComfyUI is set up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

VARIANTS = 24
# Latents of many sizes: square or not, even and odd, not divisible by a patch.
SIZES = (
    (8, 8), (10, 14), (14, 10), (16, 16), (12, 20), (5, 12), (13, 9), (7, 7), (20, 12), (6, 18), (11, 16), (16, 11),
    (18, 6), (9, 13), (12, 12), (10, 10), (15, 15), (8, 24), (24, 8), (14, 18), (17, 8), (8, 17), (6, 6), (22, 10),
)  # fmt: skip
# How configurations name the width of the prompt, of a pooled embedding, and of the input.
PROMPT_WIDTHS = (
    "context_in_dim", "context_dim", "crossattn_emb_channels", "cond_seq_dim", "cap_feat_dim", "text_dim",
    "text_feat_dim", "joint_attention_dim", "t5_feat_dim", "text_embedding_dim", "text_states_dim", "caption_channels",
    "txt_embed_dim", "llm_features_dim", "text_embed_dim", "instruction_feat_dim", "text_in_dim", "in_text_dim",
    "cond_channels", "text_hidden_dim", "txt_in_dim", "cross_attention_dim", "cond_token_dim",
)  # fmt: skip
POOLED_WIDTHS = ("adm_in_channels", "vec_in_dim", "in_text_dim2")

Latent = Tensor | list[Tensor]  # a list of video and sound, for a model of both


@dataclass
class Draw:
    """One variant's sizes, and the random numbers for it."""

    config: Mapping[str, Any]
    batch: int
    height: int
    width: int
    frames: int
    tokens: int
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in the model's dtype."""
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Numbers between ``low`` and ``high`` that half precision holds exactly; one per picture if no shape is given.

        Models turn such numbers into sines of a thousand times their value, where rounding would be all one sees.
        """
        value = torch.rand(shape or (self.batch,), generator=self.generator) * (high - low) + low
        return value.bfloat16().float()

    def integers(self, high: int, *shape: int) -> Tensor:
        """Whole numbers below ``high``."""
        return torch.randint(high, shape, generator=self.generator)

    def prompt(self, width: int | None = None, tokens: int | None = None) -> Tensor:
        """A prompt [batch, tokens, width]; the width is the configuration's, if not given."""
        width = width or first(self.config, PROMPT_WIDTHS)
        return self.normal(self.batch, tokens or self.tokens, width)

    def mask(self, tokens: int | None = None) -> Tensor:
        """An attention mask of whole numbers: each prompt has a length of its own, and the longest is all of it."""
        tokens = tokens or self.tokens
        lengths = (tokens - torch.arange(self.batch)).clamp(min=1)
        return (torch.arange(tokens)[None] < lengths[:, None]).long()

    def as_model(self, value: Any) -> Any:
        """A condition in the model's dtype, as ComfyUI's `apply_model` hands it over."""
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def video(self, channels: int, frames: int | None = None) -> Tensor:
        """A latent of the variant's size with ``channels``; ``frames`` if not the variant's own."""
        return self.normal(self.batch, channels, frames or self.frames, self.height, self.width)

    def image(self, channels: int) -> Tensor:
        """A latent of the variant's size without frames."""
        return self.normal(self.batch, channels, self.height, self.width)


@dataclass(frozen=True)
class Architecture:
    """A model of ComfyUI's in a tiny configuration.

    name: what the table calls it. A name with more than its class in it is that class with other inputs or parts.
    channels, dimensions: of its latent (3 dimensions have frames, 1 is a sequence).
    config: what the model is built with, over the fixed part in `comfy.supported_models`.
    conditions: more keyword arguments of the forward by name. The prompt, the pooled embedding and the guidance are
        there by themselves where the configuration has a width for them; None takes one away.
    family: the class in `comfy.supported_models`, where it has another name than the entry.
    since: the first ComfyUI that has it, where its class is older.
    newer: more of the configuration, which ComfyUIs after 0.3.75 ask for.
    timesteps: the time steps of the forward lie between 0 and this.
    concat: channels that are added to the latent (a mask, a first frame).
    scale, base, multiple: a size is one of SIZES times ``scale`` plus ``base``, rounded down to a multiple.
    latent: the latent, where it is not [batch, channels, (frames,) height, width]; a list where there are several.
    centred: the weights of its norms are differences from 1.
    state: weights that the class in `comfy.supported_models` reads when the model is made, by name.
    frames, batches: the most frames, and the batch sizes that the variants go through.
    clock: the time steps, where they are not one per picture; from the conditions.
    finish: completes the model before its weights are drawn, where no configuration does.
    options: what the sampler puts into transformer_options and this model reads.
    note: what is special about its forward.
    """

    name: str
    channels: int
    config: Mapping[str, Any]
    dimensions: int = 2
    conditions: Mapping[str, Callable[[Draw], Any] | None] = field(default_factory=dict)
    family: str = ""
    since: tuple[int, ...] = ()
    newer: Mapping[str, Any] = field(default_factory=dict)
    timesteps: float = 1000.0
    concat: int = 0
    scale: int = 1
    base: int = 0
    multiple: int = 1
    frames: int = 5
    batches: tuple[int, ...] = (1, 2, 3, 4)
    clock: Callable[[Tensor, dict[str, Any]], Any] | None = None
    finish: Callable[[Any], None] | None = None
    latent: Callable[[Draw], Latent] | None = None
    centred: bool = False
    state: Callable[[Mapping[str, Any]], dict[str, Tensor]] | None = None
    options: Callable[[Draw], dict[str, Any]] | None = None
    note: str = ""

    @property
    def family_name(self) -> str:
        """The name of its class in `comfy.supported_models`."""
        return self.family or self.name

    def request(self, k: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Variant ``k`` by part, on the CPU: latent, concat, timesteps, conditions and options."""
        draw = self.draw(k, dtype)
        latent = self.latent(draw) if self.latent else self._plain(draw, self.channels)
        draw.batch = parts_of(latent)[0].shape[0]  # a model may count frames as pictures
        return {
            "latent": latent,
            "concat": self._plain(draw, self.concat) if self.concat else None,
            "timesteps": draw.uniform(0.05, 0.95) * self.timesteps,
            "conditions": {name: draw.as_model(make(draw)) for name, make in self._conditions().items() if make},
            "options": self.options(draw) if self.options else {},
        }

    def inputs(
        self, k: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of ``diffusion_model`` for variant ``k``: random values, the same for the same ``k``."""
        parts = self.request(k, dtype)
        latent = parts["latent"] if parts["concat"] is None else torch.cat((parts["latent"], parts["concat"]), dim=1)
        time = parts["timesteps"] if self.clock is None else self.clock(parts["timesteps"], parts["conditions"])
        named = parts["conditions"] | {"transformer_options": parts["options"]}
        return moved((latent, time), device), moved(named, device)

    def output_shapes(self, k: int) -> list[tuple[int, ...]]:
        """The shape of each part that the forward gives for variant ``k``: the latent's."""
        return [tuple(part.shape) for part in parts_of(self.request(k)["latent"])]

    def draw(self, k: int, dtype: torch.dtype = torch.float32) -> Draw:
        """The sizes of variant ``k``."""
        sizes = (size * self.scale + self.base for size in SIZES[k % len(SIZES)])
        height, width = (size // self.multiple * self.multiple for size in sizes)
        batch, frames, tokens = self.batches[k % len(self.batches)], 1 + 2 * k % self.frames, 4 + (7 * k + 5) % 29
        seed = torch.Generator().manual_seed(1000 + k)
        return Draw(self.config, batch, height, width, frames, tokens, dtype, seed)

    def _plain(self, draw: Draw, channels: int) -> Tensor:
        if self.dimensions == 1:
            return draw.normal(draw.batch, channels, draw.height * draw.width // 4)
        return draw.video(channels) if self.dimensions == 3 else draw.image(channels)

    def _conditions(self) -> dict[str, Callable[[Draw], Any] | None]:
        known: dict[str, Callable[[Draw], Any] | None] = {}
        if first(self.config, PROMPT_WIDTHS):
            known["context"] = Draw.prompt
        if pooled := first(self.config, POOLED_WIDTHS):
            known["y"] = lambda draw: draw.normal(draw.batch, pooled)
        if self.config.get("guidance_embed"):
            known["guidance"] = lambda draw: draw.uniform(1.0, 6.0)
        return known | dict(self.conditions)


def parts_of(value: Tensor | list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    """The parts of a latent, or of what a forward gives: one for nearly all models."""
    return [value] if isinstance(value, Tensor) else list(value)


def first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of ``names`` that ``config`` has a value for."""
    return next((config[name] for name in names if config.get(name)), None)


def moved(value: Any, device: str | torch.device) -> Any:
    """``value`` with every tensor in it on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(part, device) for part in value)
    return value


def in_bfloat16(arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The inputs of a variant with floating-point tensors in bfloat16; what lies in options or lists is as it was."""

    def half(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(half, arguments)), {name: half(value) for name, value in named.items()}
