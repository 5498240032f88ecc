"""Weights that are too small for pages, under DynamicVRAM (``dynamic``): norms, biases, tables.

ComfyUI copies them to the card at each load, each time to another place. They are moved to where they lay at the first
load, so that a graph finds them.
"""

import weakref
from collections.abc import Callable, Container

import torch
from torch import Tensor, nn

from ..tape.named_tensors import PLAIN, modules_of

SMALL = 16 << 20  # bytes; what is larger stays where ComfyUI has it

Places = dict[tuple[str, str], Tensor]
_PLACES: "weakref.WeakKeyDictionary[nn.Module, Places]" = weakref.WeakKeyDictionary()


def forget(model: nn.Module) -> None:
    """Lets go of their memory: the model was unloaded."""
    _PLACES.pop(model, None)


class SmallWeights:
    """Those of one model. Holds them: keep it no longer than a sampling run.

    left_out: the names of a layer's weights that have pages.
    """

    def __init__(self, model: nn.Module, left_out: Callable[[nn.Module], Container[str]]) -> None:
        self._model, self._left_out = model, left_out
        self._as_left: list[tuple[dict[str, Tensor | None], str, Tensor]] = []

    def keep(self, device: torch.device) -> None:
        """Has those on ``device`` lie where they lay before."""
        if self._as_left and all([table.get(name) is tensor for table, name, tensor in self._as_left]):
            return
        places, self._as_left = _PLACES.setdefault(self._model, {}), []
        with torch.inference_mode():
            for path, part in modules_of(self._model):
                left_out = self._left_out(part)
                for table in (part._parameters, part._buffers):
                    for name, tensor in list(table.items()):
                        if tensor is None or name in left_out or tensor.device != device or type(tensor) not in PLAIN:
                            continue
                        if tensor.nbytes <= SMALL:
                            table[name] = tensor = _kept(places, (path, name), tensor)
                        self._as_left.append((table, name, tensor))


def _kept(places: Places, name: tuple[str, str], tensor: Tensor) -> Tensor:
    """``tensor`` where it lay before; where it lies now, if it is new or has another form."""
    place = places.get(name)
    form = (tensor.shape, tensor.stride(), tensor.dtype)
    if place is None or (place.shape, place.stride(), place.dtype) != form:
        places[name] = tensor.data
        return tensor
    if place.data_ptr() == tensor.data_ptr():
        return tensor
    place.copy_(tensor)
    return nn.Parameter(place, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else place
