"""Kernels and a store in a process of its own, without a GPU: python -m tools.stored_kernels STORE CAPABILITY.

Compiles a few kernels for that capability (90 for 9.0), as the pack would on such a card: what the store has goes into
Triton's cache first, what is new goes into the store. Prints JSON: the stats of it, and how many Triton compiled.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from triton import knobs

from tools import embed

embed.bare_pack()

from anyshape.accel.artifacts import KEEPER, machine  # noqa: E402
from anyshape.accel.kernels.layer_norm import stream_layer_norm_kernel  # noqa: E402
from anyshape.accel.kernels.pointwise import bias_add_kernel, geglu_kernel  # noqa: E402
from anyshape.accel.stats import snapshot  # noqa: E402

from tools.compile_kernels import compile_for  # noqa: E402

KERNELS = (bias_add_kernel, geglu_kernel, stream_layer_norm_kernel)


def main() -> None:
    """See the module."""
    store, capability, hits = Path(sys.argv[1]), int(sys.argv[2]), []
    knobs.compilation.listener = lambda cache_hit, **compilation: hits.append(cache_hit)
    machine.architecture = lambda device: f"sm_{capability}"
    KEEPER.use([store])
    KEEPER.load_kernels(torch.device("cpu"), [SimpleNamespace(device_caches={0: ({}, None)})])
    variants = {index: compile_for(kernel, capability) for index, kernel in enumerate(KERNELS)}
    KEEPER.load_kernels(torch.device("cpu"), [SimpleNamespace(device_caches={0: (variants, None)})])
    KEEPER.save_soon()
    KEEPER.wait()
    files = sum(len(variant.asm) for variant in variants.values())
    print(json.dumps(snapshot()["artifacts"] | {"compiled": hits.count(False), "hits": hits.count(True), "asm": files}))


if __name__ == "__main__":
    main()
