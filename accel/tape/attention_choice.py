"""Chooses the fastest of torch's attention backends for a case: measured once, and kept in the store on disk.

All of them compute attention exactly and round in different places. The same seed must give the same picture, so a
choice is made once for each card: what is measured is a coarse case and never a call, so it does not matter which size
came first, and later processes read the times that the first one wrote.
"""

import json
import math
import threading
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..artifacts import KEEPER

aten = torch.ops.aten
cuda = torch.backends.cuda
BACKENDS = {  # and whether the user lets torch take it
    "cudnn": cuda.cudnn_sdp_enabled, "flash": cuda.flash_sdp_enabled, "efficient": cuda.mem_efficient_sdp_enabled,
}  # fmt: skip
MARGIN = 1.05  # another backend than the recorded one must be faster by this: what is equal stays as it was
LENGTHS, ROWS = (64, 256, 1024, 4096), (4, 16, 64)  # sizes that stand for all
ROUNDS, CALLS = 5, 4
WAIT = 1_000_000  # cycles that the GPU waits, half a millisecond, so that launching is not what is measured
ALIGNED = 16  # elements between the rows of a mask, as the efficient kernel loads them

_LOCK = threading.Lock()
_KNOWN: dict[str, dict[str, float]] = {}


@dataclass(frozen=True)
class Case:
    """Calls of attention that are fast on the same backend."""

    dtype: torch.dtype
    rows: int  # images times heads
    shared: int  # heads of queries for each head of keys
    queries: int
    keys: int
    width: int  # of a head
    value_width: int
    masked: bool
    causal: bool

    def tensors(self, device: torch.device) -> list[Tensor | None]:
        """Queries, keys, values and mask, without a draw from torch's own generator."""
        draw, heads = torch.Generator(device).manual_seed(0), max(1, self.rows // self.shared)
        shapes = (
            (1, self.queries, heads * self.shared, self.width), (1, self.keys, heads, self.width),
            (1, self.keys, heads, self.value_width),
        )  # fmt: skip
        made = [torch.randn(shape, generator=draw, device=device, dtype=self.dtype).transpose(1, 2) for shape in shapes]
        mask = torch.zeros(1, 1, self.queries, self.keys, device=device, dtype=self.dtype) if self.masked else None
        return [*made, mask]


def case_of(q: Any, k: Any, v: Any, masked: bool, causal: bool) -> Case:
    """The case of these queries, keys and values, [B, H, N, D] each: tensors, or values of a tape."""
    return Case(
        q.dtype, coarse(q.shape[0] * q.shape[1], ROWS), q.shape[1] // k.shape[1], coarse(q.shape[2], LENGTHS),
        coarse(k.shape[2], LENGTHS), q.shape[3], v.shape[3], masked, causal,
    )  # fmt: skip


def takes_plans(device: torch.device) -> bool:
    """Whether torch, if nobody asks for another one, takes cuDNN's attention: on Hopper, where it is the fastest."""
    return device.type == "cuda" and cuda.cudnn_sdp_enabled() and torch.cuda.get_device_capability(device) == (9, 0)


def coarse(n: int, steps: tuple[int, ...]) -> int:
    """The nearest of ``steps``, by ratio."""
    return min(steps, key=lambda step: abs(math.log(step / max(n, 1))))


def fastest(case: Case, recorded: str, device: torch.device) -> str:
    """The backend for this case; the recorded one unless another is clearly faster."""
    card = f"{torch.cuda.get_device_name(device)} with cuDNN {torch.backends.cudnn.version()}"
    allowed = [backend for backend, enabled in BACKENDS.items() if enabled()]
    name = f"attention of {card}: {' '.join(map(str, (*astuple(case), *allowed)))}"
    with _LOCK:
        if name not in _KNOWN:
            _KNOWN[name] = json.loads(KEEPER.measured(name, device) or _measured(case, name, device))
        times = _KNOWN[name]
    best = min(times, key=times.__getitem__, default=recorded)
    return recorded if times.get(recorded, math.inf) <= MARGIN * times.get(best, math.inf) else best


def supports(backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Whether torch would take this backend for tensors that lie like these; not if the user switched it off."""
    if backend == "flash" and q.shape[-1] % 8:  # torch pads the heads before
        return False
    params = cuda.SDPAParams(q, k, v, mask, 0.0, causal, q.shape[1] != k.shape[1])
    return bool(getattr(cuda, f"can_use_{backend}_attention")(params, False))


def attend(
    backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """Attention on this backend. q [B, H, N, D], k [B, h, M, D], v [B, h, M, E], mask to be added [B, H, N, M]."""
    if backend == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0]
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False, 0.0, causal, scale=scale)[0]
    mask = None if mask is None else aligned(mask).expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, False, 0.0, causal, scale=scale)[0]


def aligned(mask: Tensor) -> Tensor:
    """``mask`` with rows that begin where the efficient kernel can load them, as torch itself lays it."""
    if mask.stride(-1) == 1 and all(step % ALIGNED == 0 for step in mask.stride()[:-1]):
        return mask
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % ALIGNED))[..., :keys]


def _measured(case: Case, name: str, device: torch.device) -> str:
    """Milliseconds of each backend that can, as JSON: those that are in the store from here on."""
    with torch.inference_mode():
        tensors = case.tensors(device)
        able = [backend for backend in BACKENDS if supports(backend, *tensors, case.causal)]
        times = {backend: _milliseconds(backend, tensors, case.causal) for backend in able}
    return KEEPER.keep_measured(name, device, json.dumps(times))


def _milliseconds(backend: str, tensors: list[Tensor | None], causal: bool) -> float:
    """One call's, on the GPU."""
    best = math.inf
    with torch.random.fork_rng([tensors[0].device]):  # cuDNN's draws, though nothing is dropped
        for turn in range(ROUNDS + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT)
            start.record()
            for _ in range(CALLS):
                attend(backend, *tensors, causal, None)
            end.record()
            end.synchronize()
            if turn:  # the first one makes plans
                best = min(best, start.elapsed_time(end) / CALLS)
    return best
