"""What both trainings share: bf16 models with fp32 master weights and their moving average, and a clock."""

from __future__ import annotations

import math
import time

import torch
from torch import nn

# Layers that start at zero, so that every residual branch starts as the identity (as SD's `zero_module`).
ZERO_SUFFIXES = ("out_layers.3", "proj_out", "out.2")


def initialise(model: nn.Module, zero: tuple[str, ...] = ZERO_SUFFIXES) -> None:
    """Torch's default initial weights, which ComfyUI's layers skip, and zeros where a name ends in one of `zero`."""
    for name, module in model.named_modules():
        for kind in (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.LayerNorm):
            if isinstance(module, kind):
                kind.reset_parameters(module)
        if name.endswith(zero) and isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


class Clock:
    """Training ends by time, so the schedule follows time too: `progress` goes from 0 to 1 over `minutes`."""

    def __init__(self, minutes: float):
        self.limit = minutes * 60
        self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def progress(self) -> float:
        return min(1.0, self.seconds / max(self.limit, 1e-9))


class Master:
    """Adam on fp32 copies of a bf16 model's parameters, with an exponential moving average of them.

    Computing in bf16 throughout, norms included, moves half the bytes of autocast, which widens at each norm.
    """

    def __init__(self, modules: list[nn.Module], rate: float, average: float = 0.999):
        self.params = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.master = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.average = [m.detach().clone() for m in self.master]
        for master in self.master:
            master.grad = torch.zeros_like(master)
        self.decay, self.rate, self.steps = average, rate, 0
        self.adam = torch.optim.AdamW(self.master, lr=rate, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, fused=True)
        with torch.no_grad():
            for p in self.params:
                p.data = p.data.to(torch.bfloat16, memory_format=torch.preserve_format)

    def step(self, progress: float) -> None:
        """One update from the gradients in the model: 100 steps of warm-up, then a cosine down to 1 %."""
        scale = min(1.0, (self.steps + 1) / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        torch._foreach_copy_([m.grad for m in self.master], [p.grad for p in self.params])
        self.forget()
        nn.utils.clip_grad_norm_(self.master, 1.0, foreach=True)
        self.update(scale)
        self.steps += 1
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.master)
            decay = min(self.decay, self.steps / (self.steps + 10))
            torch._foreach_lerp_(self.average, self.master, 1 - decay)

    def update(self, scale: float) -> None:
        """Moves the fp32 copies by their gradients, at this share of the highest rate."""
        self.adam.param_groups[0]["lr"] = self.rate * scale
        self.adam.step()

    def forget(self) -> None:
        """Drops the gradients in the model."""
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def load_average(self) -> None:
        """Puts the averaged weights into the model, in fp32."""
        for param, average in zip(self.params, self.average, strict=True):
            param.data = average.clone()
