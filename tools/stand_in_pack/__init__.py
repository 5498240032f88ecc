"""The kernels' tier for tests on a CPU: the same operations in plain torch, with the same name and traits.

Whatever decides how a call runs (keys, patches, hooks, batches, memory, faults, skipping) is then tested without a
compiler; the kernels themselves are tested in ``test_kernels.py`` and on a GPU. Tests in their own process take it from
``tools.stand_in``. For a server it is a node pack, which changes AnyShape before the first prompt.
"""

import functools
import sys
import time
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

KERNELS = ("group_norm", "linear_geglu", "bias_add", "upsample2x", "grouped_linear", "stream_layer_norm")


def class_of(plain: type) -> type:
    """See ``kernels.triton_ops.TritonOps``; ``plain`` is ``FusedOps``, of the pack under whatever name it has."""

    class StandIn(plain):
        name = "kernels"
        channels_last = True
        defer_bias = True

        def __init__(self) -> None:
            self.variants: set[tuple[str, torch.dtype]] = set()  # what Triton would compile: an operation in a dtype

        def compiled_variants(self) -> int:
            return len(self.variants)

        def group_norm(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # on a CPU torch's norm subtracts large squares in channels_last; the kernel does not
            out = super().group_norm(x.contiguous(), *args, **kwargs)
            return out.contiguous(memory_format=torch.channels_last)

    for name in KERNELS:
        setattr(StandIn, name, _counted(name, getattr(StandIn, name)))
    return StandIn


def _counted(name: str, plain: Any) -> Any:
    @functools.wraps(plain)
    def operation(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        self.variants.add((name, x.dtype if isinstance(x, Tensor) else x.value.dtype))
        return plain(self, x, *args, **kwargs)

    return operation


def loader(kernels: ModuleType, ops: Any) -> Any:
    """In the place of ``kernels.load``: a CPU gets ``ops``, other devices get what they get."""
    own = kernels.load

    @functools.wraps(own)
    def load(device: torch.device) -> Any:
        return ops if device.type == "cpu" else own(device)

    load.ops, load.cache_clear = ops, own.cache_clear
    return load


def _before_the_first_prompt(prompt: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI has loaded every pack by then."""
    for name in [name for name in sys.modules if name.endswith(".accel.kernels")]:
        kernels = sys.modules[name]
        if not hasattr(kernels.load, "ops"):
            kernels.load = loader(kernels, class_of(sys.modules[name.removesuffix("kernels") + "ops"].FusedOps)())
    return prompt


class UnknownPatch:
    """A node of another pack, whose patch is of a kind that no version of ComfyUI has."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "AnyShape tests"

    def patch(self, model: Any) -> tuple[Any]:
        patched = model.clone()
        patched.set_model_patch(lambda *args: None, "patch_of_tomorrow")
        return (patched,)


class Failing:
    """A node that fails when it runs."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"images": ("IMAGE",)}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "fail", "AnyShape tests"

    def fail(self, images: Any) -> tuple[Any]:
        raise RuntimeError("it fails on purpose")


class Slow:
    """A model with a layer that takes its time, as a slow machine does; it may be cancelled like ComfyUI's own."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "seconds": ("FLOAT", {})}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "slow_down", "AnyShape tests"

    def slow_down(self, model: Any, seconds: float) -> tuple[Any]:
        import comfy.model_management

        slow, layer = model.clone(), "diffusion_model.time_embed.forward"
        own = model.get_model_object(layer)

        def forward(*args: Any) -> Any:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                comfy.model_management.throw_exception_if_processing_interrupted()
                time.sleep(0.05)
            return own(*args)

        slow.add_object_patch(layer, forward)
        return (slow,)


NODE_CLASS_MAPPINGS = {f"AnyShapeTest{one.__name__}": one for one in (UnknownPatch, Failing, Slow)}
NODE_DISPLAY_NAME_MAPPINGS = {"AnyShapeTestUnknownPatch": "Unknown Patch"}

if __name__ != "tools.stand_in_pack":
    from server import PromptServer

    PromptServer.instance.add_on_prompt_handler(_before_the_first_prompt)
