"""Networks that patches of a model bring along: a ControlNet that ComfyUI hangs into a transformer as a patch, say.

While a sampling run lasts they count as parts of the model, under paths of their own: their code is watched, their
weights are found by name, and where ComfyUI maps weights in, their pages are asked for with the model's.
"""

import weakref
from collections.abc import Sequence

from torch import nn

START = "beside "  # of a companion's path, which its number follows; no attribute has such a name
_OF: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]]" = weakref.WeakKeyDictionary()


def companions(model: nn.Module) -> dict[str, nn.Module]:
    """Those of ``model`` by path."""
    if not _OF:  # as nearly always: every walk through a model asks
        return {}
    found = {f"{START}{number}": ref() for number, ref in enumerate(_OF.get(model, ()))}
    return {path: network for path, network in found.items() if network is not None}


def put_beside(model: nn.Module, networks: Sequence[nn.Module]) -> None:
    """From now on these count as parts of ``model``, and no others. Holds none of them."""
    if networks:
        _OF[model] = list(map(weakref.ref, networks))
    else:
        _OF.pop(model, None)
