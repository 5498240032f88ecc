"""Launching Triton kernels: as usual, and not at all, to compile ahead.

Triton compiles them, and this package starts them (``loaded``): that takes no C compiler, and asks the driver nothing
about the address of a tensor. ``cudaMallocAsync``, which ComfyUI switches on for most NVIDIA cards, hands out addresses
during a capture that exist only once the graph runs.

Compiling ahead: a model's first forward needs a dozen kernel variants, and each costs a third of a second of compilers
(Triton's, ptxas) on one core. A dry run of the forward finds out which; they are then compiled side by side.
"""

import functools
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton import JITFunction
from triton.errors import TritonError

from ..errors import KernelFailed, is_out_of_memory
from ..preparing import finished, workers
from ..reasons import say
from .compiling import compiled
from .helpers import HELPERS
from .loaded import Loaded

# compiling: Triton's own errors, its passes (RuntimeError), ptxas; loading and starting: the driver
FAILURES = (TritonError, RuntimeError, OSError, subprocess.SubprocessError)
UNKNOWN = (AttributeError, LookupError, TypeError)  # of a Triton that has other parts
MAX_WORKERS = 16
_VARIANTS: dict[tuple, tuple[Any, Loaded]] = {}  # (kernel, variant) by its id and what decides on a variant
_LOADED: dict[int, Loaded] = {}  # by the id of what Triton compiled
STARTED = threading.Event()  # a kernel of this process is compiled, for which Triton has hashed its own sources


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``; the kernel's parameters by position, options such as num_warps by name.

    Raises ``KernelFailed`` if it cannot be compiled or started here.
    """
    ahead = getattr(_dry_run, "ahead", None)
    if ahead is not None:
        ahead.add(kernel, grid, args, options)
        return
    try:
        _launch(kernel, grid, args, options)
    except FAILURES as error:
        if is_out_of_memory(error):  # says nothing about the kernel
            raise
        raise _named(kernel, error) from error


def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Loaded:
    """Compiles the variant of such a launch, and loads it. A dtype may stand for a tensor. Raises ``KernelFailed``."""
    try:
        variant = _load(kernel, torch.cuda.current_device(), grid, args, options)
    except FAILURES as error:
        raise _named(kernel, error) from error
    STARTED.set()
    return variant


def _load(kernel: Any, device: int, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> Loaded:
    try:
        made = compiled(kernel, device, args, grid, options)
        return _LOADED.get(id(made)) or _LOADED.setdefault(id(made), Loaded(made, device))
    except UNKNOWN as error:
        raise RuntimeError(f"Triton {triton.__version__} is not known: {type(error).__name__}: {error}") from error


def launch_compiled(kernel: Any, variant: Loaded, grid: tuple[int, int, int], args: tuple, stream: int) -> None:
    """Starts a variant of this kernel on a stream, for arguments of the kind that it was compiled for.

    Raises ``KernelFailed``.
    """
    try:
        variant(grid, args, stream)
    except FAILURES as error:
        if is_out_of_memory(error):
            raise
        raise _named(kernel, error) from error


def _named(kernel: Any, error: Exception) -> KernelFailed:
    name = getattr(kernel, "__name__", "kernel")
    return KernelFailed(say("kernel_failed", name=name, error=f"{type(error).__name__}: {_first_line(error)}"))


def _launch(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
    if not isinstance(kernel, JITFunction):  # Triton's interpreter
        kernel[grid](*args, **options)
        return
    device = torch.cuda.current_device()
    traits = tuple([_trait(parameter, value) for parameter, value in zip(kernel.params, args, strict=True)])
    name = id(kernel), device, traits, tuple(options.items())
    known = _VARIANTS.get(name)
    if known is None:  # compiled, or from Triton's cache
        known = _VARIANTS[name] = kernel, _load(kernel, device, grid, args, options)
    known[1]((*grid, 1, 1)[:3], args, torch._C._cuda_getCurrentRawStream(device))


# Triton's own of these names take two microseconds and more: a forward of SDXL asks a thousand times.
def cdiv(n: int, size: int) -> int:
    """How many pieces of ``size`` cover ``n``."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


@contextmanager
def compilers(device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Gives threads for the body that call ``compile_only``, for this device; helpers may take part of their work."""
    with HELPERS.running(), workers(MAX_WORKERS, torch.cuda.set_device, device) as pool:
        yield pool


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Within the body nothing is launched: kernels are compiled, all of them by its end. What it computes is void."""
    with compilers(device) as pool:
        ahead = _dry_run.ahead = _Ahead(pool)
        try:
            yield
        finally:
            _dry_run.ahead = None
        ahead.finish()


_dry_run = threading.local()  # ``ahead``: the _Ahead of the dry run that this thread is in


class _Ahead:
    """The compilations of a dry run, each variant once.

    They begin at once, but for the first ones of a process: Triton hashes its own sources for the very first, which
    takes longer than the rest of a warm start and would be done by each of several that begin together.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._seen: set[tuple] = set()
        self._begun: list[Future] = []
        self._others: list[Callable[[], None]] = []

    def add(self, kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        """Compiles the variant that this launch needs, unless it is known already."""
        traits = tuple(_trait(parameter, value) for parameter, value in zip(kernel.params, args, strict=True))
        name = (id(kernel), traits, tuple(sorted(options.items())))
        if name in self._seen:
            return
        self._seen.add(name)
        job = functools.partial(compile_only, kernel, grid, *map(_stand_in, args), **options)
        if self._begun and not STARTED.is_set():
            self._others.append(job)
        else:
            self._begun.append(self._pool.submit(job))

    def finish(self) -> None:
        """Waits for all of them. What fails will fail again, and be handled, where it is launched."""
        finished(self._begun)
        finished([self._pool.submit(other) for other in self._others])


def _stand_in(value: Any) -> Any:
    """Something without memory that Triton compiles the same variant for: a dry run's tensors need not be kept."""
    if isinstance(value, Tensor) and value.data_ptr() % 16 == 0:
        return value.new_empty(0)  # at address 0
    return value


def _trait(parameter: Any, value: Any) -> Any:
    """What Triton compiles a variant for. Finer than its own key costs a look into its cache, coarser is wrong."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if parameter.is_constexpr or isinstance(value, bool):
        return type(value), value
    if isinstance(value, int):
        bits = -(1 << 31) <= value < 1 << 31, value < 1 << 63
        return bits if parameter.do_not_specialize else (bits, value == 1, value % 16 == 0)
    blocks = tuple(getattr(value, "block_shape", ()))  # of a tensor's descriptor
    return (type(value), blocks, value.base.dtype) if blocks else type(value)
