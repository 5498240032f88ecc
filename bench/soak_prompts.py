"""What a prompt of the soak is made of, and how it is drawn. Plain Python: neither torch nor ComfyUI.

A prompt depends on the seed and its number alone, so one can be drawn again without those before it.
"""

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

SAMPLERS = ("euler", "euler_ancestral", "dpmpp_2m", "heun")
MODES = ("auto", "auto", "auto", "auto", "auto", "auto", "auto", "exact", "off", "off")
CONDS = ("one", "one", "one", "two", "area", "late")
PATCHES = (  # of tools.patching, by name
    "input_block", "output_block_in_place", "attn1", "attn2_output", "attn1_replace_one", "middle", "embedding",
    "attention_override",
)  # fmt: skip
ADAPTER = "adapter"  # as IPAdapter: layers and an image (tools.adapters)
LORAS = 3  # random ones to choose from
INTERRUPT, FAILURE = "interrupt", "failure"


class Control(NamedTuple):
    """A ControlNet on both prompts; percents of the schedule."""

    strength: float
    start: float
    end: float
    compiled: bool


class Skip(NamedTuple):
    """Skip Blocks."""

    interval: int
    depth: str


class Hook(NamedTuple):
    """A LoRA on the positive prompt alone, at this strength, in mid-run at another one."""

    lora: int
    strength: float
    changes: bool


class Stop(NamedTuple):
    """How a first try of the prompt is broken off: at this step, by the user or by another pack's patch."""

    how: str
    step: int


@dataclass(frozen=True)
class Scope:
    """What is drawn from, for one model and one machine."""

    sizes: tuple[tuple[int, int], ...]  # width, height in image pixels
    images: tuple[int, ...]
    budgets_mb: tuple[int, ...]
    rebuild: float  # how often the models are freed and built again, of 1
    unload: float  # how often they are unloaded
    every: int  # prompts from one look at memory and at the shared models to the next
    modes: tuple[str, ...] = MODES
    most_pixels: int = 1 << 30  # of all images and frames of a prompt together
    conds: tuple[str, ...] = CONDS
    patches: tuple[str, ...] = PATCHES
    controls: float = 0.3  # how often there is a ControlNet
    frames: tuple[int, ...] = (1,)
    shares: tuple[float, ...] = (1.0,)  # of the model's weights, that fit on the device
    hooks: float = 0.15  # how often a LoRA is of one prompt alone
    masks: float = 0.1  # how often a part of the picture alone is sampled


@dataclass(frozen=True)
class Prompt:
    """One prompt: everything that decides its picture, what happens around it, and how it is compiled."""

    index: int
    seed: int
    width: int
    height: int
    images: int
    sampler: str
    steps: int
    cfg: float
    denoise: float  # below 1, of a random picture
    conds: str
    tokens: int
    loras: tuple[tuple[int, float], ...]  # number, strength
    control: Control | None
    patch: str  # of another pack; "" for none
    skip: Skip | None
    mode: str
    budget_mb: int
    vae: bool  # Compile VAE
    frames: int
    share: float  # of the model's weights, that fits on the device
    hook: Hook | None
    masked: bool  # a part of the picture alone is sampled
    eager_first: bool
    twice: bool  # the same compiled patcher again
    stop: Stop | None
    unload: str  # "", before the prompt or between its two ways
    rebuild: bool

    def line(self) -> str:
        """Everything in one line."""
        frames = f"x{self.frames}" if self.frames > 1 else ""
        parts = [
            f"{self.index}: seed {self.seed}, {self.width}x{self.height}{frames} x{self.images}, {self.sampler}",
            f"{self.steps} steps, cfg {self.cfg:g}, {self.conds} cond of {self.tokens} tokens",
            f"denoise {self.denoise:g}" if self.denoise < 1 else "",
            " + ".join(f"LoRA {number} at {strength:g}" for number, strength in self.loras),
            _control_text(self.control) if self.control else "",
            _hook_text(self.hook) if self.hook else "",
            "masked" if self.masked else "",
            f"patch {self.patch}" if self.patch else "",
            f"skip {self.skip.interval} at depth {self.skip.depth}" if self.skip else "",
            f"mode {self.mode} with {self.budget_mb} MB",
            "Compile VAE" if self.vae else "",
            f"{self.share:.0%} of the weights fit" if self.share < 1 else "",
            "eager first" if self.eager_first else "compiled first",
            "twice" if self.twice else "",
            f"{self.stop.how} at step {self.stop.step}" if self.stop else "",
            f"unload {self.unload}" if self.unload else "",
            "rebuild" if self.rebuild else "",
        ]
        return ", ".join(filter(None, parts))


def _control_text(control: Control) -> str:
    text = f"control {control.strength:g} from {control.start:g} to {control.end:g}"
    return f"compiled {text}" if control.compiled else text


def _hook_text(hook: Hook) -> str:
    text = f"LoRA {hook.lora} at {hook.strength:g} on the prompt"
    return f"{text}, which changes" if hook.changes else text


def draw(seed: int, index: int, scope: Scope) -> Prompt:
    """Prompt number ``index`` of the sequence that ``seed`` names."""
    dice = random.Random(f"{seed}/{index}")
    skip = Skip(dice.choice((2, 3, 4)), dice.choice(("auto", "0", "1"))) if dice.random() < 0.2 else None
    steps = dice.choice((9, 10, 12) if skip and dice.random() < 0.8 else (2, 3, 4, 5, 6))  # 8 or fewer skip nothing
    prompt = Prompt(
        index=index, seed=dice.randrange(1 << 31), steps=steps, skip=skip,
        **_picture(dice, scope), **_patches(dice, scope), **_ways(dice, scope), stop=_stop(dice, steps), frames=1,
        share=1.0, **_later(random.Random(f"{seed}/{index}/later"), scope),
    )  # fmt: skip
    if len(scope.frames) > 1:
        most = max(1, scope.most_pixels // (prompt.width * prompt.height * prompt.images))
        prompt = replace(prompt, frames=dice.choice([frames for frames in scope.frames if frames <= most] or [1]))
    if len(scope.shares) > 1:
        share = dice.choice(scope.shares)
        # ComfyUI writes a prompt's LoRA into weights on the card
        prompt = replace(prompt, share=share, hook=prompt.hook if share == 1.0 else None)
    return replace(prompt, rebuild=False) if prompt.unload else prompt


def _later(dice: random.Random, scope: Scope) -> dict[str, Any]:
    """What prompts have had since 2026-11-27, by other dice: all else is as in the sequences before."""
    hook = Hook(dice.randrange(LORAS), dice.choice((-0.4, 0.7, 1.0)), dice.random() < 0.5)
    return {"hook": hook if dice.random() < scope.hooks else None, "masked": dice.random() < scope.masks}


def _picture(dice: random.Random, scope: Scope) -> dict[str, Any]:
    width, height = dice.choice(scope.sizes)
    fitting = [images for images in scope.images if images * width * height <= scope.most_pixels] or [1]
    return {
        "width": width, "height": height, "images": dice.choice(fitting), "sampler": dice.choice(SAMPLERS),
        "cfg": dice.choice((1.0, 2.0, 4.5, 7.0)), "denoise": dice.choice((1.0, 1.0, 1.0, 0.6)),
        "conds": dice.choice(scope.conds), "tokens": dice.choice((77, 77, 77, 154)),
    }  # fmt: skip


def _patches(dice: random.Random, scope: Scope) -> dict[str, Any]:
    count = dice.choice((0, 0, 1, 2))
    loras = tuple((number, dice.choice((-0.4, 0.3, 0.7, 1.0))) for number in dice.sample(range(LORAS), count))
    start, end = dice.choice(((0.0, 1.0), (0.0, 1.0), (0.0, 0.5), (0.3, 1.0)))
    control = Control(dice.choice((0.2, 0.5, 1.0)), start, end, dice.random() < 0.6)
    return {
        "loras": loras,
        "control": control if dice.random() < scope.controls else None,
        "patch": dice.choice(scope.patches) if dice.random() < 0.15 else "",
    }


def _ways(dice: random.Random, scope: Scope) -> dict[str, Any]:
    unload = dice.choice(("before", "between")) if dice.random() < scope.unload else ""
    return {
        "mode": dice.choice(scope.modes), "budget_mb": dice.choice(scope.budgets_mb), "vae": dice.random() < 0.6,
        "eager_first": dice.random() < 0.7, "twice": dice.random() < 0.2, "unload": unload,
        "rebuild": dice.random() < scope.rebuild,
    }  # fmt: skip


def _stop(dice: random.Random, steps: int) -> Stop | None:
    how = dice.choice((INTERRUPT, FAILURE))
    return Stop(how, dice.randrange(steps)) if dice.random() < 0.15 else None
