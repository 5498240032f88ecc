"""comfy-kitchen's functions that models call directly, as calls on a tape.

Most of the library's functions are operations of torch's, which a recorder hears. Some are not: the int8 layer that
applies GELU or SwiGLU to its input (``comfy.ops.linear_input_act``) starts kernels past torch's dispatcher, and to a
recorder its result is memory that nothing has written. The library asks its registry for each function's
implementation, and ``use_backend`` names one that comes first on this thread. While a forward is recorded that is ours:
it writes the call down, of the implementation that the registry gives otherwise, and makes it. For all else the
registry passes it by.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

LIBRARY, BACKEND = "comfy_kitchen", "anyshape_recorder"
KERNELS = "cuda"  # the library's backend that computes past torch; without it nothing does
PLAIN = "eager"  # the one that has every function
WRITES = ("_", "_out")  # how the names of functions end that write into their arguments

_HERE = threading.local()  # recorder: that of this thread's forward; given: with which arguments a call was announced
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Called:
    """A function of the library's on a tape. function: the implementation that the registry gave for it."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the implementation gives."""
        return self.function(*args, **kwargs)


def noted(recorder: Any) -> AbstractContextManager[None]:
    """Within, ``recorder`` is told of this thread's calls of such functions."""
    library = sys.modules.get(f"{LIBRARY}.registry")
    registry = getattr(library, "registry", None)
    if registry is None:
        return nullcontext()
    try:
        if not (registry.is_available(KERNELS) and _register(registry)):
            return nullcontext()
    except Exception:  # noqa: BLE001  another version of the library: the recorder hears what it hears
        return nullcontext()
    return _told(registry, recorder)


@contextmanager
def _told(registry: Any, recorder: Any) -> Iterator[None]:
    outer = getattr(_HERE, "recorder", None)
    _HERE.recorder = recorder
    try:
        with registry.use_backend(BACKEND):
            yield
    finally:
        _HERE.recorder, _HERE.given = outer, None


def _register(registry: Any) -> bool:
    """Makes our backend known, once; it is never chosen unless it is asked for."""
    with _LOCK:
        if registry.is_available(BACKEND):
            return True
        constraints = sys.modules[f"{LIBRARY}.constraints"]
        result = constraints.ValidationResult

        def listens(given: Any) -> Any:
            if not _listening():
                return result.fail("recorder", "nobody listens")
            _HERE.given = given
            return result.ok()

        only = constraints.FunctionConstraints(call_rules=(listens,))
        names = [name for name in registry.list_backends()[PLAIN]["capabilities"] if not name.endswith(WRITES)]
        registry.register(BACKEND, _Backend(registry), dict.fromkeys(names, only))
        return True


def _listening() -> bool:
    """Whether a call that is made now is one of the forward's, and not of an operation that the recorder hears."""
    recorder = getattr(_HERE, "recorder", None)
    return _get_current_dispatch_mode() is recorder is not None and not (recorder.is_deaf or recorder.in_wrapped)


class _Backend:
    """Has each function of the library, as its registry wants them."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        recorder, given = _HERE.recorder, _HERE.given
        _HERE.given = None  # it holds tensors
        with recorder.not_listening():
            own = self._registry.get_implementation(name, kwargs=given)
        return recorder.call(Called(name, own), args, kwargs, lambda: own(*args, **kwargs))
