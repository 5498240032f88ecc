"""A layer's weights as ComfyUI has them before the layer computes, where it maps them in: copied, cast and patched."""

from collections.abc import Iterable, Sequence

import comfy.model_management as mm
import comfy.ops
import torch
from torch import Tensor, nn

from ..tape.layer_calls import brought
from .known_pages import vbars

KEYS = ("weight", "bias")
NOTES = "_prefetch"  # on a layer: what was fetched for it, until it has computed


class Cast:
    """Each layer's weight and bias on ``device`` for the body, in the dtype that they are stored in.

    They lie in the layers' pages where there is room; else in memory that later casts write over, once all that was
    launched in the body is done, and patched weights are rounded as those in pages. Those that ComfyUI's prefetch queue
    has brought stay as long as it keeps them. dtype: of the model's inputs, in which patches are computed. No generator
    makes it, because each layer of each step waits for one; and of a layer whose weights are in its pages, as those of
    most are, no more is asked than that.
    """

    __slots__ = ("_device", "_dtype", "_held", "_own", "_parts", "_stream")

    def __init__(self, parts: Sequence[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
        self._parts, self._device, self._dtype = parts, device, dtype

    def __enter__(self) -> list[tuple[Tensor | None, Tensor | None]]:
        self._own, self._held, self._stream = list[nn.Module](), list[nn.Module](), None
        try:
            there = [self._there(part) for part in self._parts]
            if self._own:
                self._stream = comfy.ops.cast_modules_with_vbar(self._own, None, self._device, None, True)
                mm.sync_stream(self._device, self._stream)
            pairs = zip(self._parts, there, strict=True)
            return [self._fetched(part) if found is None else found for part, found in pairs]
        except BaseException:
            self._let_go()
            raise

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:  # it may write into its buffers again once these weights are done
            self._stream.wait_stream(mm.current_stream(self._device))
        self._let_go()

    def _there(self, part: nn.Module) -> tuple[Tensor | None, Tensor | None] | None:
        """The weights in a layer's pages, which stay; None if something must be fetched, or was."""
        if NOTES in part.__dict__:
            return None
        signature = vbars.vbar_fault(part._v)
        if signature is not None:
            if vbars.vbar_signature_compare(signature, part._v_signature):
                self._held.append(part)
                return part._v_weight, part._v_bias
            vbars.vbar_unpin(part._v)
        self._own.append(part)
        return None

    def _fetched(self, part: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        forms = part._prefetch.get("cast_geometry") or (part._v_weight, part._v_bias)
        own = [getattr(form, "dtype", None) for form in forms]
        return comfy.ops.resolve_cast_module_with_vbar(part, own[0], self._device, own[1], self._dtype, True)

    def _let_go(self) -> None:
        for part in self._held:
            vbars.vbar_unpin(part._v)
        clean(self._own)


def casts_itself(part: nn.Module) -> bool:
    """Whether a LoRA lies on a layer that another pack's code computes, so that ``Cast`` must not put it there.

    What it makes of the weight depends on the dtypes in which that pack's code asks for it: int8 and its scale, say.
    """
    patched = any(getattr(part, f"{key}_lowvram_function", None) is not None for key in KEYS)
    return patched and brought(part) is not None


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
