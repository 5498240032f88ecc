"""Kernels that Triton compiled, loaded by CUDA's driver and ready to start."""

import struct
import threading
from collections.abc import Callable
from ctypes import addressof, c_void_p, create_string_buffer
from itertools import accumulate, islice
from typing import Any

from torch import Tensor

from . import cuda_driver

MAP = f"{cuda_driver.MAP_SIZE}s"
FORMS = {  # of Python's struct, by Triton's names
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
POINTER = "Q"
MAP_DTYPES = {8: 10, 9: 8, 10: 9}  # the driver's numbers of dtypes by Triton's, where they differ


class Loaded:
    """A kernel on one device; ``compiled`` is what Triton made."""

    def __init__(self, compiled: Any, device: int) -> None:
        """Raises ``RuntimeError`` where it cannot be loaded, or takes what is not known here."""
        self.compiled, metadata = compiled, compiled.metadata
        self._taken, forms = _parameters(compiled)
        self._expands = any(take not in (_address, _same) for _, take in self._taken)
        hidden = _scratch(metadata)
        forms += [POINTER] * hidden
        self._hidden, self._struct = (0,) * hidden, struct.Struct("=" + "".join(forms))
        self._threads, self._shared = 32 * metadata.num_warps, metadata.shared
        self._function = cuda_driver.load(compiled.kernel, metadata.name, metadata.shared, device)
        sizes, known = [struct.calcsize(f"={form}") for form in forms], cuda_driver.parameters(self._function)
        if known is not None and known != sizes:
            raise RuntimeError(f"Triton gave {metadata.name} parameters of {known} bytes instead of {sizes}")
        self._memory = _Memory(sizes)

    def __call__(self, grid: tuple[int, int, int], args: tuple, stream: int) -> None:
        """Starts it. args: all of the Python function's, constants among them. Raises ``RuntimeError``."""
        if 0 in grid:
            return
        values = [take(args[position]) for position, take in self._taken]
        if self._expands:
            values = [value for each in values for value in (each if isinstance(each, tuple) else (each,))]
        memory = self._memory
        try:
            self._struct.pack_into(memory.buffer, 0, *values, *self._hidden)
        except (struct.error, OverflowError) as error:
            raise RuntimeError(f"{self.compiled.metadata.name} cannot take {values}: {error}") from error
        cuda_driver.start(self._function, grid, self._threads, self._shared, stream, memory.places)


class _Memory(threading.local):
    """Where each thread writes the arguments of one kernel, side by side. The driver lays them out for the card."""

    def __init__(self, sizes: list[int]) -> None:
        self.buffer = create_string_buffer(sum(sizes))
        begins = accumulate(sizes, initial=addressof(self.buffer))
        self.places = (c_void_p * len(sizes))(*islice(begins, len(sizes)))


def _address(tensor: Tensor) -> int:
    if not tensor.is_cuda:
        raise RuntimeError(f"a kernel was given a tensor on {tensor.device}")
    return tensor.data_ptr()


def _same(value: float) -> float:
    return value


def _parameters(compiled: Any) -> tuple[list[tuple[int, Callable[[Any], Any]]], list[str]]:
    """(which arguments the kernel takes, and what is made of each; the forms of what is made). Constants are gone."""
    source, taken, forms = compiled.src, [], []
    names = source.fn.arg_names
    constants = {name if isinstance(name, str) else names[name[0]] for name in source.constants}
    maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    for position, name in enumerate(names):
        kind = source.signature.get(name, "constexpr")
        if kind == "constexpr" or name in constants:
            continue
        if kind[0] == "*":
            taken.append((position, _address))
            forms.append(POINTER)
        elif kind in FORMS:
            taken.append((position, _same))
            forms.append(FORMS[kind])
        else:
            taken.append((position, described := _Described(kind, next(maps, None))))
            forms += [MAP, *"i" * described.rank, *"q" * described.rank]
    return taken, forms


class _Described:
    """Makes a map of a tensor's descriptor, for the block that the kernel was compiled for."""

    def __init__(self, kind: str, block: dict[str, Any] | None) -> None:
        if not kind.startswith("tensordesc<") or block is None or block["fp4_padded"]:
            raise RuntimeError(f"a kernel takes an argument of the kind {kind}")
        self.rank, self._block = len(block["block_size"]), block

    def __call__(self, descriptor: Any) -> tuple:
        block, shape, strides = self._block, descriptor.shape, descriptor.strides
        dtype = MAP_DTYPES.get(block["elem_type"], block["elem_type"])
        address = _address(descriptor.base)
        made = cuda_driver.tensor_map(
            address, dtype, block["elem_size"], block["swizzle"], shape, strides, block["block_size"]
        )
        return made, *shape, *strides


def _scratch(metadata: Any) -> int:
    """How many pointers to memory of Triton's own follow; this kernel needs none of it, and takes zeros."""
    sizes = [getattr(metadata, name) for name in metadata._fields if name.endswith("_scratch_size")]
    if any(sizes) or getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "launch_cooperative_grid", False):
        raise RuntimeError(f"{metadata.name} needs what only Triton's own launcher gives")
    return len(sizes)
