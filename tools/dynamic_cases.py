"""Cases of DynamicVRAM on a GPU: weights that fit, do not fit, go and come back.

`python -m tools.dynamic_cases CASE` runs one case on a small Z-Image with random weights and prints a line of JSON,
which tests/test_gpu_dynamic.py judges. It needs an NVIDIA GPU and comfy-aimdo, whose library must be there before
ComfyUI is imported: so each case is a process of its own.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from tools import embed
from tools.case_process import result_of, tell
from tools.dynamic_networks import networks, short
from tools.dynamic_vram import (
    GIB,
    GRAPHS,
    Watch,
    ballast,
    compiled,
    counts,
    far,
    loaded,
    made,
    room_of,
    sampled,
    start,
    told,
    with_weights,
    zimage,
)  # fmt: skip


def in_process(scenario: str, **options: Any) -> dict[str, Any]:
    """What a case gives in a separate process. Raises RuntimeError with what it said, if it gave nothing."""
    return result_of("tools.dynamic_cases", scenario, json.dumps(options))


def fit(
    share: float, mode: str = "auto", graphs: int = GRAPHS, name: str = "", layers: int = 12, turns: int = 0,
    run: dict[str, int] | None = None, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """As much memory as ``share`` of the model needs, and room for the rest. graphs: bytes for those.

    name: of another model than Z-Image. changes: to its config. turns: how many more times both run, in turn, for
    times on a host whose other users take their part of its memory's bandwidth. run: changes to ``RUN``.
    """
    watch, source = Watch(), made(name, **changes) if name else zimage(layers)
    run = run or {}
    size, room = source.model_size(), room_of(source, **run)
    with ballast(size * share + room + graphs):
        eager = [sampled(source, **run) for _ in range(5)]
        at_eager = loaded(source)
        fast = compiled(source, mode=mode)
        runs = [sampled(fast, **run) | {"recorded": watch.recorded} for _ in range(6)]
        at_ours = loaded(fast)
        for _ in range(turns):
            eager.append(sampled(source, **run))
            runs.append(sampled(fast, **run) | {"recorded": watch.recorded})
        return {
            "size": size, "room": room, "loaded": [at_eager, at_ours],
            "recorded": watch.recorded, "captured": watch.captured, "begun": [each["recorded"] for each in runs],
            "errors": [far(each["out"], eager[-1]["out"]) for each in runs],
            "eager_s": [each["seconds"] for each in eager], "s": [each["seconds"] for each in runs],
            "peak": [max(each["peak"] for each in eager), max(each["peak"] for each in runs)], **told(),
        }  # fmt: skip


def together(share: float) -> dict[str, Any]:
    """As ``fit``, with feed-forwards that ask for the weights of three layers before they compute with any of them."""
    from comfy.ldm.lumina.model import FeedForward

    FeedForward.forward = embed.as_comfyuis("cast_together").forward
    return fit(share, graphs=0)


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
    """Two models in turn, of which one fits. Few steps: what a switch costs weighs most. peak: in eager, and ours."""
    watch, sources = Watch(), [zimage(layers, seed) for seed in range(2)]
    room = room_of(sources[0])
    with ballast(sources[0].model_size() + room + GRAPHS):
        wanted = [sampled(source, steps=steps)["out"] for source in sources]

        def by_turns(patchers: list[Any], check: Callable[[int, Any], None]) -> tuple[float, int]:
            total, peak = 0.0, 0
            for turn in range(times):
                run = sampled(patchers[turn % 2], steps=steps)
                total, peak = total + run["seconds"], max(peak, run["peak"])
                check(turn % 2, run["out"])
            return total, peak

        errors: list[float] = []
        eager_s, eager_peak = by_turns(sources, lambda which, out: None)
        fast = [compiled(source) for source in sources]
        first = [sampled(patcher, steps=steps) for patcher in fast]
        counted = watch.recorded, watch.captured
        fast_s, fast_peak = by_turns(fast, lambda which, out: errors.append(far(out, wanted[which])))
        fast_peak = max(fast_peak, *(run["peak"] for run in first))
        same = [
            bool((sampled(patcher, steps=steps)["out"] == run["out"]).all())
            for patcher, run in zip(fast, first, strict=True)
        ]
        return {
            "eager_s": eager_s, "s": fast_s, "errors": [max(errors), sum(errors) / len(errors)], "same": same,
            "times": times, "steps": steps, "size": sources[0].model_size(), "peak": [eager_peak, fast_peak],
            "recorded": watch.recorded - counted[0], "captured": watch.captured - counted[1], **told(),
        }  # fmt: skip


def skip(share: float, name: str = "", steps: int = 12, layers: int = 12) -> dict[str, Any]:
    """Skip Blocks where only ``share`` of the model fits, without Compile Model and with it. name: of another model."""
    from anyshape.accel import stats

    from bench import product

    watch, source = Watch(), made(name) if name else zimage(layers)
    size, room = source.model_size(), room_of(source)
    with ballast(size * share + room):
        eager = [sampled(source, each_step=True, steps=steps) for _ in range(2)]
        runs: list[dict[str, Any]] = []
        for way in (source, compiled(source)):
            skipping, message = product.skip_blocks(way, product.SkipSettings(), lambda line: None)
            begun, took = watch.recorded, []
            for _ in range(5):  # a UNet that nearly fits is begun in vain twice, and then no more
                took.append(sampled(skipping, each_step=True, steps=steps) | {"recorded": watch.recorded - begun})
            counted = stats.snapshot()["skip"][-1]
            runs.append({"message": message, **{key: counted[key] for key in ("full", "skipped", "resets")}})
            runs[-1] |= {"s": [run["seconds"] for run in took], "recorded": [run["recorded"] for run in took]}
            runs[-1] |= {"peak": max(run["peak"] for run in took), "step_s": took[-1]["steps"]}
            runs[-1]["far"] = far(took[-1]["out"], eager[-1]["out"])
        return {
            "eager_s": [run["seconds"] for run in eager], "peak": max(run["peak"] for run in eager), "runs": runs,
            "eager_step_s": eager[-1]["steps"],
            "loaded": loaded(source), "size": size, **told(),
        }  # fmt: skip


def lora(name: str = "zimage", amount: float = 0.01, **settings: Any) -> dict[str, Any]:
    """A patch of weights on and off. settings: of Compile Model."""
    watch, source = Watch(), made(name, **({"n_layers": 12} if name.startswith("zimage") else {}))
    patched = _patched(source, amount)
    wanted = [sampled(each)["out"] for each in (source, patched)]
    fast = [compiled(each, **settings) for each in (source, patched)]
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


def _patched(source: Any, amount: float) -> Any:
    """A clone with a patch of a layer of each block."""
    import torch

    ends = ("attention.qkv.weight", "blocks.0.attn1.to_q.weight")
    every = [key for key in source.model.state_dict() if key.endswith(ends)]
    shape = source.model.state_dict()[every[0]].shape
    keys = [key for key in every if source.model.state_dict()[key].shape == shape]
    patched = source.clone()
    draw = torch.Generator().manual_seed(5)
    patched.add_patches({key: ("diff", (torch.randn(shape, generator=draw) * amount,)) for key in keys}, 1.0)
    return patched


def untold(name: str = "zimage", amount: float = 0.01) -> dict[str, Any]:
    """A plain patcher is loaded last and unloaded, so our node hears nothing; in the meantime memory is given away.

    A graph of a small size is captured while little memory is free, with a patch of weights; then a graph of another
    size; and at last the first size comes again, without the patch.
    """
    import comfy.model_management as mm

    watch, source = Watch(), made(name, n_layers=6)
    small, other = ({"width": width, "height": height, "cfg": 2.0} for width, height in ((544, 408), (264, 200)))
    wanted = sampled(source, **small)["out"]
    patched, fast = compiled(_patched(source, amount)), compiled(source)
    free = source.model_size() + 3 * GIB
    with ballast(free):
        sampled(patched, **small)
    sampled(source, **other)
    with ballast(free):  # everything is unloaded before
        sampled(source, **other)
        mm.unload_all_models()
        sampled(fast, **other)
    runs = [sampled(fast, **small) for _ in range(2)]
    return {"errors": [far(run["out"], wanted) for run in runs], **counts(watch), **told()}


def sizes(name: str = "zimage-int8") -> dict[str, Any]:
    """One size after another, then each again: a library's memory that grew must not be missed by earlier graphs.

    What is free between them is written over, as another model's weights would.
    """
    import torch

    source = made(name, n_layers=6)
    runs = [
        {"width": width, "height": height, "cfg": cfg}
        for width, height, cfg in ((264, 200, 1.0), (544, 408, 2.0), (520, 776, 2.0), (1024, 1024, 1.0))
    ]
    wanted = [sampled(source, **run)["out"] for run in runs]
    fast = compiled(source)
    errors, took = [], []
    for _ in range(3):
        for run, want in zip(runs, wanted, strict=True):
            done = sampled(fast, **run)
            errors.append(far(done["out"], want))
            took.append(done["seconds"])
            torch.empty(GIB, dtype=torch.uint8, device="cuda").fill_(7)
        torch.cuda.empty_cache()
    return {"errors": errors, "s": took, **told()}


def warm(name: str = "zimage-int8") -> dict[str, Any]:
    """Warm Up of three sizes. held: graphs that are there afterwards."""
    from anyshape.accel import graphs
    from anyshape.accel.comfy.warming import warm_up

    fast = compiled(made(name, n_layers=6))
    outcome = warm_up(fast, "264x200\n544x408\n520x776")
    return {
        "report": outcome.report, "ready": outcome.ready, "held": len(graphs.held(fast.load_device)), **told(),
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


def split(name: str = "zimage", behind: bool = False, skipping: bool = False, **changes: Any) -> dict[str, Any]:
    """ComfyUI's MultiGPU CFG Split over two GPUs. behind: its node comes after ours. skipping: with Skip Blocks.

    engines: how many models were called. whole: how far eager's latent is from that of a run on one GPU.
    """
    import comfy.multigpu
    from anyshape.accel import stats

    from bench import product

    source = made(name, **changes)
    source.cached_patcher_init = (lambda: made(name, **changes), ())

    def over_both(patcher: Any) -> Any:
        return comfy.multigpu.create_multigpu_deepclones(patcher, 2, reuse_loaded=True)

    def ours(patcher: Any) -> Any:
        if skipping:
            patcher, _ = product.skip_blocks(patcher, product.SkipSettings(), lambda line: None)
        return compiled(patcher)

    run, shared = {"cfg": 4.0, "steps": 12 if skipping else 4}, over_both(source)
    alone = sampled(source, **run)["out"]
    eager = [sampled(shared, **run) for _ in range(3)]
    fast = over_both(ours(source)) if behind else ours(shared)
    runs = [sampled(fast, **run) for _ in range(4)]
    called = [model for model in stats.snapshot()["models"] if model["shapes"]]
    return {
        "whole": far(eager[-1]["out"], alone), "errors": [far(run["out"], eager[-1]["out"]) for run in runs],
        "eager_s": [run["seconds"] for run in eager], "s": [run["seconds"] for run in runs],
        "engines": len(called), **told(),
    }  # fmt: skip


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "fit": fit, "together": together, "evict": evict, "switch": switch, "lora": lora, "untold": untold, "vae": vae,
    "skip": skip, "split": split, "sizes": sizes, "warm": warm, "networks": networks, "short": short,
}  # fmt: skip


def main() -> None:
    """Runs one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("options", nargs="?", default="{}", help="of the case, as JSON")
    given = parser.parse_args()
    start()
    tell(CASES[given.case](**json.loads(given.options)))


if __name__ == "__main__":
    main()
