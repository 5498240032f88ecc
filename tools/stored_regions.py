"""A compiled UNet and a store in a process of its own, on a CPU: python -m tools.stored_regions BASE [CHANGE ...].

Samples with a small UNet, then makes one change of the structure of its input after the other, with the store of the
ComfyUI whose base directory is BASE. Prints JSON: the stats of the store, and for each change the graphs that PyTorch
found in its cache or had to make, and how far from eager's the result is.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools import embed

embed.use_comfyui(cpu=True, extra={"base_directory": str(embed.make_base(Path(sys.argv[1])))})
embed.load_pack()

import torch  # noqa: E402
from anyshape.accel.artifacts import KEEPER  # noqa: E402
from anyshape.accel.stats import snapshot  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from bench import models  # noqa: E402
from tools import driving, weights  # noqa: E402
from tools.oracles import error  # noqa: E402

PATCHER = models.unet("sd15", torch.float32, **driving.SMALL_UNET)
CONTROL = models.controlnet("sd15", torch.float32, **driving.SMALL_UNET)
VAE = models.vae(torch.float32, ch=32)
CHANGES: dict[str, Callable[[], float]] = {
    "nothing": lambda: _sampled(PATCHER),
    "another size": lambda: _sampled(PATCHER, width=136, height=120),
    "another batch": lambda: _sampled(PATCHER, batch=3),
    "no negative prompt": lambda: _sampled(PATCHER, cfg=1.0),
    "a longer prompt": lambda: _sampled(PATCHER, tokens=154),
    "a LoRA": lambda: _sampled(weights.with_lora(PATCHER, weights.lora(PATCHER))),
    "a ControlNet": lambda: _sampled(PATCHER, control=CONTROL),
    "a compiled ControlNet": lambda: _sampled(PATCHER, control=driving.compiled_control(CONTROL)),
    "a compiled VAE": lambda: _decoded(driving.compiled_vae(VAE)),
}


def _sampled(patcher: Any, control: Any = None, **run: Any) -> float:
    """How far a compiled run is from eager's."""
    out, truth = (
        models.sample(model, **driving.SHORT_RUN | run, steer=net and driving.steering(net))
        for model, net in ((driving.compiled(patcher), control), (patcher, control and CONTROL))
    )
    return error(out, truth)


def _decoded(fast: Any) -> float:
    latent = driving.randn(1, 4, 9, 7)
    with torch.inference_mode():
        return error(fast.decode(latent), VAE.decode(latent))


def counted(change: Callable[[], float]) -> dict[str, Any]:
    """What PyTorch found or compiled meanwhile, and the distance from eager."""
    before = dict(counters["inductor"])
    distance = change()
    hits, misses = (
        counters["inductor"][name] - before.get(name, 0) for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")
    )
    return {"hits": hits, "misses": misses, "error": distance}


if __name__ == "__main__":
    changes = {name: counted(CHANGES[name]) for name in sys.argv[2:] or CHANGES}
    KEEPER.wait()
    print(json.dumps({"changes": changes, "models": snapshot()["models"]} | snapshot()["artifacts"]))
