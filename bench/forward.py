"""One forward of a full-size UNet at many sizes: first call, new size, steady state, error, memory of all graphs.

python -m bench.forward [--model sdxl|sd15|flux] [--json FILE]

Through comfy.sample, as ComfyUI calls it; eager and compiled in the same process. For the cold figures, start with an
empty TRITON_CACHE_DIR. The error is that of the latent after 2 Euler steps with CFG 7, which multiplies differences.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack()

from typing import Any  # noqa: E402

import torch  # noqa: E402
from anyshape.accel import stats  # noqa: E402
from anyshape.accel.engine import Settings  # noqa: E402
from anyshape.accel.families.attach import compile_model  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from bench import measure, models  # noqa: E402

SIZES = {
    "sdxl": [(1024, 1024, 1), (1024, 1152, 1), (896, 768, 1), (960, 720, 1), (512, 512, 1), (1280, 1280, 1),
             (728, 720, 1), (544, 408, 1), (512, 2048, 1), (768, 768, 4), (1536, 1536, 1)],
    "sd15": [(512, 512, 1), (512, 768, 1), (768, 768, 1), (512, 512, 2), (512, 512, 8), (544, 408, 1)],
    "flux": [(1024, 1024, 1), (512, 512, 1), (896, 768, 1), (1024, 1152, 1), (1024, 1024, 2)],
}  # fmt: skip


def steady_ms(patcher: ModelPatcher, width: int, height: int, batch: int) -> float:
    """Milliseconds a model call inside a long run: the difference of two runs, which cancels set-up and tear-down."""
    took: dict[str, float] = {}
    for steps in (4, 24):
        models.sample(patcher, width, height, batch, steps=2)
        with measure.seconds(took, str(steps)):
            models.sample(patcher, width, height, batch, steps=steps)
    return (took["24"] - took["4"]) / 20 * 1e3


def first_seconds(patcher: ModelPatcher, size: tuple[int, int, int], eager_ms: float) -> float:
    """What a size costs more than eager the first time, seconds."""
    took: dict[str, float] = {}
    with measure.seconds(took, "first"):
        models.sample(patcher, *size, steps=2)
    return took["first"] - 2 * eager_ms / 1e3


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = measure.options(__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), default="sdxl")
    parser.add_argument("--mode", choices=("auto", "regions"), default="auto")
    chosen = parser.parse_args()
    eager = models.diffusion_model(chosen.model)
    compiled, _ = compile_model(eager, Settings(mode=chosen.mode))
    sizes = SIZES[chosen.model]
    eager_ms = {size: steady_ms(eager, *size) for size in sizes}
    reference = {size: models.sample(eager, *size, steps=2) for size in sizes}
    torch.cuda.empty_cache()
    before = measure.used_mib()
    rows = []
    for size in sizes:
        first = first_seconds(compiled, size, eager_ms[size])
        error = measure.relative_error(models.sample(compiled, *size, steps=2), reference[size])
        rows.append(row(size, eager_ms[size], first, steady_ms(compiled, *size), error))
    torch.cuda.empty_cache()
    grown = measure.used_mib() - before
    print(f"memory above eager for {len(sizes)} sizes: {grown:.0f} MiB")
    measure.write(chosen.json, {"model": chosen.model, "rows": rows, "memory_mib": grown, "stats": stats.snapshot()})


def row(size: tuple[int, int, int], eager: float, first: float, compiled: float, error: float) -> dict[str, Any]:
    """One line of the table, printed and returned."""
    width, height, batch = size
    print(
        f"{width}x{height} images {batch}: eager {eager:.1f} ms, compiled {compiled:.1f} ms, "
        f"first call {first:+.2f} s, error of the latent after 2 steps {error:.1e}",
        flush=True,
    )
    return {
        "width": width, "height": height, "images": batch, "eager_ms": round(eager, 2),
        "compiled_ms": round(compiled, 2), "first_call_extra_seconds": round(first, 3),
        "latent_error_after_2_steps": error,
    }  # fmt: skip


if __name__ == "__main__":
    main()
