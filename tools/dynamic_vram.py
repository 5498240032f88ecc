"""ComfyUI with DynamicVRAM in one process, as its main.py starts it, and with as much free memory as asked for.

`python -m tools.dynamic_vram CASE` runs one case on a small Z-Image with random weights and prints a line of JSON,
which tests/test_gpu_dynamic.py judges. It needs an NVIDIA GPU and comfy-aimdo, whose library must be there before
ComfyUI is imported: so each case is a process of its own.
"""

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
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
    import comfy.model_management as mm
    import comfy.model_patcher
    import torch

    from bench import models, zoo

    with with_weights():
        model = zoo.make(name, **changes).model
    if seed:
        models.randomise(model, seed)
    model.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    return comfy.model_patcher.ModelPatcherDynamic(model, mm.get_torch_device(), torch.device("cpu"))


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


def sampled(patcher: Any, **run: Any) -> dict[str, Any]:
    """One run: its latent, seconds, and the most bytes of the device in use after any step."""
    import torch

    from bench import models

    peak = [0]

    def callback(*_: Any) -> None:
        peak[0] = max(peak[0], used())

    torch.cuda.synchronize()
    started = time.perf_counter()
    out = models.sample(patcher, **RUN | run, callback=callback)
    torch.cuda.synchronize()
    return {"out": out, "seconds": time.perf_counter() - started, "peak": peak[0]}


def room_of(patcher: Any) -> int:
    """Bytes that a run needs besides the weights."""
    before = used() - loaded(patcher)
    return sampled(patcher)["peak"] - before - loaded(patcher) + HEADROOM


def far(one: Any, other: Any) -> float:
    """Relative L2; 1e9 where a value is not finite."""
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


# The cases ---------------------------------------------------------------------------------------------------------


def fit(share: float, mode: str = "auto", graphs: int = GRAPHS, layers: int = 12) -> dict[str, Any]:
    """As much memory as ``share`` of the model needs, and room for the rest. graphs: bytes for those."""
    watch, source = Watch(), zimage(layers)
    size, room = source.model_size(), room_of(source)
    with ballast(size * share + room + graphs):
        eager = [sampled(source) for _ in range(3)]
        at_eager = loaded(source)
        fast = compiled(source, mode=mode)
        runs = [sampled(fast) for _ in range(4)]
        return {
            "size": size, "room": room, "loaded": [at_eager, loaded(fast)],
            "recorded": watch.recorded, "captured": watch.captured,
            "errors": [far(run["out"], eager[-1]["out"]) for run in runs],
            "eager_s": [run["seconds"] for run in eager], "s": [run["seconds"] for run in runs],
            "peak": [max(run["peak"] for run in eager), max(run["peak"] for run in runs)], **told(),
        }  # fmt: skip


def evict(name: str = "zimage", **changes: Any) -> dict[str, Any]:
    """All weights go, something else takes the memory, they come back."""
    import torch

    watch, source = Watch(), made(name, **changes)
    eager = sampled(source)
    fast = compiled(source)
    before = [sampled(fast) for _ in range(2)][-1]
    counted = watch.recorded, watch.captured
    freed = fast.partially_unload(torch.device("cpu"), 1e12)
    torch.empty(4 * GIB, dtype=torch.uint8, device="cuda").fill_(7)
    torch.cuda.empty_cache()
    after = [sampled(fast) for _ in range(2)]
    return {
        "freed": freed, "error": far(before["out"], eager["out"]), "s": [run["seconds"] for run in (before, *after)],
        "same": [bool((run["out"] == before["out"]).all()) for run in after],
        "recorded": watch.recorded - counted[0], "captured": watch.captured - counted[1], **told(),
    }  # fmt: skip


def switch(times: int = 30, steps: int = 4, layers: int = 12) -> dict[str, Any]:
    """Two models in turn, of which one fits. Few steps: what a switch costs weighs most."""
    watch, sources = Watch(), [zimage(layers, seed) for seed in range(2)]
    room = room_of(sources[0])
    with ballast(sources[0].model_size() + room + GRAPHS):
        wanted = [sampled(source, steps=steps)["out"] for source in sources]

        def seconds(patchers: list[Any], check: Callable[[int, Any], None]) -> float:
            total = 0.0
            for turn in range(times):
                run = sampled(patchers[turn % 2], steps=steps)
                total += run["seconds"]
                check(turn % 2, run["out"])
            return total

        errors: list[float] = []
        eager_s = seconds(sources, lambda which, out: None)
        fast = [compiled(source) for source in sources]
        first = [sampled(patcher, steps=steps) for patcher in fast]
        counted = watch.recorded, watch.captured
        fast_s = seconds(fast, lambda which, out: errors.append(far(out, wanted[which])))
        same = [
            bool((sampled(patcher, steps=steps)["out"] == run["out"]).all())
            for patcher, run in zip(fast, first, strict=True)
        ]
        return {
            "eager_s": eager_s, "s": fast_s, "errors": [max(errors), sum(errors) / len(errors)], "same": same,
            "recorded": watch.recorded - counted[0], "captured": watch.captured - counted[1], **told(),
        }  # fmt: skip


def skip(share: float, steps: int = 12, layers: int = 12) -> dict[str, Any]:
    """Skip Blocks where only ``share`` of the model fits, without Compile Model and with it."""
    from anyshape.accel import stats

    from bench import product

    source = zimage(layers)
    size, room = source.model_size(), room_of(source)
    with ballast(size * share + room):
        eager = [sampled(source, steps=steps) for _ in range(2)]
        runs: list[dict[str, Any]] = []
        for way in (source, compiled(source)):
            skipping, message = product.skip_blocks(way, product.SkipSettings(), lambda line: None)
            took = [sampled(skipping, steps=steps) for _ in range(2)]
            counted = stats.snapshot()["skip"][-1]
            runs.append({"message": message, **{key: counted[key] for key in ("full", "skipped", "resets")}})
            runs[-1] |= {"s": [run["seconds"] for run in took], "peak": max(run["peak"] for run in took)}
            runs[-1]["far"] = far(took[-1]["out"], eager[-1]["out"])
        return {
            "eager_s": [run["seconds"] for run in eager], "peak": max(run["peak"] for run in eager), "runs": runs,
            "loaded": loaded(source), "size": size, **told(),
        }  # fmt: skip


def lora(layers: int = 12) -> dict[str, Any]:
    """A patch of weights on and off."""
    import torch

    watch, source = Watch(), zimage(layers)
    keys = [key for key in source.model.state_dict() if key.endswith("attention.qkv.weight")]
    patched = source.clone()
    draw = torch.Generator().manual_seed(5)
    shape = source.model.state_dict()[keys[0]].shape
    patched.add_patches({key: ("diff", (torch.randn(shape, generator=draw) * 0.01,)) for key in keys}, 1.0)
    wanted = [sampled(each)["out"] for each in (source, patched)]
    fast = [compiled(each) for each in (source, patched)]
    errors, counted = [], (0, 0)
    for turn in range(6):
        run = sampled(fast[turn % 2])
        errors.append(far(run["out"], wanted[turn % 2]))
        if turn == 1:
            counted = watch.recorded, watch.captured
    return {
        "apart": far(*wanted), "errors": errors, "first": counted[0], "recorded": watch.recorded - counted[0],
        "captured": watch.captured - counted[1], **told(),
    }  # fmt: skip


def vae() -> dict[str, Any]:
    """SDXL's, whose weights go and come back between two pictures."""
    import torch

    from bench import models, product

    watch = Watch()
    with with_weights():
        source = models.vae()
    latent = torch.randn(1, 4, 128, 128, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        eager = source.decode(latent)
        fast, message = product.compile_vae(source)
        before = [fast.decode(latent) for _ in range(2)][-1]
        freed = source.patcher.partially_unload(torch.device("cpu"), 1e12)
        torch.empty(4 * GIB, dtype=torch.uint8, device="cuda").fill_(7)
        torch.cuda.empty_cache()
        after = fast.decode(latent)
    same = bool((after == before).all())
    return {"message": message, "freed": freed, "error": far(before, eager), "same": same, **counts(watch), **told()}


def counts(watch: Watch) -> dict[str, int]:
    """What was counted."""
    return {"recorded": watch.recorded, "captured": watch.captured}


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "fit": fit, "evict": evict, "switch": switch, "lora": lora, "vae": vae,
    "skip": skip,
}  # fmt: skip


def main() -> None:
    """Runs one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("options", nargs="?", default="{}", help="of the case, as JSON")
    given = parser.parse_args()
    start()
    print("RESULT " + json.dumps(CASES[given.case](**json.loads(given.options))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
