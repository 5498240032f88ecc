"""Compiles kernels without Triton's driver, which a C compiler would have to build first. Helpers may take part."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget

from .helpers import HELPERS, among

# Unless a kernel says otherwise. Triton 3.9 warns where nobody says so, and 3.10 takes the opposite.
FUSION = {"enable_fp_fusion": True}


def compiled(kernel: Any, device: int, args: tuple, grid: tuple[int, ...], options: dict[str, Any]) -> Any:
    """``kernel.warmup(*args, grid=grid, **options)`` for the device of this number: what Triton compiled.

    A dtype may stand for a tensor. Raises what Triton raises.
    """
    run, bind = _without_driver(device)
    caches = getattr(kernel, "device_caches", {device: None})  # Triton 3.2 has none: ``run`` asks for the target itself
    if device not in caches:
        caches[device] = bind(kernel)
    HELPERS.may_compile(kernel, device)
    options = FUSION | options
    return JITFunction.warmup(SimpleNamespace(run=functools.partial(run, kernel)), *args, grid=grid, **options)


@functools.cache
def _without_driver(device: int) -> tuple[Callable, Callable]:
    """``JITFunction.run`` and ``create_binder`` for this device: what they ask of the driver, they are told."""
    major, minor = torch.cuda.get_device_capability(device)
    target = GPUTarget("cuda", 10 * major + minor, 32)
    active = SimpleNamespace(
        get_current_device=lambda: device, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    driver = SimpleNamespace(active=active)
    return among(JITFunction.run, driver=driver), among(JITFunction.create_binder, driver=driver)
