"""What tests on a real GPU share: configs of small models, and one forward as a sampling run makes it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SMALL = {"model_channels": 64, "context_dim": 128, "num_head_channels": 32, "num_heads": -1}  # of bench.models.unet
SMALL_FLUX = {  # of bench.models.flux
    "hidden_size": 256, "num_heads": 2, "depth": 2, "depth_single_blocks": 4, "context_in_dim": 128,
}  # fmt: skip
Patcher = Any  # comfy.model_patcher.ModelPatcher; ComfyUI is imported when the tests' fixtures say so


def small(models: Any, name: str, dtype: torch.dtype = torch.float16, **changes: Any) -> Patcher:
    """A small "sd15", "sdxl" or "flux" of ``bench.models``."""
    if name == "flux":
        return models.flux(dtype, **SMALL_FLUX | changes)
    return models.unet(name, dtype, **SMALL | changes)


def forward(patcher: Patcher, *args: Any, **kwargs: Any) -> Tensor:
    """One call of the diffusion model inside a sampling run, on random input: see ``loaded_forward``."""
    import comfy.model_management as mm

    mm.load_models_gpu([patcher])
    return loaded_forward(patcher, *args, **kwargs)


def inputs(
    patcher: Patcher, width: int, height: int, rows: int, tokens: int, seed: int
) -> tuple[tuple[Tensor, ...], dict[str, Tensor | None]]:
    """Random arguments of a UNet or a Flux: two by position, the others by name."""
    device = patcher.load_device
    g = torch.Generator(device).manual_seed(seed)
    config, dtype = patcher.model.model_config.unet_config, patcher.model.diffusion_model.dtype
    randn = lambda *shape: torch.randn(*shape, generator=g, device=device).to(dtype)  # noqa: E731
    full = lambda value: torch.full((rows,), value, device=device)  # noqa: E731
    if config.get("image_model") == "flux":
        x, context = randn(rows, 16, height // 8, width // 8), randn(rows, tokens, config["context_in_dim"])
        y, guidance = randn(rows, config["vec_in_dim"]), full(3.5) if config["guidance_embed"] else None
        return (x, full(0.5)), {"context": context, "y": y, "guidance": guidance}
    x, context = randn(rows, 4, height // 8, width // 8), randn(rows, tokens, config["context_dim"])
    y = randn(rows, config["adm_in_channels"]) if config.get("num_classes") else None
    return (x, full(500.0)), {"context": context, "y": y}


def loaded_forward(
    patcher: Patcher, width: int, height: int, rows: int = 2, tokens: int = 77, seed: int = 0, times: int = 1,
    around: Callable[[Callable[[], Tensor]], Tensor] = lambda call: call(), **changes: Any,
) -> Tensor:  # fmt: skip
    """``forward`` of a model whose weights are where they should be; ``changes`` to the arguments by name.

    times: calls of the model in one run. around: makes each of them, and gives its result.
    """
    from comfy.patcher_extension import WrapperExecutor, WrappersMP

    args, named = inputs(patcher, width, height, rows, tokens, seed)
    options = {"wrappers": patcher.wrappers, "cond_or_uncond": [1, 0]}

    def run():
        with torch.inference_mode():
            for _ in range(times):
                out = around(
                    lambda: patcher.model.diffusion_model(*args, **named | changes, transformer_options=dict(options))
                )
            return out

    outer = [w for ws in patcher.wrappers.get(WrappersMP.OUTER_SAMPLE, {}).values() for w in ws]
    return WrapperExecutor.new_executor(run, outer).execute()
