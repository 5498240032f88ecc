"""A start of the pack on a GPU, in a process of its own: python -m tools.restarted.

Some forwards of a small SDXL and of a small Flux, which is recorded, and one decode of a small VAE, each against eager.
Prints JSON: the stats of the store, what Triton compiled and found, and how far the results are from eager's.
"""

import json
from typing import Any

from triton import knobs

from tools import embed

FOUND: list[bool] = []  # for each kernel that Triton was asked for, whether it was in its cache
knobs.compilation.listener = lambda cache_hit, **compilation: FOUND.append(cache_hit)
embed.use_comfyui()
embed.load_pack()

import torch  # noqa: E402
from anyshape.accel.artifacts import KEEPER  # noqa: E402
from anyshape.accel.stats import snapshot  # noqa: E402

from bench import models  # noqa: E402
from tools import driving  # noqa: E402
from tools.on_gpu import SMALL, SMALL_FLUX, forward  # noqa: E402
from tools.oracles import error  # noqa: E402


def main() -> None:
    """See the module."""
    result: dict[str, Any] = {"unet": _unet(), "tape": _tape(), "vae": _vae()}
    KEEPER.wait()
    result |= snapshot()["artifacts"] | {"models": snapshot()["models"], "fallbacks": snapshot()["fallbacks"]}
    print(json.dumps(result | {"compiled": FOUND.count(False), "hits": FOUND.count(True)}))


def _unet() -> float:
    return _forwards(models.unet("sdxl", torch.float16, **SMALL))


def _tape() -> float:
    return _forwards(models.flux(torch.bfloat16, **SMALL_FLUX))


def _forwards(patcher: Any) -> float:
    fast = driving.compiled(patcher)
    sizes = ((512, 512, 2), (728, 720, 1), (728, 720, 1))
    return max(error(forward(fast, *size), forward(patcher, *size)) for size in sizes)


def _vae() -> float:
    vae = models.vae(torch.bfloat16, ch=64)
    latent = driving.randn(1, 4, 64, 51)
    with torch.inference_mode():
        return error(driving.compiled_vae(vae).decode(latent), vae.decode(latent))


if __name__ == "__main__":
    main()
