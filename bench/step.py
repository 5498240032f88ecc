"""One call of a model inside a real sampling run, made as often as a benchmark likes.

ComfyUI lets a node take the place of the call (``model_function_wrapper``): a sampling run is begun, and at its first
step the model is called by ``body``. Everything that belongs to a run is therefore in place, wrappers of Compile Model
included, and what is timed is exactly ``apply_model``. The run has two steps: a size is not prepared where a run makes
one.
"""

import argparse
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from bench import measure, models

T = TypeVar("T")
FEWEST = 3  # repeats, however long a call takes


class Case(NamedTuple):
    """A size in image pixels, images per prompt, frames of a video, and whether the negative prompt is left out."""

    width: int
    height: int
    images: int = 1
    frames: int = 1
    no_cfg: bool = False

    def __str__(self) -> str:
        frames, images = (f"{sign}{n}" if n > 1 else "" for sign, n in (("x", self.frames), ("*", self.images)))
        return f"{self.width}x{self.height}{frames}{images}{' without CFG' if self.no_cfg else ''}"

    def sample(self, patcher: ModelPatcher, steps: int, callback: Callable[..., None] | None = None) -> Tensor:
        """One sampling run. Without CFG is ``cfg=1.0``; with it is whatever ``models.sample`` does by itself.

        callback: the sampler's.
        """
        guidance = {"cfg": 1.0} if self.no_cfg else {}
        return models.sample(
            patcher, self.width, self.height, self.images, steps=steps, frames=self.frames, callback=callback,
            **guidance,
        )  # fmt: skip


def size(text: str) -> Case:
    """The case that ``WxH[xFRAMES][*IMAGES]`` names."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?(?:\*(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 1024x1024, 832x480x33 or 768x768*4")
    width, height, frames, images = (int(number or 1) for number in found.groups())
    return Case(width, height, images, frames)


class Given(NamedTuple):
    """What changes from step to step: the noisy latent and its noise level, a row each."""

    x: Tensor
    sigma: Tensor


class Step:
    """The call that ComfyUI's sampler is about to make."""

    def __init__(self, apply_model: Callable[..., Tensor], given: dict[str, Any], sampling: Any) -> None:
        self.own = Given(given["input"], given["timestep"])
        self._apply, self._rest, self._sampling = apply_model, given["c"], sampling

    def __call__(self, given: Given | None = None) -> Tensor:
        """The denoised latent, in float32."""
        x, sigma = given or self.own
        options = self._rest["transformer_options"]
        options = {**options, "sigmas": sigma[: len(options["sigmas"])]}
        return self._apply(x, sigma, **self._rest | {"transformer_options": options})

    def fresh(self, seed: int, percent: float) -> Given:
        """Another latent, where ``percent`` of a run is over; depends on the seed and the size alone."""
        x, sigma = self.own
        generator = torch.Generator(x.device).manual_seed(seed)
        noise, image = (torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype) for _ in range(2))
        sigma = torch.full_like(sigma, float(self._sampling.percent_to_sigma(percent)))
        return Given(self._sampling.noise_scaling(sigma.view(-1, *[1] * (x.ndim - 1)), noise, image), sigma)

    def error(self, given: Given, out: Tensor, reference: Tensor) -> float:
        """How far the model's own output is from the reference's, relative L2: what it was given counts for neither."""
        own = self._sampling.calculate_denoised(given.sigma, torch.zeros_like(out), given.x)
        return measure.relative_error(out - own, reference - own)


def inside(patcher: ModelPatcher, case: Case, body: Callable[[Step], T]) -> T:
    """What ``body`` gives for the first call of a run."""
    found: list[T] = []
    sampling = patcher.get_model_object("model_sampling")

    def instead(apply_model: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        if not found:
            found.append(body(Step(apply_model, given, sampling)))
        return given["input"]  # as if nothing were noise

    clone = patcher.clone()
    clone.set_model_unet_function_wrapper(instead)
    case.sample(clone, 2)
    return found[0]


def first_seconds(call: Callable[[], T]) -> tuple[T, float]:
    """(what ``call`` gives, its seconds), with nothing left in the allocator from before."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    took: dict[str, float] = {}
    with measure.seconds(took, "all"):
        out = call()
    return out, took["all"]


class Steady(NamedTuple):
    """Milliseconds of each repeat on the device's clock, and of the host until a call is handed over."""

    ms: list[float]
    host_ms: float


def steady(call: Callable[[], Any], repeat: int, warmup: int, most_seconds: float) -> Steady:
    """Times a call that has been made before; fewer repeats than asked for where a call is long."""
    for _ in range(warmup):
        measure.synchronize()
        started = time.perf_counter()
        call()
        handed = time.perf_counter() - started
        measure.synchronize()
        whole = time.perf_counter() - started
    ticks = measure.Ticks()
    ticks.mark()
    for _ in range(max(FEWEST, min(repeat, int(most_seconds / whole)))):
        call()
        ticks.mark()
    return Steady(ticks.intervals_ms(), handed * 1e3)


class Kernel(NamedTuple):
    """All calls of one kernel."""

    ms: float
    count: int
    name: str


def profiled(call: Callable[[], Any], most: int) -> tuple[list[Kernel], float]:
    """(the kernels that take longest in one call, milliseconds of all of them). Without a GPU: PyTorch's operations."""
    from torch.profiler import ProfilerActivity, profile

    kind, clock = ("CUDA", "self_device_time_total") if torch.cuda.is_available() else ("CPU", "self_cpu_time_total")
    measure.synchronize()
    with profile(activities=[getattr(ProfilerActivity, kind)]) as seen:
        call()
        measure.synchronize()
    every = [Kernel(round(getattr(e, clock) / 1e3, 4), e.count, e.key[:120]) for e in seen.key_averages()]
    return sorted(every, reverse=True)[:most], round(sum(kernel.ms for kernel in every), 3)
