"""A layer's weights as ComfyUI has them before the layer computes, where it maps them in: copied, cast and patched."""

from collections.abc import Iterable, Sequence

import comfy.model_management as mm
import comfy.ops
import torch
from torch import Tensor, nn

from .known_pages import vbars

KEYS = ("weight", "bias")
NOTES = "_prefetch"  # on a layer: what was fetched for it, until it has computed


class Cast:
    """Each layer's weight and bias on ``device`` for the body, in the dtype that they are stored in.

    They lie in the layers' pages where there is room; else in memory that later casts write over, once all that was
    launched in the body is done, and patched weights are rounded as those in pages. Those that ComfyUI's prefetch queue
    has brought stay as long as it keeps them. dtype: of the model's inputs, in which patches are computed. No generator
    makes it, because each layer of each step waits for one.
    """

    __slots__ = ("_device", "_dtype", "_own", "_parts", "_stream")

    def __init__(self, parts: Sequence[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
        self._parts, self._device, self._dtype = parts, device, dtype
        self._own = [part for part in parts if NOTES not in part.__dict__]

    def __enter__(self) -> list[tuple[Tensor | None, Tensor | None]]:
        device, dtype = self._device, self._dtype
        try:
            self._stream = comfy.ops.cast_modules_with_vbar(self._own, None, device, None, True)
            mm.sync_stream(device, self._stream)
            found = []
            for part in self._parts:
                forms = part._prefetch.get("cast_geometry") or (part._v_weight, part._v_bias)
                own = [getattr(form, "dtype", None) for form in forms]
                found.append(comfy.ops.resolve_cast_module_with_vbar(part, own[0], device, own[1], dtype, True))
            return found
        except BaseException:
            clean(self._own)
            raise

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:  # it may write into its buffers again once these weights are done
            self._stream.wait_stream(mm.current_stream(self._device))
        clean(self._own)


def clean(parts: Iterable[nn.Module]) -> None:
    """Leaves layers as ComfyUI does when they have computed."""
    for part in parts:
        prefetch = part.__dict__.get(NOTES)
        if prefetch is None:
            continue
        for key in KEYS:
            patch = getattr(part, f"{key}_lowvram_function", None)
            if patch is not None:
                patch.clear_prepared()
        if prefetch["signature"] is not None:
            vbars.vbar_unpin(part._v)
        del part._prefetch
