"""Cases of DynamicVRAM with a patch that brings a network. See ``dynamic_cases``."""

from typing import Any

import torch

from tools.dynamic_vram import GIB, Watch, ballast, compiled, far, made, room_of, sampled, told, with_weights


def _patched(source: Any, node: str) -> tuple[Any, Any, dict[str, Any]]:
    """(``source`` with the node, its network's patcher, how to sample it). node: of ``model_patches.NODES``."""
    from tools.model_patches import NODES

    _, apply, run = NODES[node]
    with with_weights():
        patched = apply(source)
    return patched, patched.model_patches_models()[0], run


def networks(node: str, name: str, steps: int = 8, **changes: Any) -> dict[str, Any]:
    """The network's pages go and come back, and the model runs without it and with it again."""
    watch, source = Watch(), made(name, **changes)
    patched, network, run = _patched(source, node)
    run = run | {"steps": steps}
    wanted, plain = ([sampled(each, **run) for _ in range(3)][-1] for each in (patched, source))
    fast, alone = compiled(patched), compiled(source)
    runs = [sampled(fast, **run) for _ in range(3)]
    begun = watch.recorded
    freed = network.partially_unload(torch.device("cpu"), 1e12)
    torch.empty(4 * GIB, dtype=torch.uint8, device="cuda").fill_(7)
    torch.cuda.empty_cache()
    runs.append(sampled(fast, **run))
    without = [sampled(alone, **run) for _ in range(2)][-1]
    counted = watch.recorded
    runs.append(sampled(fast, **run))
    return {
        "eager_s": wanted["seconds"], "s": [each["seconds"] for each in runs], "freed": freed,
        "errors": [far(each["out"], wanted["out"]) for each in runs], "far": far(without["out"], plain["out"]),
        "apart": far(wanted["out"], plain["out"]), "begun": begun, "recorded": watch.recorded - counted,
        "alone_s": [plain["seconds"], without["seconds"]], **told(),
    }  # fmt: skip


def short(node: str, name: str, share: float, **changes: Any) -> dict[str, Any]:
    """The model fits, and only ``share`` of the network beside it."""
    watch, source = Watch(), made(name, **changes)
    patched, network, run = _patched(source, node)
    size = network.model_size()
    with ballast(source.model_size() + share * size + room_of(source)):
        wanted = [sampled(patched, **run) for _ in range(3)]
        fast = compiled(patched)
        runs = [sampled(fast, **run) | {"recorded": watch.recorded} for _ in range(4)]
        # in turn, and of as many steps as people's: what a run begins with is little of it
        turns = [[sampled(each, **run | {"steps": 16})["seconds"] for each in (patched, fast)] for _ in range(3)]
        eager, ours = zip(*turns, strict=True)
        return {
            "size": size, "eager_s": eager, "s": ours,
            "errors": [far(each["out"], wanted[-1]["out"]) for each in runs],
            "recorded": [each["recorded"] for each in runs],
            "peak": [max(each["peak"] for each in some) for some in (wanted, runs)], **told(),
        }  # fmt: skip
