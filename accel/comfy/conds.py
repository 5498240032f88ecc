"""Copies the conds of a sampling run to the GPU once.

Prompts come from the text encoder in main memory, and ComfyUI copies them to the model's device at each step. Such a
copy waits until the GPU has done all it was given, so at each step the GPU then waits for the host: up to 3 ms.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CONDS = "model_conds"  # of a cond in a guider: by name, objects of comfy.conds


def to_device(conds: Mapping[str, list[dict[str, Any]]], device: torch.device) -> None:
    """Puts copies on ``device`` in place of what lies in main memory.

    conds: a guider's, by kind ("positive", say), as ``process_conds`` has made them for this run. A name of which some
    are on a device already stays as it is: where two lie decides whether ComfyUI joins them in one call.
    """
    own = [cond for kind in conds.values() if isinstance(kind, list) for cond in kind if CONDS in cond]
    names = {name for cond in own for name in cond[CONDS]}
    movable = {name for name in names if all(_in_memory(cond[CONDS][name]) for cond in own if name in cond[CONDS])}
    copies: dict[int, Tensor] = {}  # one tensor that several conds have stays one
    moved = [{name: _moved(cond[CONDS][name], device, copies) for name in movable & cond[CONDS].keys()} for cond in own]
    for cond, new in zip(own, moved, strict=True):  # all or none, should memory be short
        cond[CONDS] = {**cond[CONDS], **new}


def _in_memory(item: Any) -> bool:
    tensors = _tensors(getattr(item, "cond", None))
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors) and hasattr(item, "_copy_with")


def _tensors(value: Any) -> list[Tensor]:
    """Those of a cond that is a tensor or a list of them; none of any other."""
    if isinstance(value, Tensor):
        return [value]
    return value if isinstance(value, list) and all(isinstance(each, Tensor) for each in value) else []


def _moved(item: Any, device: torch.device, copies: dict[int, Tensor]) -> Any:
    for tensor in _tensors(item.cond):
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.to(device)
    if isinstance(item.cond, Tensor):
        return item._copy_with(copies[id(item.cond)])
    return item._copy_with([copies[id(tensor)] for tensor in item.cond])
