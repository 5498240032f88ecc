"""Functions compiled once with symbolic sizes, and never again behind the user's back.

How (``docs/architecture.md`` has the reasons):

- a renamed clone of the function's code for every variant, so that its Dynamo cache is its own and no other
  ``torch.compile`` user shares its recompile limit;
- ``dynamic=False`` with ``mark_dynamic`` on private aliases of the arguments: exactly the dimensions we choose are
  symbolic, and no ``torch._dynamo.config`` is written;
- dimensions of size 1 are part of the variant's key (Dynamo specialises them silently);
- after its first call a variant runs through ``torch._dynamo.run``, which never compiles: a guard that fails runs the
  plain function, and is counted.
"""

import logging
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .artifacts import KEEPER
from .attempt import named
from .errors import Unavailable
from .stats import COMPILES

log = logging.getLogger(__name__)

MAX_VARIANTS = 16  # of one region: dtypes x modes x sizes of 1; more means a key that is too fine, so stop compiling

# torch 2.11 crashes if the process's first fake mode starts in a thread other than the main one (ComfyUI runs prompts
# in a worker thread), so start one here, at import.
with FakeTensorMode():
    pass


class _CountingInductor(torch._TorchCompileInductorWrapper):
    """Inductor that counts the graphs it compiled and the calls that reached them.

    Equality by identity, because Dynamo shares cache entries between equal backends.
    """

    def __init__(self) -> None:
        super().__init__("default", None, None)
        self.graphs = 0
        self.calls = 0

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        """Compiles ``gm``; the result counts its calls."""
        fn = super().__call__(gm, inputs)
        self.graphs += 1

        def counted(*args: Any) -> Any:
            self.calls += 1
            return fn(*args)

        if getattr(fn, "_boxed_call", False):
            counted._boxed_call = True
        return counted


def _clone(fn: types.FunctionType, tag: str) -> types.FunctionType:
    code = fn.__code__.replace(co_name=f"{fn.__code__.co_name}__{tag}")
    return types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def _symbolic_alias(value: Any) -> Any:
    """A private view with every dimension above 1 marked symbolic: a mark on the caller's tensor would outlive us.

    A copy of what begins inside its storage: Dynamo guards that an offset is not 0, but nothing where it is.
    """
    if not isinstance(value, Tensor):
        return value
    alias = value.clone() if value.storage_offset() else value.view_as(value)
    for dim, size in enumerate(alias.shape):
        if size > 1:
            torch._dynamo.mark_dynamic(alias, dim)
    return alias


def _distinct(args: tuple) -> tuple:
    """The same tensor twice would add a guard that the next call breaks, so later occurrences become views."""
    seen: set[int] = set()
    out = []
    for value in args:
        repeated = isinstance(value, Tensor) and id(value) in seen
        seen.add(id(value))
        out.append(value.view_as(value) if repeated else value)
    return tuple(out)


def _trait(value: Any) -> Any:
    """What a compiled graph is specialised on besides the sizes."""
    if not isinstance(value, Tensor):
        return value
    ones = tuple(size == 1 for size in value.shape)
    return (value.dtype, value.device.type, ones, value.is_inference(), value.requires_grad)


class _Variant:
    def __init__(self, fn: types.FunctionType, tag: str) -> None:
        self.backend = _CountingInductor()
        self.fn = _clone(fn, tag)
        self.compiled = torch.compile(self.fn, backend=self.backend, dynamic=False, fullgraph=True)
        self.run = torch._dynamo.run(self.fn)

    def first_call(self, args: tuple) -> Any:
        if not COMPILES.kernels:
            log.info("AnyShape: torch.compile starts, once for all sizes; this can take a minute")
        out = self.compiled(*map(_symbolic_alias, args))
        COMPILES.add(self.backend.graphs)
        return out


class Region:
    """``fn`` compiled with symbolic sizes. Call it with contiguous tensors, ``None`` and constants.

    Raises ``Unavailable`` where ``torch.compile`` cannot work (no C++ compiler on a CPU, no Triton on a GPU).
    """

    def __init__(self, fn: types.FunctionType) -> None:
        self._fn = fn
        self._variants: dict[tuple, _Variant] = {}
        self._lock = threading.RLock()  # Dynamo compiles one thing at a time
        self.misses = 0

    def __call__(self, *args: Any) -> Any:
        """fn(*args), compiled; the first call of a variant compiles it."""
        args = _distinct(args)
        key = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(_trait, args))
        variant = self._variants.get(key)
        if variant is None:
            return self._compile(key, args)
        calls = variant.backend.calls
        out = variant.run(*args)
        self.misses += variant.backend.calls == calls
        return out

    def _compile(self, key: tuple, args: tuple) -> Any:
        with self._lock:
            if key in self._variants:
                return self._variants[key].run(*args)
            if len(self._variants) >= MAX_VARIANTS:
                self.misses += 1
                return self._fn(*args)
            variant = _Variant(self._fn, f"anyshape_{id(self)}_{len(self._variants)}")
            device = next((value.device for value in args if isinstance(value, Tensor)), torch.device("cpu"))
            KEEPER.load_regions(device)
            try:
                with KEEPER.recording(device):
                    out = variant.first_call(args)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                line = named(error.inner_exception)
                raise Unavailable(f"torch.compile failed: {line}. {_advice(line, args)}") from error
            self._variants[key] = variant
            return out

    @property
    def graphs(self) -> int:
        """How many graphs this region has compiled in this process."""
        return sum(v.backend.graphs for v in self._variants.values())


def _advice(line: str, args: tuple) -> str:
    on_cpu = all(a.device.type == "cpu" for a in args if isinstance(a, Tensor))
    missing = re.search(r"No module named '([\w.]+)'", line)  # from Python 3.12 on torch needs setuptools
    need = "a C++ compiler (g++, clang or MSVC)" if on_cpu else "Triton for your version of torch"
    if missing and missing[1] != "triton":
        need = f"{missing[1]} for the Python that runs ComfyUI (pip install {missing[1]})"
    return f"Install {need}, or set the mode to off; until then this part runs in eager"
