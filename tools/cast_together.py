"""A gated feed-forward of the weights of all its layers at once, where they are on the GPU.

A file of Z-Image that is newer than ComfyUI 0.33 has such parts, for kernels that are a whole feed-forward in int8. The
tests cannot have that version, so they put this ``forward`` in the place of ComfyUI's. Call
`tools.embed.use_comfyui()` first.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import comfy.ops
import comfy_aimdo.model_vbar as vbars
import torch.nn.functional as F
from torch import Tensor, nn


def are_there(layers: Sequence[nn.Module]) -> bool:
    """Whether the weights of layers that nothing was fetched for lie in their pages."""
    for layer in layers:
        signature = vbars.vbar_fault(layer._v)
        is_there = vbars.vbar_signature_compare(signature, layer._v_signature)
        if signature is not None:
            vbars.vbar_unpin(layer._v)
        if not is_there:
            return False
    return True


@contextmanager
def together(layers: Sequence[nn.Module], x: Tensor) -> Iterator[list[Tensor] | None]:
    """The weights of all these layers in the body; None if some would have to be copied for it."""
    left = [layer for layer in layers if hasattr(layer, "_v") and not hasattr(layer, "_prefetch")]
    if not are_there(left):
        yield None
        return
    with ExitStack() as stack:
        weights = []
        for layer in layers:
            weight, bias, stream = comfy.ops.cast_bias_weight(layer, x, offloadable=True)
            stack.callback(comfy.ops.uncast_bias_weight, layer, weight, bias, stream)
            weights.append(weight)
        yield weights


def forward(self: Any, x: Tensor) -> Tensor:
    """x [B, N, C]. Both ways give the same bits."""
    layers = self.w1, self.w3, self.w2
    with together(layers, x) as weights:
        if weights is None:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        gate, up, down = weights
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
