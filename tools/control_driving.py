"""What the tests of Compile ControlNet share: sampling runs with controls, and one call of a network."""

from typing import Any

import torch
from torch import Tensor

from tools.driving import SMALL_FLUX, SMALL_RUN, randn, steering
from tools.oracles import error

RUN = SMALL_RUN | {"steps": 2}
Control, Patcher = Any, Any  # of comfy.controlnet and comfy.model_patcher, which are imported when fixtures say so


def sampled(models: Any, patcher: Patcher, *controls: Control, **run: Any) -> Tensor:
    """The latent of a short run with these controls."""
    return models.sample(patcher, **RUN | run, steer=steering(*controls))


def sampling(control: Control) -> Any:
    """What is known of a compiled control's network while it is sampled."""
    return control.control_model.forward.sampling


def assert_over(control: Control, patcher: Patcher) -> None:
    """No run's state is left, on the network or on the model."""
    assert sampling(control)._run is None and not sampling(control)._users
    assert not patcher.callbacks and not any(patcher.wrappers.values())


def inputs(rows: int = 2, **changes: Any) -> dict[str, Any]:
    """Arguments of a small ControlNet's network."""
    call = {
        "x": randn(rows, 4, 9, 11), "hint": randn(1, 3, 72, 88), "timesteps": torch.full((rows,), 500.0),
        "context": randn(rows, 77, 64, seed=1),
    }  # fmt: skip
    return call | changes


def largest_error(out: dict[str, list[Tensor]], wanted: dict[str, list[Tensor]]) -> float:
    """Of all residuals."""
    return max(error(a, b) for key in wanted for a, b in zip(out[key], wanted[key], strict=True))


def flux_control(models: Any) -> Control:
    """A ControlNet for ``SMALL_FLUX``, with blocks of both kinds. Its hint is a picture."""
    import comfy.controlnet
    import comfy.ops
    from comfy.ldm.flux.controlnet import ControlNetFlux

    config = {name: value for name, value in models.FLUX.items() if name not in ("image_model", "guidance_embed")}
    config |= SMALL_FLUX | {"guidance_embed": True}
    network = ControlNetFlux(**config, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    models.randomise(network)
    return comfy.controlnet.ControlNet(network.eval(), load_device=torch.device("cpu"), extra_conds=["y", "guidance"])
