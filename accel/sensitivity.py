"""Measures how far rounding alone carries a model: its own forward, on an input that is off by one step of its dtype.

Bounds for rounding suit most models. Some amplify it: with 8-bit activations, or many layers, one step in the latent
makes a result that is 2 to 8 % off, which is more than the bounds allow for a right program. A model whose first result
is beyond them is therefore asked itself. On four models with random weights the answer was near what one step in each
attention's result makes, which is how a program differs from eager (docs/decisions.md).
"""

import torch
from torch import Tensor

from . import verify
from .call import Call
from .outputs import Output, flat

SEED = 0


def measured(call: Call, recorded: Output) -> verify.Comparison:
    """The errors of ComfyUI's own forward, on a nudged latent, to ``recorded``, the result for the latent as it is.

    False where the forward must not run twice: patches may count its calls. Afterwards the weights may have moved.
    """
    taped, x = call.taped, next(iter(call.inputs.values()))
    if taped.calls_others or taped.leaves_out or not (x.is_floating_point() and _is_dense(x)):
        return verify.NOTHING
    with torch.inference_mode():
        own = x.clone()
        x.copy_(nudged(own))
        try:
            out = flat(taped.forward(taped.options))
        finally:
            x.copy_(own)
        found = verify.difference(out, recorded)
    return verify.NOTHING if taped.hold() else found


def nudged(x: Tensor) -> Tensor:
    """``x`` with each element one step of its dtype larger or smaller, always in the same way."""
    generator = torch.Generator(x.device).manual_seed(SEED)
    steps = torch.randint(0, 2, x.shape, generator=generator, device=x.device).mul_(2).sub_(1)
    return x * (1 + steps * torch.finfo(x.dtype).eps).to(x.dtype)


def _is_dense(x: Tensor) -> bool:
    """Whether no two elements share memory, as far as strides say it."""
    return all(stride or n == 1 for n, stride in zip(x.shape, x.stride(), strict=True))
