"""Runs attention on the fastest of torch's exact backends, where ComfyUI asked torch for another one."""

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import is_out_of_memory
from ...reasons import say
from .. import static_sizes
from ..attention_choice import attend, case_of, fastest, supports, takes_plans
from ..layout import copied, lie_alike
from ..traits import ATTENTIONS, by_name
from ..values import Operation, Tape, Value

LESS_EXACT = say("other_attention")
TRUSTED = "cudnn"  # the fastest where torch takes it by itself (Hopper); measuring costs 0.1 to 0.2 s for each case
# Floating-point operations of a call. With fewer, it spares less than 14 µs, and its plan of each new length takes the
# host 40 to 85 ms (H200).
PAYS = 1e10
WIDTHS = (64, 128)  # of heads: with more queries it was the fastest of torch's, or within 3 % (docs/performance.md)
NAMES = {name: name.removeprefix("_scaled_dot_product_").removesuffix("_attention") for name in ATTENTIONS}


class Attention:
    """A recorded attention whose result lies with a certain stride; on another backend, if one is named.

    On the recorded one again if that refuses tensors like these.
    """

    sizes = staticmethod(static_sizes.attention)
    by_strides = False  # whether its arguments must lie as a rule has chosen
    shared = 1  # heads of queries for each head of keys and values, which the tape repeated so often

    def __init__(self, own: Any, backend: str, stride: tuple[int, ...]) -> None:
        self.own, self.backend, self.stride = own, backend, stride
        self._repeats = False  # whether it was refused as many heads as there are

    @property
    def likeness(self) -> tuple:
        """What a plan depends on."""
        return Attention, self.own, self.by_strides, self.shared

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """With the arguments of the recorded operation. Views and kernels behind it rely on the result's strides."""
        out = self._shared(*args, **kwargs) if self.shared > 1 else self._out(*args, **kwargs)
        return out if lie_alike(out.shape, out.stride(), self.stride) else copied(out, self.stride)

    def _shared(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self._repeats:
            try:
                return self._out(q, k, v, *args, **kwargs)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self._repeats = True
        return self._out(q, *(x.repeat_interleave(self.shared, 1) for x in (k, v)), *args, **kwargs)

    def _out(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.backend:
            try:
                return attend(self.backend, *_named(self.own, args, kwargs))
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self.backend = ""  # what it says of tensors like these it will say at each call
        return self.own(*args, **kwargs)[0]


def take_fastest(tape: Tape) -> str:
    """Runs attention without dropout on the fastest backend for its case. Rounds in other places than eager."""
    if tape.device.type != "cuda":
        return ""
    read = {value for operation in tape.operations for value in operation.inputs} | set(tape.outputs)
    chosen: dict[tuple, str] = {}  # by form: a model's blocks are alike
    changed = False
    for operation in tape.operations:
        if operation.opaque or operation.traits.name not in NAMES or read & set(operation.outputs[1:]):
            continue
        recorded, given = NAMES[operation.traits.name], _named(operation.func, operation.args, operation.kwargs)
        form = recorded, tuple((v.shape, v.stride, v.dtype) if isinstance(v, Value) else v for v in given)
        if form not in chosen:
            chosen[form] = _choice(recorded, *given[:5], device=tape.device)
        if backend := chosen[form]:
            replace(operation, backend)
            changed = changed or backend != recorded
    return LESS_EXACT if changed else ""


def replace(operation: Operation, backend: str) -> None:
    """Has ``operation`` run on ``backend``."""
    operation.func = Attention(operation.func, backend, operation.outputs[0].stride)
    operation.opaque, operation.outputs = True, operation.outputs[:1]


def _named(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """(queries, keys, values, mask or None, whether it is causal, scale or None) of a backend's arguments."""
    given = by_name(func, args, kwargs)
    mask = given.get("attn_bias", given.get("attn_mask"))
    return *args[:3], mask, given.get("is_causal", False), given.get("scale")


def _choice(recorded: str, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, device: torch.device) -> str:
    """The backend for a call of this form; "" where nothing is to be changed."""
    if (
        recorded == TRUSTED
        or len(q.shape) != 4
        or q.shape[1] % k.shape[1]
        or (mask is not None and mask.dtype != q.dtype)
    ):
        return ""
    if takes_plans(device) and mask is None and not causal and q.shape[3] == v.shape[3] in WIDTHS:
        # a step of ours either way, so that a small size has the plan of a large one
        pays = 4.0 * math.prod(q.shape) * k.shape[2] >= PAYS
        return TRUSTED if pays and _can(TRUSTED, q, k, v, mask, causal, device) else recorded
    best = fastest(case_of(q, k, v, mask is not None, causal), recorded, device)
    return best if best != recorded and _can(best, q, k, v, mask, causal, device) else ""


def _can(backend: str, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, device: torch.device) -> bool:
    """Whether torch would take ``backend`` for tensors that lie like these."""
    return supports(backend, *[value and value.empty(device) for value in (q, k, v, mask)], causal)
