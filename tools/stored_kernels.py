"""Starts of the pack with a store, without a GPU: python -m tools.stored_kernels, a JSON object a line on its input.

An order names the folder of Triton's cache, the store, a compute capability (90 for 9.0) and the secret to sign with
("" for that of this install). The process then compiles
a few kernels for that card as the pack would in a new process: what the store has goes into Triton's cache first, what
is new goes into the store. Some are by hand, some are generated, into a file of another folder each time. The answer:
the stats of the store, and what Triton compiled and found.
"""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from tools import embed

embed.bare_pack()

from anyshape.accel.artifacts import compiled_for, keeper  # noqa: E402
from anyshape.accel.kernels.geglu_upsample import geglu_kernel, upsample_kernel  # noqa: E402
from anyshape.accel.stats import STATS, ArtifactStats, snapshot  # noqa: E402

from tools.compile_kernels import compile_for  # noqa: E402

DEVICE = torch.device("cpu")
NAMES = ("generated_one", "generated_two")
TEXT = """import triton
import triton.language as tl


@triton.jit
def {name}(x, out, ROWS, BR: tl.constexpr):
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    tl.store(out + at, tl.load(x + at, mask=at < ROWS) * 3.0, mask=at < ROWS)
"""


def main() -> None:
    """Answers until the input ends."""
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(cache: str, store: str, capability: int = 90, key: str = "") -> dict[str, Any]:
    """One order."""
    hits: list[bool] = []
    os.environ |= {"TRITON_CACHE_DIR": cache, "ANYSHAPE_ARTIFACTS_KEY": key}
    knobs.compilation.listener = lambda cache_hit, **compilation: hits.append(cache_hit)
    compiled_for.architecture = lambda device: f"sm_{capability}"
    STATS.artifacts, own, variants = ArtifactStats(), keeper.Keeper(), []
    own.use(Path(store))
    own.watch(DEVICE, variants.copy)
    variants += [compile_for(kernel, capability) for kernel in (upsample_kernel, geglu_kernel)]
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            variants.append(compile_for(_generated(name, TEXT.format(name=name), Path(folder)), capability))
            own.save_soon()
            own.wait()
    return snapshot()["artifacts"] | {"compiled": hits.count(False), "hits": hits.count(True)}


def _generated(name: str, text: str, folder: Path) -> Any:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(folder.name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    main()
