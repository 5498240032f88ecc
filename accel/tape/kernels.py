"""The generated kernels of this process: turns source text into something to launch, each text once."""

import math
import os
import threading
from collections.abc import Iterable, Sequence
from ctypes import c_float
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.from_text import module_of
from ..preparing import finished
from .codegen import Source
from .layout import copied
from .pointwise import module_text
from .values import LARGE, Value

ALIGNED = 16  # bytes; Triton would compile another variant for a pointer that is not
_LOCK = threading.Lock()
_FUNCTIONS: dict[str, Any] = {}  # by source text
_COMPILED: dict[tuple, Any] = {}  # variants by what they are for


def functions() -> list[Any]:
    """Every generated kernel of this process."""
    return list(_FUNCTIONS.values())


def function(text: str, name: str) -> Any:
    """The kernel ``name`` of this source."""
    with _LOCK:
        found = _FUNCTIONS.get(text)
        if found is None:
            found = _FUNCTIONS[text] = getattr(module_of(module_text(text, _interpreted()), name), name)
        return found


def _interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, on the CPU."""
    import triton

    knobs = getattr(triton, "knobs", None)  # not before Triton 3.4
    return knobs.runtime.interpret if knobs else os.environ.get("TRITON_INTERPRET") == "1"


@dataclass
class _Compiled:
    """The kernel that Triton compiled, for all launches that differ in their tensors alone; None in its interpreter."""

    variant: Any = None


class Launch:
    """One kernel of one program: what it reads and writes there, and the numbers of this size."""

    def __init__(self, source: Source) -> None:
        self.source, self.operands, self.outputs = source, source.operands, source.outputs
        self.function = function(source.text, source.name)
        self.numbers, self.grid = _numbers(source)
        from ..kernels import launch  # with Triton, which may be missing where nothing is fused

        self._launching, self._compiled = launch, _Compiled()

    def again(self, operands: tuple[Value, ...], outputs: tuple[Value, ...]) -> "Launch":
        """The same kernel with the same numbers on other values."""
        other = object.__new__(Launch)  # a program has a thousand of them, and copy.copy takes three times as long
        other.__dict__.update(self.__dict__)
        other.operands, other.outputs = operands, outputs
        return other

    @property
    def variant(self) -> tuple:
        """What Triton compiles a variant for: no number but for those that take 64 bits."""
        form = self.source.rows, self.source.columns, self.source.warps
        wide = tuple([type(n) is int and n >= LARGE for n in self.numbers])
        dtypes = tuple([value.dtype for value in self.operands])
        return self.source.text, form, dtypes, self.outputs[0].device, wide

    def find(self) -> bool:
        """Takes the variant that this launch needs, if this process has compiled it."""
        variant = self.variant
        self._compiled.variant = _COMPILED.get(variant)
        return variant in _COMPILED

    def compile(self) -> None:
        """Compiles the variant, and loads it. Raises ``KernelFailed``."""
        if not _interpreted():
            dtypes = [value.dtype for value in (*self.operands, *self.outputs)]
            self._compiled.variant = self._launching.compile_only(
                self.function, self.grid, *dtypes, *self.numbers, **self._options
            )
        with _LOCK:
            _COMPILED[self.variant] = self._compiled.variant

    @property
    def _options(self) -> dict[str, Any]:
        return {"num_warps": self.source.warps, "enable_fp_fusion": False}

    def __call__(self, operands: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Computes ``outputs``, which are there already, from ``operands``."""
        # a copy begins where vector loads want it
        operands = [x if x.data_ptr() % ALIGNED == 0 else copied(x, x.stride()) for x in operands]
        variant = self._compiled.variant
        if variant is None:
            self._launching.launch(self.function, self.grid, *operands, *outputs, *self.numbers, **self._options)
            return
        stream = torch._C._cuda_getCurrentRawStream(outputs[0].device.index)
        given = (*operands, *outputs, *self.numbers)
        self._launching.launch_compiled(self.function, variant, self.grid, given, stream)


def _numbers(source: Source) -> tuple[tuple[int | float, ...], tuple[int, int, int]]:
    """(the kernel's numbers, R and BC last; its grid)."""
    rows, column = math.prod(size.value for size in source.row_sizes), source.column_size
    parts = -(-column.value // source.columns)
    blocks = rows if source.tile else -(-rows // source.rows)
    numbers = [math.prod(size.value for size in sizes) for sizes in source.integers] + [rows]
    if not column.static:
        numbers.append(column.value)
    floats = [c_float(number).value for number in source.floats]  # one too large for 32 bits is infinite there
    return (*numbers, *floats, source.rows, source.columns), (blocks * parts, 1, 1)


def compile_all(launches: Iterable[Launch], device: torch.device) -> int:
    """Compiles new kernels among ``launches`` side by side. Returns how many. Raises ``KernelFailed``."""
    from ..kernels.launch import STARTED, compilers

    launches = list({id(launch._compiled): launch for launch in launches}.values())
    new: dict[tuple, Launch] = {}
    for launch in launches:
        if not launch.find():
            new.setdefault(launch.variant, launch)
    if device.type != "cuda":
        for launch in new.values():
            launch.compile()
    elif new:
        first, *others = new.values()
        with compilers(device) as pool:
            begun = [pool.submit(first.compile)]
            if not STARTED.is_set():  # Triton hashes its own sources for the first kernel of a process
                finished(begun)
            begun += [pool.submit(other.compile) for other in others]
            finished(begun)
            for done in begun:
                done.result()
    for launch in launches if new else ():
        launch.find()
    return len(new)
