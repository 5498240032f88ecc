"""What the tests of Skip Blocks share: a sampling run, and what is known of the models of ``tools.architectures``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tools.oracles import error

STEPS = 9  # as few as leave some to skip
RUN = {"width": 72, "height": 56, "steps": STEPS}  # of bench.models.sample; odd latent sides
PLANNED = {"full": 3, "skipped": 6, "resets": {}}  # of as many steps, by default
BLOCKS = 5  # in each list of blocks of a transformer
# Their first block lays the stream out in another order, so it always runs, and the last one with it.
FIRST_RUNS = ("WAN21_T2V", "WAN22_T2V", "WAN21_CausalAR_T2V", "CogVideoX_T2V")


def left_out(patcher: Any, name: str, make: Callable[[nn.Module], Any], close: float) -> tuple[Tensor, ...] | str:
    """The features of one forward of a tiny model, or why there are none; tried with what ``make`` gives of a model.

    Asserts that a full step is the model's own to the bit, that with its own features a skipped one is within ``close``
    of it, and that without them it is not.
    """
    from tools.architectures import patchers

    model = patcher.model.diffusion_model

    def forward() -> Tensor:
        return torch.cat([part.flatten() for part in patchers.apply(patcher, 1, name)])

    with torch.inference_mode():
        own, rows, blocks = forward(), len(patchers.apply(patcher, 1, name)[0]), make(model)
        out, features = blocks.full(model, forward, rows)
        assert torch.equal(out, own)
        if not isinstance(features, str):
            nothing = [torch.zeros_like(feature) for feature in features]
            assert error(blocks.skipped(model, forward, features), own) < close
            assert error(blocks.skipped(model, forward, nothing), own) > 1e-3
    return features
