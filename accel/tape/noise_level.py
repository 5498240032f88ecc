"""The noise level as a number, for patches of other packs that are called: it is read from the GPU once per forward.

Such a patch decides by it in each of its calls (``options["sigmas"][0].item()``). Each reading waits until the GPU has
done all that it was given, so sixty of them keep it idle for longer than it works.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

FEW = 1024  # elements: of what is read whole
READS = frozenset(
    getattr(Tensor, name)
    for name in "cpu item tolist numpy __float__ __int__ __bool__ __index__ __format__ __repr__".split()
)
# What gives the same bits on the CPU. Not division: a GPU multiplies by the inverse of a number.
EXACT = frozenset(
    getattr(Tensor, name)
    for name in (
        "detach clone flatten squeeze float double max min mul neg abs lt le gt ge eq ne __getitem__ "
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __neg__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__"
    ).split()
)


class _Source:
    """What several ``NoiseLevel`` are made of. changed: in place, so that numbers that were read say nothing."""

    changed = False


class KnownOnHost(Tensor):
    """A tensor whose numbers are known on the CPU: a function of it alone may be answered there."""

    def answer(self, func: Callable[..., Any], others: list[Any], kwargs: dict[str, Any]) -> Any:
        """What a function of torch's gives of it and of plain arguments; None if that is to be computed."""

    def noted(self, func: Callable[..., Any], kwargs: dict[str, Any], out: Any) -> None:
        """A function has computed with it, as with any tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """An answer, or what is computed."""
        kwargs = kwargs or {}
        first, *others = args or (None,)
        if type(first) is cls and is_plain([*others, *kwargs.values()]):
            answer = first.answer(func, others, kwargs)
            if answer is not None:
                return answer
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        for item in found_in((args, kwargs), cls):
            item.noted(func, kwargs, out)
        return out


class NoiseLevel(KnownOnHost):
    """A tensor of a GPU whose numbers, and what follows from them, are read once."""

    _host: Callable[[], Tensor]
    _source: _Source

    @classmethod
    def of(cls, tensor: Tensor) -> Tensor:
        """``tensor`` itself, in the same memory; as it is if it is large or on a CPU."""
        return cls.made(tensor, _Source(), tensor.cpu) if tensor.is_cuda and tensor.numel() <= FEW else tensor

    def on_host(self) -> Tensor:
        """Its numbers, as a plain tensor."""
        return self._host()

    @classmethod
    def made(cls, tensor: Tensor, source: _Source, host: Callable[[], Tensor]) -> "NoiseLevel":
        """host: gives its numbers on the CPU; it is called once, and only if they are read."""
        read: list[Tensor] = []

        def once() -> Tensor:
            if not read:
                read.append(host())
            return read[0]

        level = tensor.as_subclass(cls)
        level._host, level._source = once, source
        return level

    def answer(self, func: Callable[..., Any], others: list[Any], kwargs: dict[str, Any]) -> Any:
        """Reads on the CPU; what follows from it is one, too."""
        if self._source.changed:
            return None
        if func in READS or (func is Tensor.to and to_cpu(others, kwargs)):
            return func(self._host().clone(), *others, **kwargs)  # the patch may write into it
        if func not in EXACT:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            out = func(self, *others, **kwargs)
        if not isinstance(out, Tensor):
            return out
        return self.made(out, self._source, lambda: func(self._host(), *others, **kwargs))

    def noted(self, func: Callable[..., Any], kwargs: dict[str, Any], out: Any) -> None:
        """Whether it was written into."""
        self._source.changed |= writes(func, kwargs)


def is_plain(item: Any) -> bool:
    """Whether an argument of a function of torch's is the same in each forward, and on each device."""
    if isinstance(item, (tuple, list)):
        return all(map(is_plain, item))
    if isinstance(item, slice):
        return is_plain((item.start, item.stop, item.step))
    plain = (int, float, str, torch.dtype, torch.device, torch.memory_format)
    return item is None or item is Ellipsis or (isinstance(item, plain) and issubclass(type(item), plain))


def found_in(item: Any, kind: type) -> Iterator[Any]:
    """What is of this kind among arguments, within lists of tensors too."""
    if type(item) is kind:
        yield item
    elif isinstance(item, (tuple, list, dict)):
        for each in item.values() if isinstance(item, dict) else item:
            yield from found_in(each, kind)


def writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch's writes into its arguments."""
    name = func.__name__
    return "out" in kwargs or name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def to_cpu(others: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether ``Tensor.to`` with these arguments goes to the CPU."""
    device = next((item for item in (*others, *kwargs.values()) if isinstance(item, (str, torch.device))), None)
    return device is not None and torch.device(device).type == "cpu"
