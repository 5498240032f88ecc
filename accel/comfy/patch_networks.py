"""The networks of patches: ComfyUI loads them with the model, because the patches name them (``models()``).

Those of ComfyUI's own code keep nothing from call to call. So they may count as parts of the model for a run
(``tape.companions``), and what a patch does with them is recorded with it, under DynamicVRAM too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..origin import is_beside_comfyui, is_known
from ..tape.named_tensors import parts_of
from ..tape.patch_call import KINDS
from ..tape.values import wrapped
from . import dynamic


def networks(options: Mapping[Any, Any], model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Those of the patches in a forward's options whose weights are all on ``device``, each once."""
    found: dict[int, nn.Module] = {}

    def add(_: tuple, patch: Any) -> None:
        for patcher in patch.models() if hasattr(patch, "models") else ():
            network = getattr(patcher, "model", None)
            if isinstance(network, nn.Module):
                found[id(network)] = network

    for kind in KINDS:
        wrapped(options.get(kind), add, (kind,))
    return [network for network in found.values() if _may_be_beside(network, model, device)] if found else []


def _may_be_beside(network: nn.Module, model: nn.Module, device: torch.device) -> bool:
    parts = parts_of(network)
    own = all(is_known(kind) or is_beside_comfyui(kind.__module__) for kind in set(map(type, parts)))
    if not own or hasattr(network, "diffusion_model") or not set(parts).isdisjoint(parts_of(model)):
        return False
    return all(weight.device == device for weight in dynamic.unmapped(parts)) and dynamic.maps_to(parts, device)
