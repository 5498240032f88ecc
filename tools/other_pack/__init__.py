"""A node pack of somebody else, for the tests that drive a server: nodes that patch, fail, or take their time."""

import time
from typing import Any


class CountingLayer:
    """A model with a layer that counts its calls, which nobody could repeat in its place."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "count", "AnyShape tests"

    def count(self, model: Any) -> tuple[Any]:
        counting, layer, calls = model.clone(), "diffusion_model.time_embed.forward", []
        own = model.get_model_object(layer)

        def forward(*args: Any) -> Any:
            calls.append(len(calls))
            return own(*args)

        counting.add_object_patch(layer, forward)
        return (counting,)


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


NODE_CLASS_MAPPINGS = {f"AnyShapeTest{one.__name__}": one for one in (CountingLayer, Failing, Slow)}
NODE_DISPLAY_NAME_MAPPINGS = {"AnyShapeTestCountingLayer": "Counting Layer"}
