"""VAE decode and encode in bf16 at many sizes: first call, steady state, error.

python -m bench.vae [--json FILE]

Begins with empty compiler caches. The error is against a decode in float32; eager's own error beside it shows what bf16
costs anyway.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack(store=False)

import os  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import comfy.model_management as mm  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402

from bench import measure, models, process  # noqa: E402
from bench.product import compile_vae  # noqa: E402

SIZES = [
    (1024, 1024, 1),
    (1024, 1152, 1),
    (896, 768, 1),
    (960, 720, 1),
    (1280, 1280, 1),
    (1024, 1024, 2),
    (512, 512, 4),
]


def row(eager: comfy.sd.VAE, compiled: comfy.sd.VAE, exact: comfy.sd.VAE, size: tuple[int, int, int]) -> dict[str, Any]:
    """One size: the decoder's and the encoder's milliseconds, errors, and the first call."""
    width, height, batch = size
    z = torch.randn(batch, 4, height // 8, width // 8, device=mm.get_torch_device())
    zb, took = z.to(torch.bfloat16), {}
    with measure.seconds(took, "first"):
        out = compiled.first_stage_model.decode(zb)
    truth, plain = exact.first_stage_model.decode(z), eager.first_stage_model.decode(zb)
    figures = {
        "width": width, "height": height, "images": batch, "first_seconds": took["first"],
        "eager_ms": measure.median_ms(lambda: eager.first_stage_model.decode(zb)),
        "compiled_ms": measure.median_ms(lambda: compiled.first_stage_model.decode(zb)),
        "encode_eager_ms": measure.median_ms(lambda: eager.first_stage_model.encode(plain)),
        "encode_compiled_ms": measure.median_ms(lambda: compiled.first_stage_model.encode(plain)),
        "error_to_eager": measure.relative_error(out, plain),
        "error_to_float32": measure.relative_error(out, truth),
        "eager_error_to_float32": measure.relative_error(plain, truth),
    }  # fmt: skip
    print(" ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()), flush=True)
    return figures


def main() -> None:
    """Prints the table and writes the JSON."""
    chosen = measure.options(__doc__).parse_args()
    eager, exact = models.vae(torch.bfloat16), models.vae(torch.float32)
    mm.load_models_gpu([eager.patcher, exact.patcher])
    compiled, _ = compile_vae(eager)
    with torch.inference_mode(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= process.caches(Path(folder))
        rows = [row(eager, compiled, exact, size) for size in SIZES]
    measure.write(chosen.json, {"rows": rows})


if __name__ == "__main__":
    main()
