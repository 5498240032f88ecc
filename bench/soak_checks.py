"""What the soak holds each prompt to: how far a latent may be from eager's, which fallbacks are expected, memory.

The bound. Both ways round in every operation, each in its own order, so their latents part, and sampling and CFG
multiply the difference by an amount that depends on the prompt. So a latent passes if it is within ``FLOOR`` of eager's
(relative L2), or else if it is no farther than eager's own latent moves when every output of its model is off by
``FORWARD``, at random: the error of one forward that the parity tests find, in that dtype.

Layers with quantised weights round their input to 8 bits or fewer, and its last bit may decide how. So there every
latent is off as well before the model reads it, by what its dtype rounds: eager's own forward moves by 0.02 to 0.06
(int8) or 0.05 to 0.09 (fp8). Ours is as far, at random too, and a latent may be ``RANDOM`` times as far as eager's own.
"""

import ctypes
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import comfy.model_management as mm
import psutil
import torch
from anyshape.accel import graphs, stats
from anyshape.accel.tape.program import Program
from torch import nn

from bench.soak_prompts import FAILURE, Prompt

FLOOR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
FORWARD = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
RANDOM = 1.25
LATER = 2  # kernels of quantised weights that the first prompt of several rows needs beyond those for one
PICTURE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # of one decode or encode, the VAE's dtype
FAILED = "another pack's patch failed"
GROWTH = 0.01  # of the weights' bytes: what device memory may grow by
ROUNDED = 0.1  # of what programs hold: torch rounds each large tensor up by as much as 1 MiB
RUNNING_GROWTH = 256 << 20  # of the device's memory while models run: libraries keep plans and kernels of each size
# Pixels of all images and frames: a small Wan's graph of eight rows takes 2,058 MB, and unfused 2,605 at fewer.
LARGE = {"auto": 4 * 640 * 896, "exact": 4 * 584 * 824}
TENSORS = torch.Tensor, nn.Parameter
RSS_GROWTH = 0.15  # of the process' memory: libraries keep a plan for each size that they met, in eager too
SETTLED = 0.01  # the same once they have met all of them


def expected(prompt: Prompt) -> list[str]:
    """What a fallback's reason may say for this prompt."""
    reasons = []
    if prompt.patch or (prompt.stop and prompt.stop.how == FAILURE):
        reasons += ["patches by another node"]
    if prompt.stop and prompt.stop.how == FAILURE:
        reasons += [f"RuntimeError: {FAILED}"]
        if prompt.skip is not None:  # the patch reads which step it is, as its second step shows
            reasons += ["no program yet for skipped steps"]
    if prompt.budget_mb < 2048:
        reasons += ["graph_budget_mb is"]
    pixels = prompt.images * prompt.width * prompt.height * prompt.frames
    if prompt.mode in LARGE and pixels >= LARGE[prompt.mode]:
        reasons += ["the graph of this size needs"]
    if prompt.share < 1:
        reasons += ["weights streamed", "did not fit beside", "leave no memory for a graph", "Memory is short"]
        reasons += ["low VRAM"]  # of ComfyUI without DynamicVRAM
    return reasons


@dataclass
class Counted:
    """What the pack counted during one prompt."""

    calls: dict[str, int]  # of the engine, by kind of model
    states: dict[str, int]  # shapes by what they ran as
    fallbacks: dict[str, int]  # by reason
    recompiles: int
    skipped: int


class Counters:
    """The pack's counters, from one prompt to the next."""

    def __init__(self) -> None:
        self.recompiles = _recompiles()
        stats.STATS.clear()

    def read(self) -> Counted:
        """What moved since the beginning."""
        now, calls, states = stats.snapshot(), {}, {}
        for model in now["models"]:
            for shape in model["shapes"]:
                calls[model["kind"]] = calls.get(model["kind"], 0) + shape["calls"]
                states[shape["state"]] = states.get(shape["state"], 0) + 1
        fallbacks = {entry["reason"]: entry["count"] for entry in now["fallbacks"]}
        recompiles = sum(count - self.recompiles.get(name, 0) for name, count in _recompiles().items())
        skipped = sum(run["skipped"] for run in now["skip"])
        return Counted(calls, states, fallbacks, recompiles, skipped)


def _recompiles() -> dict[str, int]:
    """By model: the oldest models are forgotten."""
    return {model["name"]: model["recompiles"] for model in stats.snapshot()["models"]}


def complaints(prompt: Prompt, counted: Counted, later: int) -> Iterator[str]:
    """What the counters say that they should not. later: kernels that may be compiled."""
    if counted.recompiles > later:
        yield f"{counted.recompiles} recompiles"
    for reason, count in counted.fallbacks.items():
        if not any(text in reason for text in expected(prompt)):
            yield f"{count} unexpected fallbacks: {reason}"


def altered(modules: list[nn.Module]) -> Iterator[str]:
    """What is left on the shared models: a layout, a hook, a forward."""
    for module in modules:
        for name, part in module.named_modules():
            if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
                yield f"{type(module).__name__}.{name} has a hook or a forward of its own"
        turned = [name for name, weight in module.named_parameters() if not weight.is_contiguous()]
        if turned:
            yield f"{len(turned)} weights of {type(module).__name__} are not contiguous, {turned[0]} among them"


def unload() -> None:
    """As ComfyUI's Unload Models does it."""
    mm.unload_all_models()
    mm.soft_empty_cache()


def memory() -> dict[str, int]:
    """Bytes while models run, and after everything was unloaded and every graph dropped.

    running: on the device, by its driver, besides loaded weights and graphs. Then the process', the device's, and live
    tensors. programs: of these, what the programs of recent sizes hold (rotary tables, say), which is in no other
    figure but the process'. It is bounded by their number, not by a share of a small model's weights.
    """
    running = _running() - _of_programs()
    unload()
    for cache in list(graphs._CACHES.values()):
        cache.clear()
    gc.collect()
    mm.soft_empty_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what was freed
        trim(0)
    cuda, programs = torch.cuda.is_available(), _of_programs()
    return {
        "running": running,
        "process": psutil.Process().memory_info().rss,
        "device": torch.cuda.memory_allocated() - programs if cuda else 0,
        "tensors": _memory_of(thing for thing in gc.get_objects() if type(thing) in TENSORS) - programs,
        "programs": programs,
    }


def _of_programs() -> int:
    """Bytes of what all programs hold besides weights."""
    programs = [thing for thing in gc.get_objects() if type(thing) is Program]
    return _memory_of(tensor for each in programs for tensor in each.constants())


def _memory_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their memory, which several may share."""
    memory = (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
    return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


def _running() -> int:
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    weights = sum(loaded.model_loaded_memory() for loaded in mm.current_loaded_models)
    return total - free - weights - sum(cache.used_bytes for cache in list(graphs._CACHES.values()))


def grown(first: dict[str, int], now: dict[str, int], weights: int, settled: bool = False) -> Iterator[str]:
    """What grew from the first look to this one by more than it may. settled: no size was new since."""
    limits = {
        "running": RUNNING_GROWTH,
        "process": (SETTLED if settled else RSS_GROWTH) * first["process"],
        "device": GROWTH * weights + ROUNDED * now["programs"],
        "tensors": GROWTH * weights,
    }
    for name, limit in limits.items():
        if now[name] - first[name] > limit:
            yield f"{name} memory grew from {first[name] >> 20} to {now[name] >> 20} MiB"


def weight_bytes(modules: list[nn.Module]) -> int:
    """Of all weights."""
    return sum(weight.nbytes for module in modules for weight in module.parameters())


def summed(totals: dict[str, int], more: dict[str, int]) -> dict[str, Any]:
    """Both, added by name."""
    return {name: totals.get(name, 0) + more.get(name, 0) for name in {**totals, **more}}
