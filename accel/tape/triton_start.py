"""Triton started in the background, so that the first picture need not wait for it.

Importing it, the hash over its own sources that it makes before its first kernel, and what its compiler sets up at the
first use of a function take a second.
"""

import logging
import threading

import torch

from .. import kernels
from ..errors import AnyShapeError
from .kernels import function

log = logging.getLogger(__name__)

# Of each kind that kernels are made of: functions of libdevice and of the card, sums, neighbours.
START = """@triton.jit
def anyshape_start(p0, o0, BC: tl.constexpr):
    c = tl.arange(0, BC)[None, :]
    t0 = tl.load(p0 + c).to(tl.float32)
    t1, t2 = tl.split(tl.reshape(t0, [1, BC // 2, 2]))
    t3 = tl.reshape(tl.join(gelu_erf(t2) + tl.sin(t1), gelu_tanh(t1) + tl.cos(t2)), [1, BC])
    t4 = t3 * tl.rsqrt(tl.sum(t0 * t0, axis=1)[:, None] / BC) + tanh(t0)
    tl.store(o0 + c, t4.to(tl.bfloat16))
"""


def prepare(device: torch.device) -> None:
    """Starts Triton where kernels can run."""
    if not kernels.obstacle(device):
        # no daemon: those that Python stops in the middle of Triton's C++ abort the process at its end
        threading.Thread(target=_start_triton, args=(device,), name="AnyShape starts Triton").start()


def _start_triton(device: torch.device) -> None:
    try:
        kernels.load(device).compile_one()
        _compile_start(device)
    except AnyShapeError as error:  # the first compiled model will meet it again, and say so where users look
        log.debug("AnyShape: %s", error)


def _compile_start(device: torch.device) -> None:
    """Compiles a kernel that nobody runs. Raises ``KernelFailed``."""
    from ..kernels.launch import compile_only

    torch.cuda.set_device(device)  # of this thread
    start = function(START, "anyshape_start")  # kept on disk like the others
    compile_only(start, (1,), torch.bfloat16, torch.bfloat16, 1024, num_warps=4, enable_fp_fusion=False)
