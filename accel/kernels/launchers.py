"""Loads the C modules by which Triton starts its kernels: built side by side, each once, loaded one at a time.

All of them have the same name. Python keeps one module per name, and puts a reloaded module into it. A thread that
reads its module while another thread loads one finds the other's function there. A kernel that is started by it gets
arguments of other kinds, or another number of them.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

_LOADING = threading.Lock()
_BUILDING: dict[tuple[str, ...], threading.Lock] = {}
ANOTHER = (AttributeError, ImportError, LookupError, TypeError, ValueError)  # of a Triton that does otherwise


def load(compiled: Any) -> Any:
    """A kernel that Triton compiled, ready to start. Raises what Triton raises."""
    with contextlib.suppress(*ANOTHER):  # it is built where it is loaded
        if (build := _building()) is not None:
            with _building_of(compiled.src.signature):
                build(SimpleNamespace(), compiled.src, compiled.metadata)
    with _LOADING:
        _ = compiled.run  # loads it, and the kernel
    return compiled


def _building_of(signature: dict[str, Any]) -> threading.Lock:
    """Kernels whose arguments are of the same kinds have the same launcher: one thread builds it, others find it."""
    kinds = tuple(["*" if str(kind).startswith("*") else str(kind) for kind in signature.values()])
    return _BUILDING.setdefault(kinds, threading.Lock())


@functools.cache
def _building() -> Callable[..., None] | None:
    """What Triton does to make a launcher, but for its end, where it is loaded; None where it does otherwise."""
    from triton.backends.nvidia import driver
    from triton.runtime import build

    make, launcher = getattr(build, "compile_module_from_src", None), getattr(driver, "CudaLauncher", None)
    if make is None or launcher is None or getattr(driver, "compile_module_from_src", None) is not make:
        return None
    if "_load_module_from_path" not in make.__code__.co_names:
        return None
    built = among(make, _load_module_from_path=lambda name, path: SimpleNamespace(launch=None))
    return among(launcher.__init__, compile_module_from_src=built)


def among(function: FunctionType, **names: Any) -> FunctionType:
    """A copy of ``function`` for which these global names mean something else."""
    return FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )
