"""Shape-agnostic Triton kernels, each with an eager reference in ``reference``.

``load(device)`` gives them as ``FusedOps``, or says why they cannot run there. Triton is imported nowhere else, so a
machine without it can import the pack.
"""

import functools

import torch

from ..errors import Unavailable

OLDEST = (7, 5)  # compute capability; Triton 3.x compiles for nothing older


def _obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"Triton kernels need an NVIDIA GPU, this model is on {device.type}"
    if torch.version.hip is not None:
        return "Triton kernels are not tested on ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return f"this card has compute capability {capability[0]}.{capability[1]}, Triton needs {OLDEST[0]}.{OLDEST[1]}"
    return None


@functools.cache
def load(device: torch.device) -> "FusedOps":  # noqa: F821  (imported below, with Triton)
    """The fused operations on Triton for ``device``. Raises ``Unavailable`` with the reason."""
    obstacle = _obstacle(device)
    if obstacle is not None:
        raise Unavailable(obstacle)
    try:
        from .triton_ops import TritonOps
    except ImportError as error:
        raise Unavailable(
            f"Triton cannot be imported ({error}); install the triton (on Windows: triton-windows) that matches torch "
            f"{torch.__version__}"
        ) from error
    return TritonOps(device)


def available(device: torch.device) -> bool:
    """Whether ``load`` would succeed."""
    try:
        load(device)
    except Unavailable:
        return False
    return True
