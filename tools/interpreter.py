"""Triton's interpreter, in which kernels run where there is no GPU, without most of what it does in vain.

For tests and tools alone, in a process that interprets every kernel: it changes Triton's interpreter for good.
"""

import builtins
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch
from triton.runtime import interpreter

tl = interpreter.tl
LANGUAGE = (tl, tl.core)
MOST = 1 << 18  # elements of a program
PAIR = 8  # bytes of two numbers, which are read together where one may be the last of a tensor; a GPU's memory goes on


class _Kept:
    """In the place of a scope that puts ``triton.language`` back after a kernel."""

    def restore(self) -> None:
        """The next kernel needs the same again."""


class OutOfBounds(BaseException):
    """A kernel reads or writes beside its tensors. No Exception: without this kernel a model would run as well."""


def hasten() -> None:
    """Kernels run three times as fast, and round as on a GPU. Call it once, before the first of them runs."""
    # Each sum and product of integers is computed again in int64 and compared with the ends of int32, for an assertion
    # that the interpreter drops because it is not in debug mode.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _keep_language()
    _keep_shapes()
    _keep_dtypes()
    _keep_broadcasts()
    interpreter._convert_float = _rounding(interpreter._convert_float)


def watch() -> None:
    """Each read and write has to lie in a tensor that the kernel was given, or raises ``OutOfBounds``.

    On a GPU there may be no memory beside a tensor, and whoever touches it there ends the process.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    convert, call = interpreter._implicit_cvt, executor.__call__
    load, store = builder.create_masked_load, builder.create_masked_store
    memory: list[builtins.tuple[int, int]] = []
    names = [""]

    def converted(arg: Any) -> Any:
        tensor = getattr(arg, "base", arg)  # of a descriptor
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            start, size = storage.data_ptr(), -(-storage.nbytes() // PAIR) * PAIR
            # a table of addresses: the kernel reads what they name, too
            memory.append((0, 1 << 63) if tensor.dtype == torch.int64 else (start, start + size))
        return convert(arg)

    def called(self: Any, *args: Any, **kwargs: Any) -> None:
        memory.clear()
        names[0] = self.fn.__name__
        call(self, *args, **kwargs)

    def look(places: Any, mask: Any) -> None:
        addresses = places.data[numpy.broadcast_to(mask.data, places.data.shape).astype(bool)]
        if not addresses.size:
            return
        size = places.get_element_ty().primitive_bitwidth // 8
        first, end = int(addresses.min()), int(addresses.max()) + size
        if not any(start <= first and end <= stop for start, stop in memory):
            raise OutOfBounds(f"{names[0]} touches {first:#x} to {end:#x}; its tensors lie in {memory}")

    def loaded(self: Any, places: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        look(places, mask)
        return load(self, places, mask, *rest, **named)

    def stored(self: Any, places: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        look(places, mask)
        return store(self, places, value, mask, *rest, **named)

    interpreter._implicit_cvt, executor.__call__ = converted, called
    builder.create_masked_load, builder.create_masked_store = loaded, stored


def widen(kernels: ModuleType) -> None:
    """Generated kernels run as two programs of many rows, where a GPU has many of few: numpy takes them all at once.

    kernels: ``accel.tape.kernels``. Kernels whose programs are tiles stay as they are.
    """
    call = kernels.Launch.__call__

    def wide(self: Any, operands: Sequence[Any], outputs: Sequence[Any]) -> None:
        source = self.source
        if not source.tile:
            rows = math.prod(size.value for size in source.row_sizes)
            most = min(-(-rows // 2), MOST // source.columns)
            source = dataclasses.replace(source, rows=max(source.rows, 1 << (most - 1).bit_length()))
            self = copy.copy(self)
            self.source, (self.numbers, self.grid) = source, kernels._numbers(source)
        call(self, operands, outputs)

    kernels.Launch.__call__ = wide


def _keep_language() -> None:
    """Each launch, and each call of ``tl.sum`` or ``tl.cdiv`` in a kernel, replaces every function of the language by
    one that computes."""
    replace, kept, known = interpreter._patch_lang, _Kept(), set()

    def replace_once(function: FunctionType) -> _Kept:
        if function not in known:
            found = frozenset(id(thing) for thing in function.__globals__.values() if any(thing is m for m in LANGUAGE))
            if found not in known:
                replace(function)
            known.update((function, found))
        return kept

    interpreter._patch_lang = replace_once


def _keep_shapes() -> None:
    """Each value makes its shape again, an object for each number of it and one for each object's type."""
    core = tl.core
    blocks: dict[builtins.tuple, builtins.tuple] = {}  # by shape: (as a type has it, elements)
    values: dict[builtins.tuple, builtins.tuple] = {}  # by shape: (as a value has it, elements)
    names: dict[builtins.tuple, str] = {}

    def plain(shape: Iterable[Any]) -> builtins.tuple:
        return builtins.tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = plain(shape)
        if sizes not in blocks:
            first(self, element_ty, shape)  # with its checks
            blocks[sizes] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = blocks[sizes]
        key = sizes, element_ty.name
        if key not in names:
            names[key] = f"<{self.shape}, {element_ty}>"
        self.name = names[key]

    def make_value(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name for it
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = builtins.tuple(type.shape.values) if type.is_block() else ()
        if sizes not in values:
            values[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
        self.shape, self.numel = values[sizes]

    def same(self: Any, other: Any) -> Any:
        if isinstance(other, (core.tuple, list, builtins.tuple)):
            return core.constexpr(self.values == list(plain(other)))
        return compare(self, other)

    first, compare = core.block_type.__init__, core.tuple.__eq__
    core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__ = make_type, make_value, same


def _keep_dtypes() -> None:
    """Each load, store and cast makes a table of all dtypes, to look for one."""
    look_up, known = interpreter._get_np_dtype, {}

    def kept(dtype: Any) -> numpy.dtype:
        key = type(dtype), dtype.name
        if key not in known:
            known[key] = look_up(dtype)
        return known[key]

    interpreter._get_np_dtype = kept


def _keep_broadcasts() -> None:
    """Each operation of two values asks a dozen things about dtypes and shapes, most often of two that are alike."""
    semantic, core = interpreter.TritonSemantic, tl.core
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    wider = ("fp16", "bf16")  # which a quotient is computed wider than

    def checked(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> builtins.tuple:  # fmt: skip
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            kind = lhs.dtype
            if kind is rhs.dtype and type(kind) is core.dtype and not (div_or_mod and kind.name in wider):
                return joined(self, lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def joined(self: Any, lhs: Any, rhs: Any) -> builtins.tuple:
        if lhs.shape is rhs.shape:  # one object for each shape: see _keep_shapes
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = checked, joined


def _rounding(convert: Callable[..., numpy.ndarray]) -> Callable[..., numpy.ndarray]:
    """``convert``, with float32 to bfloat16 as a GPU does it: to the nearest, where the interpreter cuts off."""

    def rounded(data: numpy.ndarray, source: Any, target: Any, mode: Any) -> numpy.ndarray:
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
        if (source, target) == (tl.float32, tl.bfloat16) and mode != interpreter._ir.ROUNDING_MODE.RTZ:
            bits = numpy.ascontiguousarray(data).view(numpy.uint32)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return numpy.where(numpy.isnan(data), 0x7FC0, nearest).astype(numpy.uint16)
        return convert(data, source, target, mode)

    return rounded
