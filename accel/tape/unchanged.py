"""What a look at other packs' code saw, as the objects themselves: whether they are still there is quickly said.

A look (``tape.state``) gives what can be compared and keeps nothing alive, and takes milliseconds. In a sampling run it
is taken before each forward. From the second on, it is enough that everything that can change still holds the same
objects. That keeps them alive, so it lasts for a run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from types import CellType, FunctionType
from typing import Any

from torch import Tensor
from torch.nn import Parameter

EMPTY = object()


class Unchanged:
    """Notes what holds others, while a look goes through it."""

    def __init__(self) -> None:
        self._mappings: list[tuple[Mapping, list, list]] = []
        self._sequences: list[tuple[Sequence, list]] = []
        self._named: list[tuple[Callable[[str], Any], tuple[str, ...], list]] = []
        self._functions: list[tuple[FunctionType, Any, Any, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._tensors: list[tuple[Tensor, tuple]] = []
        self._told = 0
        self._others: list[tuple[Callable[[], Any], Any]] = []

    def mapping(self, there: Mapping) -> None:
        """A dict, or a view of one."""
        self._mappings.append((there, [*there], [*there.values()]))

    def sequence(self, there: Sequence) -> None:
        """A list, or the like."""
        self._sequences.append((there, [*there]))

    def named(self, get: Callable[[str], Any], names: Iterable[str]) -> None:
        """What ``get`` gives for these names, and nothing else that lies beside."""
        names = tuple(names)
        self._named.append((get, names, [*map(get, names)]))

    def function(self, function: FunctionType) -> None:
        """Its code, its defaults, and what it has from where it was made."""
        self._functions.append((function, function.__code__, function.__defaults__, function.__kwdefaults__))
        self._cells += [(cell, _contents(cell)) for cell in function.__closure__ or ()]

    def tensor(self, tensor: Tensor) -> None:
        """Its form; another one's memory may have become its own."""
        self._tensors.append((tensor, form_of(tensor)))

    def new_tensors(self) -> list[Tensor]:
        """Those that it has noted since it was asked for them."""
        start, self._told = self._told, len(self._tensors)
        return [tensor for tensor, _ in self._tensors[start:]]

    def other(self, read: Callable[[], Any]) -> None:
        """Anything else, by comparing what ``read`` gives."""
        self._others.append((read, read()))

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        for there, keys, values in self._mappings:
            if len(there) != len(keys) or [*there] != keys or not all(map(is_, there.values(), values)):
                return False
        for there, items in self._sequences:
            if len(there) != len(items) or not all(map(is_, there, items)):
                return False
        for get, names, values in self._named:
            if not all(map(is_, map(get, names), values)):
                return False
        for function, code, defaults, named in self._functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            if function.__kwdefaults__ is not named:
                return False
        return (
            all(_contents(cell) is value for cell, value in self._cells)
            and all(form_of(tensor) == form for tensor, form in self._tensors)
            and all(read() == value for read, value in self._others)
        )


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def form_of(tensor: Tensor) -> tuple:
    """What a recording needs to know of a tensor that it reads at each replay."""
    address = tensor.data_ptr() if type(tensor) in (Tensor, Parameter) and tensor.device.type != "meta" else 0
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, address
