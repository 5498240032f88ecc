"""A model of which only a part is on the card, as ComfyUI loads it without DynamicVRAM: the rest comes at each call.

`python -m tools.low_vram_cases '{"share": 0.3, "streams": 2}'` runs one case and prints a line of JSON, which
tests/test_gpu_low_vram.py judges. How ComfyUI copies weights is settled when it is imported, so each case is a process
of its own. On a CPU all of it runs, but nothing is anywhere else.
"""

import json
import statistics
import sys
import time
from typing import Any

from tools import embed
from tools.case_process import result_of, tell
from tools.paths import OLDER_COMFYUI

MODEL = {"depth": 3, "depth_single_blocks": 6}  # of bench.models.flux: 4 GB in bfloat16
CALLS = 4  # in a run


def in_process(**options: Any) -> dict[str, Any]:
    """What a case gives in a process of its own, on the older ComfyUI where that is installed.

    Raises RuntimeError with what it said, if it gave nothing.
    """
    bed = {"COMFYUI_PATH": str(OLDER_COMFYUI)} if OLDER_COMFYUI.is_dir() else {}
    return result_of("tools.low_vram_cases", json.dumps(options), env=bed)


def start(streams: int) -> None:
    """ComfyUI and the pack importable. streams: on which ComfyUI fetches weights ahead; 0: none."""
    embed.use_comfyui({"async_offload": streams} if streams else {"disable_async_offload": True})
    embed.load_pack()


def offloads_ahead() -> bool:
    """Whether ComfyUI fetches weights on streams of its own."""
    import comfy.model_management as mm

    return getattr(mm, "NUM_STREAMS", 0) > 0


def partly(
    share: float, whole: bool = False, repeat: int = 5, size: tuple[int, int] = (1024, 1024), dtype: str = "bfloat16",
    calls: int = CALLS, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """About ``share`` of the weights on the card. Eager and ours take turns.

    whole: of the last blocks nothing is on the card, of the others all. Else ComfyUI chooses, which takes the smallest
    layers of all blocks away first.
    """
    import comfy.model_management as mm
    import comfyui_version
    import torch
    from anyshape.accel import stats

    from bench import models, product
    from tools.dynamic_vram import far
    from tools.on_gpu import loaded_forward

    source = models.flux(getattr(torch, dtype), **MODEL | changes)
    fast, message = product.compile_model(source, product.Settings())
    with torch.inference_mode():  # as ComfyUI runs prompts: weights that move become tensors of that mode
        mm.load_models_gpu([fast], force_full_load=True)
        _unload(fast, fast.model_size() * (1 - share), whole)
    programs = _programs()
    ways, seconds, outs = (source, fast), ([], []), ([], [])
    for turn in range(repeat + 1):
        for way, took, out in zip(ways, seconds, outs, strict=True):
            mm.soft_empty_cache()
            started = time.perf_counter()
            out.append(loaded_forward(way, *size, rows=1, seed=turn, times=calls).cpu())  # waits for the GPU
            took.append(time.perf_counter() - started)
    shapes = [shape for model in stats.snapshot()["models"] for shape in model["shapes"]]
    return {
        "comfyui": comfyui_version.__version__,
        "cast": sum(bool(getattr(part, "comfy_cast_weights", False)) for part in fast.model.modules()),
        "message": message, "ahead": offloads_ahead(), "size": fast.model_size(), "loaded": _on_card(fast),
        "errors": [far(ours, eager) for eager, ours in zip(*outs, strict=True)],
        "eager_s": statistics.median(seconds[0][1:]), "s": statistics.median(seconds[1][1:]),
        "programs": len(programs), "states": sorted({shape["state"] for shape in shapes}),
        "reasons": sorted({shape["reason"] for shape in shapes if shape["reason"]}),
        "notes": sorted({shape["note"] for shape in shapes if shape.get("note")}),
    }  # fmt: skip


def _unload(patcher: Any, size: float, whole: bool) -> None:
    """Takes about ``size`` bytes of weights off the card, as ComfyUI does it."""
    if not whole:
        patcher.partially_unload(patcher.offload_device, size)
        return
    lists = [(name, part) for name, part in patcher.model.diffusion_model.named_children() if name.endswith("blocks")]
    blocks = [
        (f"diffusion_model.{name}.{place}.", block) for name, part in lists for place, block in part.named_children()
    ]
    chosen: list[str] = []
    for start, block in reversed(blocks):
        if size > 0:
            chosen.append(start)
            size -= sum(weight.nbytes for weight in block.parameters())
    own = patcher._load_list

    def of_these(*args: Any, **kwargs: Any) -> list[Any]:
        names = lambda entry: [part for part in entry if isinstance(part, str)]  # noqa: E731
        return [entry for entry in own(*args, **kwargs) if any(name.startswith(tuple(chosen)) for name in names(entry))]

    patcher._load_list = of_these
    try:
        patcher.partially_unload(patcher.offload_device, float("inf"))
    finally:
        del patcher._load_list


def _on_card(patcher: Any) -> int:
    """Bytes of weights where the model runs."""
    weights = patcher.model.parameters()
    return sum(weight.nbytes for weight in weights if weight.device.type == patcher.load_device.type)


def _programs() -> list[str]:
    """The blocks that run on a program of their own, from here on."""
    from anyshape.accel.block_tier import BlockTier

    found: list[str] = []
    replay = BlockTier._replay

    def replaying(self: Any, take: Any, path: str, *args: Any) -> Any:
        found.append(path)
        return replay(self, take, path, *args)

    BlockTier._replay = replaying
    return found


def main() -> None:
    """Runs one case."""
    options = json.loads(sys.argv[1])
    start(options.pop("streams", 2))
    tell(partly(**options))


if __name__ == "__main__":
    main()
