"""What can run on which kind of device. CUDA here means NVIDIA, although torch calls AMD's GPUs ``cuda`` too."""

from contextlib import AbstractContextManager, nullcontext

import torch

from .reasons import say

OTHERS = {
    "cuda": "AMD GPUs (ROCm)",
    "mps": "Apple GPUs (MPS)",
    "xpu": "Intel GPUs (XPU)",
    "privateuseone": "GPUs under DirectML",
}


def is_nvidia(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU, with kernels and graphs."""
    return device.type == "cuda" and torch.version.hip is None


def current(device: torch.device) -> AbstractContextManager:
    """Makes ``device`` current, for kernels, streams and events that name no device."""
    return torch.cuda.device(device) if is_nvidia(device) else nullcontext()


def wait(device: torch.device) -> None:
    """Waits until the GPU has finished the work of the current stream.

    Not for the whole GPU: nobody may wait for that while another thread captures.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def obstacle(device: torch.device) -> str:
    """Says why only eager runs on this device; "" if something else may."""
    if device.type == "cpu" or is_nvidia(device):
        return ""
    kind = OTHERS.get(device.type, f"{device.type} devices")
    return say("no_such_device", kind=kind)
