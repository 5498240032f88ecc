"""Triton kernels for any size, each with an eager reference in ``reference``.

``load(device)`` gives them as ``TritonOps``, or says why they cannot run there. Triton is imported nowhere else, so a
machine without it can import the pack.
"""

import functools

import torch

from .. import devices
from ..artifacts import KEEPER
from ..attempt import without_folders
from ..errors import Unavailable
from ..reasons import say

OLDEST = (7, 5)  # compute capability; Triton 3.x compiles for nothing older
OLDEST_TRITON = (3, 2)  # that of torch 2.6


def obstacle(device: torch.device) -> str:
    """Says why no kernel can run there, as far as that is known without Triton; "" if one can."""
    if device.type == "cpu":
        return say("no_kernels_on_cpu")
    return devices.obstacle(device) or too_old(device)


def too_old(device: torch.device) -> str:
    """Why Triton does not serve this card; "" if it does."""
    if not devices.is_nvidia(device):
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST:
        return ""
    return say("old_card", has=".".join(map(str, capability)), needs=".".join(map(str, OLDEST)))


@functools.cache
def load(device: torch.device) -> "TritonOps":  # noqa: F821  (imported below, with Triton)
    """Returns the fused operations on Triton for ``device``. Raises ``Unavailable`` with the reason."""
    if reason := obstacle(device):
        raise Unavailable(reason)
    try:
        import triton

        from .triton_ops import KERNELS, TritonOps
    except ImportError as error:
        raise Unavailable(say("no_triton", error=without_folders(str(error)), advice=_advice())) from error
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        raise Unavailable(say("old_triton", version=triton.__version__, advice=_advice()))
    KEEPER.watch(device, lambda: KERNELS)
    return TritonOps(device)


def _advice() -> str:
    return f"install the triton (on Windows: triton-windows) that matches torch {torch.__version__}"


def available(device: torch.device) -> bool:
    """Whether ``load`` would succeed."""
    return not why_not(device)


def why_not(device: torch.device) -> str:
    """Why ``load`` would fail; "" if it would not."""
    try:
        load(device)
    except Unavailable as error:
        return str(error)
    return ""
