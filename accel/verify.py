"""Whether a fast tier computes what eager computes: asked once for each shape, before its numbers are trusted.

Rounding differs from tier to tier, by up to 0.003 in fp16 and 0.025 in bf16 in one forward of a full-size model
(relative L2). A kernel that a driver or a card gets wrong is off by far more, or not finite at all.
"""

import torch
from torch import Tensor

from .errors import WrongResult
from .outputs import Output, tensors_of

# Relative L2, by the dtype of the activations: several times what correct tiers show, far below a visible fault.
TOLERANCE = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.1}


def compare(what: str, out: Output, reference: Output) -> None:
    """Raises ``WrongResult`` if ``out`` is not ``reference`` but for rounding. Waits for the GPU.

    A reference that is not finite says nothing: then the model itself overflows, in eager too.
    """
    pairs = list(zip(tensors_of(out), tensors_of(reference), strict=True))
    if not all(_is_finite(theirs) for _, theirs in pairs):
        return
    check_finite(what, out)
    worst, allowed = max(_difference(*pair) for pair in pairs), TOLERANCE[pairs[0][0].dtype]
    if worst > allowed:
        raise WrongResult(
            f"{what} gave a wrong result (relative error {worst:.2g}, allowed {allowed}) and is not used any more. "
            f"Update torch, Triton and the GPU's driver, and please report it with their versions"
        )


def check_finite(what: str, out: Output) -> None:
    """Raises ``WrongResult`` if a value is infinite or no number. Waits for the GPU."""
    if not all(_is_finite(each) for each in tensors_of(out)):
        raise WrongResult(
            f"{what} gave values that are not finite (a black image) and is not used any more. If eager gives a black "
            f"image too, load the model in bf16 or fp32"
        )


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _difference(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, in float32; infinite for another shape."""
    if out.shape != reference.shape:
        return float("inf")
    out, reference = out.float(), reference.float()
    norm = reference.norm()
    return ((out - reference).norm() / norm.clamp_min(torch.finfo(torch.float32).tiny)).item()
