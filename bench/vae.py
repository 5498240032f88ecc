"""VAE decode and encode in bf16 at many sizes: first call, steady state, error, the decoder's peak of memory.

python -m bench.vae [--model sdxl|wan] [--json FILE]

Begins with empty compiler caches. The error is against a decode in float32; eager's own error beside it shows what bf16
costs anyway. wan: the VAE of Wan 2.1 and Qwen-Image.
"""

from tools import embed

embed.use_comfyui()
embed.load_pack(store=False)

import os  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import comfy.model_management as mm  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402

from bench import measure, models, process  # noqa: E402
from bench.product import compile_vae  # noqa: E402

# (width, height, images, frames)
SIZES = {
    "sdxl": [
        (1024, 1024, 1, 1), (1024, 1152, 1, 1), (896, 768, 1, 1), (960, 720, 1, 1), (1280, 1280, 1, 1),
        (1024, 1024, 2, 1), (512, 512, 4, 1),
    ],
    "wan": [(832, 480, 1, 33), (1024, 1024, 1, 1), (720, 400, 1, 17)],
}  # fmt: skip
MAKERS = {"sdxl": models.vae, "wan": models.wan_vae}
FEW_FRAMES = 4  # of a video, to a frame of its latent


def row(
    eager: comfy.sd.VAE, compiled: comfy.sd.VAE, exact: comfy.sd.VAE, size: tuple[int, int, int, int]
) -> dict[str, Any]:
    """One size: the decoder's and the encoder's milliseconds, errors, the first call, and peaks of memory in MiB."""
    width, height, batch, frames = size
    sides = (height // 8, width // 8)
    shape = sides if eager.latent_dim == 2 else ((frames - 1) // FEW_FRAMES + 1, *sides)
    z = torch.randn(batch, eager.latent_channels, *shape, device=mm.get_torch_device())
    zb, took = z.to(torch.bfloat16), {}
    with measure.seconds(took, "first"):
        out = compiled.first_stage_model.decode(zb)
    truth, plain = exact.first_stage_model.decode(z), eager.first_stage_model.decode(zb)
    figures = {
        "width": width, "height": height, "images": batch, "frames": frames, "first_seconds": took["first"],
        "eager_ms": measure.median_ms(lambda: eager.first_stage_model.decode(zb)),
        "compiled_ms": measure.median_ms(lambda: compiled.first_stage_model.decode(zb)),
        "encode_eager_ms": measure.median_ms(lambda: eager.first_stage_model.encode(plain)),
        "encode_compiled_ms": measure.median_ms(lambda: compiled.first_stage_model.encode(plain)),
        "eager_mib": peak_mib(lambda: eager.first_stage_model.decode(zb)),
        "compiled_mib": peak_mib(lambda: compiled.first_stage_model.decode(zb)),
        "error_to_eager": measure.relative_error(out, plain),
        "error_to_float32": measure.relative_error(out, truth),
        "eager_error_to_float32": measure.relative_error(plain, truth),
    }  # fmt: skip
    print(" ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()), flush=True)
    return figures


def peak_mib(function: Callable[[], Any]) -> float:
    """What PyTorch holds at most while ``function`` runs, above what it held before, MiB."""
    if not torch.cuda.is_available():
        return 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return round((torch.cuda.max_memory_allocated() - before) / (1 << 20), 1)


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = measure.options(__doc__)
    parser.add_argument("--model", default="sdxl", choices=SIZES)
    chosen = parser.parse_args()
    eager, exact = (MAKERS[chosen.model](dtype) for dtype in (torch.bfloat16, torch.float32))
    mm.load_models_gpu([eager.patcher, exact.patcher])
    compiled, _ = compile_vae(eager)
    with torch.inference_mode(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ |= process.caches(Path(folder))
        rows = [row(eager, compiled, exact, size) for size in SIZES[chosen.model]]
    measure.write(chosen.json, {"model": chosen.model, "rows": rows})


if __name__ == "__main__":
    main()
