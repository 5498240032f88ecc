"""Decisions by the noise level while a patch is recorded: the answers are guards, so the patch need not be called.

Many patches act in a range of noise levels alone: ``options["sigmas"][0].item() <= self.start``. While one is written
down it gets the tensor as a ``Level``, and a number read of it as a ``Number``. These answer comparisons and note how
each answer came about. A replay asks the same of the noise level that it has, read once per forward; where an answer
differs, another recording fits. Whatever else a patch does with the number itself (it scales with it, keeps it, prints
it) makes it a patch that must be called.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .noise_level import EXACT, FEW, KnownOnHost, to_cpu, writes

PLAIN = (int, float)
NONE: Mapping[str, Any] = types.MappingProxyType({})
ON_HOST = EXACT | {Tensor.div, Tensor.__truediv__, Tensor.__rtruediv__}
COMPARES = "__lt__ __le__ __gt__ __ge__ __eq__ __ne__".split()
COMPUTES = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ "
    "__mod__ __rmod__ __divmod__ __rdivmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __round__ __floor__ __ceil__ "
    "__trunc__"
).split()
FORMS = frozenset("__get__ size dim stride numel __len__ is_floating_point".split())  # what says nothing of numbers
DEEP = 4  # containers in one another that are searched for numbers that a patch has kept


class Step(NamedTuple):
    """One function of what came before, and of plain arguments."""

    func: Callable[..., Any]
    others: tuple
    named: Mapping[str, Any]

    def __call__(self, value: Any) -> Any:
        return self.func(value, *self.others, **self.named)


Path = tuple[Step, ...]  # from a tensor of the options, on the CPU


def followed(tensor: Tensor, path: Path) -> Any:
    """What comes of a tensor on the CPU."""
    value: Any = tensor
    for step in path:
        value = step(value)
    return value


class Decisions:
    """Those of one recording. found: by option, and by how they came about: (that, the answer).

    refuse: says that a number was used. unheard: its body's operations are not recorded. same: says that a tensor is
    another one.
    """

    def __init__(
        self, refuse: Callable[[], None], unheard: Callable[[], AbstractContextManager],
        same: Callable[[Tensor, Tensor], None],
    ) -> None:  # fmt: skip
        self.found: dict[Any, dict[str, tuple[Path, bool]]] = {}
        self.given = 0  # levels and numbers that patches got
        self._refuse, self.unheard, self.same, self._over = refuse, unheard, same, False

    def level(self, option: Any, tensor: Tensor) -> Tensor:
        """A tensor of the options as a patch gets it; large ones as they are."""
        if tensor.numel() > FEW:
            return tensor
        self.given += 1
        with self.unheard():
            host = tensor.detach().cpu().clone()
        return Level.made(tensor, host, _Source(self, option, ()))

    def note(self, source: "_Source", answer: bool) -> bool:
        """Notes an answer; it stays one where it was given."""
        if not self._over:
            self.found.setdefault(source.option, {})[repr(source.path)] = source.path, answer
        return answer

    def used(self) -> None:
        """A number itself was used."""
        if not self._over:
            self._refuse()

    def end(self) -> None:
        """From now on numbers are just numbers."""
        self._over = True


class _Source(NamedTuple):
    """Where a number is from."""

    log: Decisions
    option: Any
    path: Path

    def then(self, func: Callable[..., Any], others: Sequence[Any] = (), named: Mapping[str, Any] = NONE) -> "_Source":
        return self._replace(path=(*self.path, Step(func, tuple(others), named)))


class Level(KnownOnHost):
    """A tensor of the options, or what follows from it, whose numbers on the CPU are known."""

    _numbers: Tensor
    _source: _Source
    _on_host: bool  # the patch has moved it there

    @classmethod
    def made(cls, tensor: Tensor, numbers: Tensor, source: _Source, on_host: bool = False) -> "Level":
        """numbers: its own, as a plain tensor on the CPU."""
        with source.log.unheard():
            level = tensor.as_subclass(cls)
        if not on_host:  # a recorder refuses what comes of one there
            source.log.same(level, tensor)
        level._numbers, level._source, level._on_host = numbers, source, on_host
        return level

    def answer(self, func: Callable[..., Any], others: list[Any], kwargs: dict[str, Any]) -> Any:
        """What is decided, which is noted; a number, or another level."""
        log = self._source.log
        moves = func is Tensor.cpu or (func is Tensor.to and to_cpu(others, kwargs))
        reads = func is Tensor.__bool__ or (func is Tensor.item and not others)
        if not (moves or reads or func in (ON_HOST if self._on_host else EXACT)):
            return None
        source = self._source.then(func, others, kwargs)
        with log.unheard():
            after = source.path[-1](self._numbers)
            if reads:
                return _read(after, source)
            if not isinstance(after, Tensor):  # the largest along a dimension, and where it is
                return None
            if moves or self._on_host:
                return Level.made(after.clone(), after, source, on_host=True)
        with torch._C.DisableTorchFunctionSubclass():
            return Level.made(func(self, *others, **kwargs), after, source)

    def noted(self, func: Callable[..., Any], kwargs: dict[str, Any], out: Any) -> None:
        """A tensor that computes with it on its device is any tensor; all else has used its numbers."""
        is_form = func.__name__ in FORMS and not isinstance(out, Tensor)
        if writes(func, kwargs) or func in _READS or (self._on_host and not is_form):
            self._source.log.used()


def _read(value: Any, source: _Source) -> Any:
    """A number as a patch gets it."""
    if type(value) is bool:
        return source.log.note(source, value)
    if type(value) is not float:
        source.log.used()
        return value
    source.log.given += 1
    return Number(value, source)


class Number:
    """A number read of a ``Level``. No ``float``: torch would take that for a constant, and nobody would know."""

    __class__ = property(lambda self: float)  # what ``isinstance`` finds

    def __init__(self, value: float, source: _Source) -> None:
        self.value, self._source = value, source

    def exact(self, *_: Any) -> float:
        """The number itself, which is used."""
        self._source.log.used()
        return self.value

    def __float__(self) -> float:
        return self.exact()

    def __int__(self) -> int:
        return int(self.exact())

    def __bool__(self) -> bool:
        return self._source.log.note(self._source.then(bool), bool(self.value))

    def __hash__(self) -> int:
        return hash(self.exact())

    def __repr__(self) -> str:
        return repr(self.exact())

    def __format__(self, form: str) -> str:
        return format(self.exact(), form)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exact(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch computes with it."""
        args = tuple([item.exact() if type(item) is cls else item for item in args])
        kwargs = {name: item.exact() if type(item) is cls else item for name, item in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _operator(name: str) -> Callable[..., Any]:
    func = getattr(float, name)

    def operator(self: Number, *others: Any) -> Any:
        others = tuple([other.exact() if type(other) is Number else other for other in others])
        if not all(other is None or isinstance(other, PLAIN) for other in others):
            return NotImplemented
        source, out = self._source.then(func, others), func(self.value, *others)
        return out if out is NotImplemented else _read(out, source)

    return operator


for _name in (*COMPARES, *COMPUTES):
    setattr(Number, _name, _operator(_name))
_READS = frozenset(
    getattr(Tensor, name)
    for name in "item tolist numpy __array__ __float__ __int__ __index__ __format__ __repr__ __contains__".split()
)


def forget(holder: Any, deep: int = DEEP) -> None:
    """Puts plain numbers and tensors in place of those that code has kept, in attributes, containers and closures."""
    if isinstance(holder, types.MethodType):
        return forget(holder.__self__, deep)
    for cell in getattr(holder, "__closure__", None) or ():
        if isinstance(kept := cell.cell_contents, (Number, Level)):
            cell.cell_contents = _plain(kept)
        elif deep:
            forget(kept, deep - 1)
    table = holder if isinstance(holder, (dict, list)) else getattr(holder, "__dict__", {})
    if isinstance(holder, (torch.nn.Module, type, types.ModuleType)) or not isinstance(table, (dict, list)):
        return
    for key, kept in list(table.items() if isinstance(table, dict) else enumerate(table)):
        if isinstance(kept, (Number, Level)):
            table[key] = _plain(kept)
        elif deep:
            forget(kept, deep - 1)


def _plain(kept: "Number | Level") -> float | Tensor:
    return kept.as_subclass(Tensor) if isinstance(kept, Level) else kept.value
