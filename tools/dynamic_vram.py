"""ComfyUI with DynamicVRAM in one process, as its main.py starts it, and with as much free memory as asked for.

It needs an NVIDIA GPU and comfy-aimdo, whose library must be there before ComfyUI is imported.
"""

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

from tools import embed

GIB = 1 << 30
RUN = {"width": 1024, "height": 1024, "steps": 4}
HEADROOM = GIB  # what ComfyUI and comfy-aimdo keep free
GRAPHS = 2 * GIB


def start(store: bool = True) -> None:
    """ComfyUI and the pack importable, with DynamicVRAM on. Raises RuntimeError where it cannot be.

    store: see ``embed.load_pack``.
    """
    import comfy_aimdo.control as control

    if not control.init():
        raise RuntimeError("comfy-aimdo's library cannot be loaded")
    embed.use_comfyui()
    import comfy.memory_management
    import comfy.model_management as mm
    import comfy.model_patcher

    devices = mm.get_all_torch_devices()
    try:
        begun = control.init_devices((device.index, 0) for device in devices)
    except TypeError:  # comfy-aimdo before 0.4.10
        begun = control.init_devices(device.index for device in devices)
    if not begun:
        raise RuntimeError("comfy-aimdo finds no device")
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True
    embed.load_pack(store)


def zimage(layers: int = 12, seed: int = 0) -> Any:
    """A patcher whose weights are mapped in: 5.5 GB with 12 layers."""
    return made("zimage", seed, n_layers=layers)


def made(name: str, seed: int = 0, **changes: Any) -> Any:
    """A patcher of ``bench.zoo`` whose weights are mapped in."""
    from bench import models, zoo

    with with_weights():
        patcher = zoo.make(name, **changes)
    if seed:
        models.randomise(patcher.model, seed)
    return mapped(patcher)


def mapped(patcher: Any) -> Any:
    """Another patcher of the model, whose weights are mapped in."""
    import comfy.model_management as mm
    import comfy.model_patcher
    import torch

    patcher.model.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    return comfy.model_patcher.ModelPatcherDynamic(patcher.model, mm.get_torch_device(), torch.device("cpu"))


@contextlib.contextmanager
def with_weights() -> Iterator[None]:
    """Within, layers are made with weights: with DynamicVRAM they have none until a file is read."""
    import comfy.memory_management

    comfy.memory_management.aimdo_enabled = False
    try:
        yield
    finally:
        comfy.memory_management.aimdo_enabled = True


def compiled(patcher: Any, **settings: Any) -> Any:
    """As the node makes it."""
    from bench import product

    out, message = product.compile_model(patcher, product.Settings(**settings))
    if message:
        raise RuntimeError(message)
    return out


def used() -> int:
    """Bytes of the device in use, whoever has them."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


@contextlib.contextmanager
def ballast(free: float) -> Iterator[None]:
    """Within, only about ``free`` bytes of the device are free for models and images."""
    import comfy.model_management as mm
    import torch

    mm.unload_all_models()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    there, _ = torch.cuda.mem_get_info()
    held = [torch.empty(GIB // 4, dtype=torch.uint8, device="cuda") for _ in range(int((there - free) / (GIB / 4)))]
    try:
        yield
    finally:
        held.clear()
        torch.cuda.empty_cache()


class Watch:
    """Counts recordings and captures, from here on."""

    def __init__(self) -> None:
        from anyshape.accel import graphs, tapes

        self.recorded = self.captured = 0
        record, capture = tapes.Tapes.record, graphs.GraphCache.capture

        def recording(*args: Any, **kwargs: Any) -> Any:
            self.recorded += 1
            return record(*args, **kwargs)

        def capturing(*args: Any, **kwargs: Any) -> Any:
            self.captured += 1
            return capture(*args, **kwargs)

        tapes.Tapes.record, graphs.GraphCache.capture = recording, capturing


def sampled(patcher: Any, each_step: bool = False, **run: Any) -> dict[str, Any]:
    """One run: its latent, seconds, and the most bytes of the device in use after any step.

    each_step: the seconds of each step too, which waits for the GPU behind each.
    """
    import torch

    from bench import models

    peak, ends = [0], list[float]()

    def callback(*_: Any) -> None:
        if each_step:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())
        peak[0] = max(peak[0], used())

    torch.cuda.synchronize()
    started = time.perf_counter()
    out = models.sample(patcher, **RUN | run, callback=callback)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    steps = [end - begun for begun, end in itertools.pairwise([started, *ends])]
    return {"out": out, "seconds": seconds, "peak": peak[0], "steps": steps}


def room_of(patcher: Any, **run: Any) -> int:
    """Bytes that a run needs besides the weights."""
    before = used() - loaded(patcher)
    return sampled(patcher, **run)["peak"] - before - loaded(patcher) + HEADROOM


def far(one: Any, other: Any) -> float:
    """Relative L2; 1e9 where a value is not finite. Of a video with sound: of both."""
    if one.is_nested:
        return max(map(far, one.unbind(), other.unbind()))
    error = ((one.float() - other.float()).norm() / other.float().norm()).item()
    return error if error == error else 1e9


def told() -> dict[str, Any]:
    """What the stats say of sizes and fallbacks."""
    from anyshape.accel import stats

    snapshot = stats.snapshot()
    shapes = [shape for model in snapshot["models"] for shape in model["shapes"]]
    return {
        "states": sorted({shape["state"] for shape in shapes}),
        "reasons": sorted({shape["reason"] for shape in shapes if shape["reason"]}),
        "fallbacks": {each["reason"]: each["count"] for each in snapshot["fallbacks"]},
        "graphs": snapshot["graphs"]["used_bytes"],
    }


def loaded(patcher: Any) -> int:
    """Bytes of the model on the device."""
    return patcher.loaded_size()


def counts(watch: Watch) -> dict[str, int]:
    """What was counted."""
    return {"recorded": watch.recorded, "captured": watch.captured}
