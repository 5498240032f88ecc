"""The functions of CUDA's driver that kernels need, called through ctypes.

Triton's own way has a C compiler build a link to the driver and, up to Triton 3.6, a launcher per list of argument
kinds. Not every system has one, and where one is, each launcher takes it 0.2 s.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

NAME = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
# from cuda.h
SHARED_SIZE, DYNAMIC_SHARED_SIZE = 1, 8  # of a function, in bytes
DEVICE_SHARED_SIZE = 97  # that one block can ask for
PREFER_SHARED = 1
NO_INTERLEAVE, PROMOTE_TO_128_BYTES, FILL_WITH_ZEROS = 0, 2, 0  # of a tensor map
SHARED_WITHOUT_ASKING = 48 << 10  # bytes
MAP_SIZE, MAP_ALIGNMENT = 128, 64  # bytes


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(NAME)


@functools.cache
def _launch() -> Any:
    launch = _library().cuLaunchKernel
    launch.argtypes = c_void_p, *[c_uint] * 7, *[c_void_p] * 3
    return launch


def _call(name: str, *args: Any) -> None:
    function = getattr(_library(), name, None)
    if function is None:
        raise RuntimeError(f"the GPU's driver is too old: it has no {name}")
    _check(name, function(*args))


def _check(name: str, code: int) -> None:
    """Raises ``RuntimeError`` in the driver's words."""
    if code:
        text = c_char_p()
        _library().cuGetErrorString(code, byref(text))
        raise RuntimeError(f"{name}: {text.value.decode() if text.value else f'error {code}'}")


def load(binary: bytes, name: str, shared: int, device: int) -> int:
    """The function ``name`` of a cubin, for the device of this number. It stays loaded.

    shared: bytes of shared memory that each block asks for when it starts. Raises ``RuntimeError``, and ``OSError``
    where there is no driver.
    """
    context, module, function = c_void_p(), c_void_p(), c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    if not context:
        _call("cuDevicePrimaryCtxRetain", byref(context), device)
        _call("cuCtxSetCurrent", context)
    _call("cuModuleLoadData", byref(module), binary)
    _call("cuModuleGetFunction", byref(function), module, name.encode())
    if shared > SHARED_WITHOUT_ASKING:
        most, own = c_int(), c_int()
        _call("cuDeviceGetAttribute", byref(most), DEVICE_SHARED_SIZE, device)
        _call("cuFuncGetAttribute", byref(own), SHARED_SIZE, function)
        if shared > most.value - own.value:
            raise RuntimeError(f"{name} needs {shared} bytes of shared memory, and the card has {most.value}")
        _call("cuFuncSetCacheConfig", function, PREFER_SHARED)
        _call("cuFuncSetAttribute", function, DYNAMIC_SHARED_SIZE, most.value - own.value)
    return function.value


def parameters(function: int) -> list[int] | None:
    """The size in bytes of each parameter of a function; None if this driver does not tell."""
    # Python's lock is kept: threads that load kernels side by side would wait for it at each call.
    ask = getattr(ctypes.PyDLL(NAME), "cuFuncGetParamInfo", None)
    if ask is None:
        return None
    found, offset, size = [], c_size_t(), c_size_t()
    while not ask(c_void_p(function), c_size_t(len(found)), byref(offset), byref(size)):
        found.append(size.value)
    return found


def start(
    function: int, grid: tuple[int, int, int], threads: int, shared: int, stream: int, places: ctypes.Array
) -> None:
    """Starts a function on a stream. places: the address of each argument. Raises ``RuntimeError``."""
    _check("cuLaunchKernel", _launch()(function, *grid, threads, 1, 1, shared, stream, places, None))


def tensor_map(
    address: int,
    kind: int,
    element: int,
    swizzle: int,
    shape: Sequence[int],
    strides: Sequence[int],
    block: Sequence[int],
) -> bytes:
    """Describes a tensor to the memory accelerator of Hopper and newer cards, as Triton does.

    kind, swizzle: of the driver's own numbers; element: bytes; strides: in elements, the last is 1; block: what one
    load takes. What lies outside the tensor is read as zero. Raises ``RuntimeError``.
    """
    rank, memory = len(shape), ctypes.create_string_buffer(MAP_SIZE + MAP_ALIGNMENT)
    place = -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * rank)(*[each * element for each in reversed(strides[:-1])])
    boxes, ones = (ctypes.c_uint32 * rank)(*reversed(block)), (ctypes.c_uint32 * rank)(*[1] * rank)
    _call(
        "cuTensorMapEncodeTiled", c_void_p(place), kind, rank, c_void_p(address), sizes, steps, boxes, ones,
        NO_INTERLEAVE, swizzle, PROMOTE_TO_128_BYTES, FILL_WITH_ZEROS,
    )  # fmt: skip
    return ctypes.string_at(place, MAP_SIZE)
