"""Triton's interpreter, in which kernels run where there is no GPU, without half of what it does in vain.

For tests and tools alone, in a process that interprets every kernel: it changes Triton's interpreter for good.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from triton.runtime import interpreter

tl = interpreter.tl
LANGUAGE = (tl, tl.core)


class _Kept:
    """In the place of a scope that puts ``triton.language`` back after a kernel."""

    def restore(self) -> None:
        """The next kernel needs the same again."""


def hasten() -> None:
    """Kernels run twice as fast, and round as on a GPU. Call it once, before the first of them runs."""
    # Each sum and product of integers is computed again in int64 and compared with the ends of int32, for an assertion
    # that the interpreter drops because it is not in debug mode.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    # Each launch, and each call of ``tl.sum`` or ``tl.cdiv`` in a kernel, replaces every function of the language by
    # one that computes.
    replace, kept, known = interpreter._patch_lang, _Kept(), set()

    def replace_once(function: FunctionType) -> _Kept:
        if function not in known:
            found = frozenset(id(thing) for thing in function.__globals__.values() if any(thing is m for m in LANGUAGE))
            if found not in known:
                replace(function)
            known.update((function, found))
        return kept

    interpreter._patch_lang = replace_once
    interpreter._convert_float = _rounding(interpreter._convert_float)


def _rounding(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """``convert``, with float32 to bfloat16 as a GPU does it: to the nearest, where the interpreter cuts off."""

    def rounded(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if (source, target) == (tl.float32, tl.bfloat16) and mode != interpreter._ir.ROUNDING_MODE.RTZ:
            bits = np.ascontiguousarray(data).view(np.uint32)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(data), 0x7FC0, nearest).astype(np.uint16)
        return convert(data, source, target, mode)

    return rounded
