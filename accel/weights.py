"""Tracks where a model's weights are, and how they are laid out while it is sampled.

A captured graph reads the weights' memory directly, so it is valid exactly as long as every weight stays at its
address and in its layout. ComfyUI moves weights when it patches a LoRA in or out, loads, unloads or streams a model;
``WeightWatch.fingerprint`` is how we notice, whatever the cause.
"""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from .kernels.operations import LASTS
from .reasons import say
from .tape.named_tensors import MAPPED, PLAIN, inner_tensors, is_note, parts_of, tensor_attributes

GIB = 1 << 30
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)  # whose weights may lie with channels last
KNOWN = (*PLAIN, type(None))


class WeightWatch:
    """Where a module's weights lie. Holds them: keep it no longer than one sampling run."""

    def __init__(
        self, module: nn.Module, parts: Sequence[nn.Module] = (), attributes: Iterable[tuple[int, str]] | None = None
    ) -> None:
        """parts: those of the module, if they are known. attributes: as of ``tensor_attributes``, if they are known."""
        modules = parts or parts_of(module)
        dicts = [m.__dict__ for m in modules]
        self._mapped = [own for own in dicts if "_v" in own]
        self._tables = [table for own in dicts for table in (own["_parameters"], own["_buffers"]) if table]
        found = tensor_attributes(modules) if attributes is None else attributes
        self._attributes = [(dicts[number], name) for number, name in found if name not in MAPPED]
        # quantised weights have scales, which lie somewhere else
        self._wrapped = [(table, name) for table in self._tables for name, w in table.items() if type(w) not in KNOWN]
        self._convolutions = [m._parameters for m in modules if isinstance(m, CONVOLUTIONS) and m._parameters]

    def fingerprint(self) -> int:
        """Changes when a weight moves, is replaced or changes its layout. Takes 0.3 ms for SDXL's 1,680 weights.

        Also when a tensor is written into that a weight notes, if torch counts that: programs may have a copy of it.
        """
        with torch._C.DisableTorchFunctionSubclass():  # packed weights would go through Python for each address
            addresses = [p.data_ptr() for table in self._tables for p in table.values() if p is not None]
            addresses += [own[name].data_ptr() for own, name in self._attributes if isinstance(own.get(name), Tensor)]
            wrapped = [(name, table[name]) for table, name in self._wrapped if table.get(name) is not None]
            inner = [found for each in wrapped for found in inner_tensors(*each)]
            addresses += [each.data_ptr() for _, each in inner]
            noted = [each for name, each in inner if is_note(name)]
            addresses += [each._version for each in noted if not each.is_inference()]
        layouts = [table["weight"].stride() for table in self._convolutions]
        mapped = [weight for own in self._mapped for name in MAPPED if (weight := own.get(name)) is not None]
        places = [(weight.data_ptr(), weight.dtype, weight.stride()) for weight in mapped]
        return hash((tuple(addresses), tuple(layouts), tuple(places)))


class Whereabouts:
    """On which devices tensors lie. Holds none of them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._seen = [(weakref.ref(tensor), tensor.device) for tensor in tensors]

    def unchanged(self) -> bool:
        """Whether all of them are there still, each on its device."""
        return all((tensor := ref()) is not None and tensor.device == device for ref, device in self._seen)


def low_vram(module: nn.Module, device: torch.device) -> str:
    """Says how much of the weights each call fetches from elsewhere, and what helps; "" if all are on ``device``."""
    weights = [w for part in parts_of(module) if "_v" not in part.__dict__ for w in part._parameters.values()]
    sizes = [(weight.device != device, weight.nbytes) for weight in weights if weight is not None]
    away, every = sum(size for is_away, size in sizes if is_away), sum(size for _, size in sizes)
    return say("low_vram", away=f"{away / GIB:.1f}", all=f"{every / GIB:.1f}") if away else ""


def _restride(weight: Tensor, memory_format: torch.memory_format) -> None:
    """Permutes ``weight`` within its own storage: same address, same values, other layout."""
    permuted = weight.contiguous(memory_format=memory_format)
    if permuted.data_ptr() == weight.data_ptr():
        return
    # entering a mode takes as long as one of these steps, and a run's start waits for each weight
    as_it_is = torch.is_inference_mode_enabled() or not weight.is_inference()
    with nullcontext() if as_it_is else torch.inference_mode():
        weight.as_strided_(weight.shape, permuted.stride(), weight.storage_offset())
        weight.copy_(permuted)


class Mapped(Protocol):
    """Weights whose memory may be given away and filled again, by another tensor then."""

    def companions(self, weight: Tensor) -> int:
        """How many tensors of its layer share its storage, beside its own part."""

    def holding(self, weight: Tensor) -> AbstractContextManager[bool]:
        """Whether ``weight`` is there; if so it stays for the body."""


class ChannelsLastWeights:
    """Convolution weights in channels_last for as long as a fast forward needs them, in place, then back.

    cuDNN would otherwise convert each weight at each call. In place, because a copy of SDXL's would take 0.6 GB and
    go stale when a hook rewrites a weight; and back, because the model is shared with workflows that do not use us.
    mapped: whose memory the weights lie in, if it may go.
    """

    def __init__(self) -> None:
        self._changed: list[Tensor] = []
        self.mapped: Mapped | None = None

    @torch.no_grad()
    def permute(self, weights: Iterable[Tensor]) -> None:
        """Permutes those of ``weights`` that can be and are not yet."""
        for weight in weights:
            if _is_permutable(weight, self.mapped.companions(weight) if self.mapped else 0):
                _restride(weight, LASTS[weight.ndim])
                self._changed.append(weight)

    @torch.no_grad()
    def restore(self) -> None:
        """Returns every weight that is still laid out as we left it to torch's default layout."""
        for weight in self._changed:
            with self.mapped.holding(weight) if self.mapped else nullcontext(True) as is_there:
                if is_there and weight.is_contiguous(memory_format=LASTS[weight.ndim]):
                    _restride(weight, torch.contiguous_format)
        self._changed.clear()


def _is_permutable(weight: Tensor, companions: int) -> bool:
    """Whether it is plain, contiguous, larger than 1x1 (whose two layouts are one), and nobody else's too."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and weight.ndim in LASTS
    larger = plain and weight.is_contiguous() and weight.shape[2:].numel() > 1 and weight.shape[1] > 1
    return larger and not _is_shared(weight, companions)


def _is_shared(weight: Tensor, companions: int) -> bool:
    """Whether another tensor reads its memory, with strides of its own: a Control-LoRA's network, say, which ComfyUI
    makes of the model's weights. companions: tensors that lie beside it in the same storage.
    """
    return _users(weight) > _users(torch.empty(1)) + companions


def _users(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
