"""A CUDA graph in pieces: between two of them runs what no graph can hold, another pack's Python, at each replay.

During the capture such a call ends one piece and begins the next (*piecewise graphs*, as inference servers have them
around attention). What a piece makes for a later one stays where it is: all pieces share the graphs' pool, and nothing
in it is used for another tensor before the capture lets go of the one that lies there. So the order of the replay is
the order of the capture, and *nothing else of the pool may run between two pieces*.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .values import once_each, replaced

EMPTY = "The CUDA Graph is empty"  # torch's warning about a piece without a kernel: two calls in a row
_HERE = threading.local()


class Form(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """The form of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Any tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Memory:
    """Where a tensor of a capture lies. The tensor itself would keep the pool from using the memory again."""

    def __init__(self, tensor: Tensor) -> None:
        self._form, self._address = Form.of(tensor), tensor.data_ptr()
        self._tensor = None if tensor.is_cuda and tensor.numel() else tensor.detach()  # another tensor, as on a GPU

    def tensor(self) -> Tensor:
        """What lies there now. Until the piece before has run once, there may be nothing."""
        if self._tensor is None:
            shape, stride, dtype, device = self._form
            size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            raw = torch.as_tensor(_Raw(self._address, size * dtype.itemsize), device=device)
            self._tensor = raw.view(dtype).as_strided(shape, stride)
        return self._tensor

    def write(self, tensor: Tensor) -> None:
        """Copies a tensor there, of this form but for where its elements lie."""
        self.tensor().copy_(tensor)


def between(
    call: Callable[..., list[Tensor]], args: tuple, kwargs: dict[str, Any], outs: Sequence[Tensor | None]
) -> Callable[[], None]:
    """For ``Pieces.cut``: ``call`` gets what the arguments of the capture are then, and its results go into ``outs``.

    A call must not write into what it is given, and not keep it.
    """
    places = replaced((args, kwargs), Tensor, once_each(Memory))
    into = [None if out is None else Memory(out) for out in outs]

    def run() -> None:
        with torch.inference_mode():  # as in ``Program.run``
            args, kwargs = replaced(places, Memory, Memory.tensor)
            for memory, tensor in zip(into, call(*args, **kwargs), strict=True):
                if memory is not None:
                    memory.write(tensor)

    return run


class _Raw:
    """Bytes of a GPU, for torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = dict(shape=(size,), typestr="|u1", data=(address, False), version=3)


class Pieces:
    """Has the methods of ``torch.cuda.CUDAGraph`` that a capture needs. Without a call that cuts it, it is one.

    new: makes a graph.
    """

    def __init__(self, new: Callable[[], Any] = torch.cuda.CUDAGraph) -> None:
        self._new = new
        self._graphs: list[Any] = []
        self._calls: list[Callable[[], None]] = []
        self._how: dict[str, Any] = {}
        self._is_open = False  # a piece is being captured

    def __len__(self) -> int:
        return len(self._graphs)

    def capture_begin(self, **how: Any) -> None:
        """Begins the first piece. how: as torch has it."""
        self._how, _HERE.graph = how, self
        self._begin()

    def cut(self, call: Callable[[], None]) -> None:
        """Ends this piece and begins the next; in each replay ``call`` is called between them."""
        self._end()
        self._calls.append(call)
        self._begin()

    def capture_end(self) -> None:
        """Ends the last piece.

        One whose end has failed is over: another end would be refused, and with torch 2.15 that error meets whoever
        allocates next.
        """
        _HERE.graph = None
        if self._is_open:
            self._end()

    def replay(self) -> None:
        """Runs all of it on the current stream. What a call between two pieces raises ends it."""
        for graph, call in zip_longest(self._graphs, self._calls):
            graph.replay()
            if call is not None:
                call()

    def reset(self) -> None:
        """Lets go of the memory of all pieces."""
        for graph in self._graphs:
            graph.reset()

    def _begin(self) -> None:
        self._graphs.append(self._new())
        self._graphs[-1].capture_begin(**self._how)
        self._is_open = True

    def _end(self) -> None:
        self._is_open = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", EMPTY)
            self._graphs[-1].capture_end()


def captured_here() -> Pieces | None:
    """The graph that this thread captures now."""
    return getattr(_HERE, "graph", None)
