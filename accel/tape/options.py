"""What a forward read of its options, and whether it would read the same now.

ComfyUI hands a dict of options down to every block (``transformer_options``). A recorded forward gets it as a dict that
notes what was read. What was read must be the same for a replay: plain values by equality, functions by identity.
Tensors are inputs of the tape.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

MISSING = object()
PLAIN = (int, float, str, bytes, bool, type(None), complex)
# Different in every run, and copied along with all the rest by code that does not look at them.
COPIED_ALONG = frozenset(("uuids", "sigmas", "sample_sigmas", "cond_or_uncond", "wrappers", "callbacks"))


class Reads:
    """What was read: values by key, and the tensors among them."""

    def __init__(self, on_tensor: Callable[[Tensor], None]) -> None:
        self.values: dict[Any, Any] = {}
        self._on_tensor = on_tensor

    def note(self, key: Any, value: Any) -> None:
        """``key`` was asked for, and ``value`` was there (or ``MISSING``)."""
        if key not in self.values:
            self.values[key] = value
            if isinstance(value, Tensor):
                self._on_tensor(value)


class NotedOptions(dict):
    """A dict that notes what is read of it; copies of it do too. What was written to it is its own affair."""

    def __init__(self, options: Mapping[Any, Any], reads: Reads, own: frozenset[Any] = frozenset()) -> None:
        super().__init__(options)
        self._reads, self._own, self._passing = reads, set(own), MISSING

    def _note(self, key: Any) -> None:
        if key in self._own or (key is self._passing and key in COPIED_ALONG):
            return
        self._reads.note(key, dict.get(self, key, MISSING))

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: D102
        self._note(key)
        return super().get(key, default)

    def __contains__(self, key: Any) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self._passing = key
            yield key
        self._passing = MISSING

    def keys(self) -> list[Any]:  # noqa: D102  (iterated by ``dict(options)`` and ``**options``)
        return _Passing(self, super().keys())

    def items(self) -> list[tuple[Any, Any]]:  # noqa: D102
        return [(key, self[key]) for key in self]

    def values(self) -> list[Any]:  # noqa: D102
        return [self[key] for key in self]

    def copy(self) -> "NotedOptions":  # noqa: D102
        return NotedOptions(dict(super().items()), self._reads, frozenset(self._own))

    __copy__ = copy

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own.add(key)
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:  # noqa: D102
        self._note(key)
        if not dict.__contains__(self, key):
            self._own.add(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:  # noqa: D102
        self._note(key)
        self._own.add(key)
        return super().pop(key, *default)

    def __delitem__(self, key: Any) -> None:
        self._own.add(key)
        super().__delitem__(key)

    def update(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class _Passing(list):
    """Keys in order; while they are gone through, the dict knows at which one."""

    def __init__(self, options: NotedOptions, keys: Any) -> None:
        super().__init__(keys)
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        return iter(self._options)


class Guards:
    """What a recording depends on besides its inputs."""

    def __init__(self, reads: Reads) -> None:
        values = reads.values
        self.tensors = [key for key, value in values.items() if isinstance(value, Tensor)]
        self._kept = {key: frozen(value) for key, value in values.items() if not isinstance(value, Tensor)}
        self._specs = {key: _spec(values[key]) for key in self.tensors}

    def differs(self, options: Mapping[Any, Any]) -> str:
        """The first option that is not as it was; "" if all are."""
        for key, spec in self._specs.items():
            if _spec(options.get(key)) != spec:
                return str(key)
        return next((str(key) for key, old in self._kept.items() if not _equal(old, options.get(key, MISSING))), "")


def frozen(value: Any) -> Any:
    """``value`` as something that can be compared later and keeps no model alive."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(frozen(item) for item in value)
    if isinstance(value, dict):
        return dict, tuple((key, frozen(item)) for key, item in dict.items(value))
    if isinstance(value, (set, frozenset)) and all(isinstance(item, PLAIN) for item in value):
        return type(value), frozenset(value)
    return _Same(value)


def _equal(old: Any, value: Any) -> bool:
    return old == frozen(value)


def _spec(value: Any) -> tuple | None:
    return (tuple(value.shape), value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else None


class _Same:
    """An object, by identity."""

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        function = getattr(value, "__func__", None)  # a bound method is made again at each access
        parts = (function, value.__self__) if function is not None else (value,)
        self._object = tuple(_reference(part) for part in parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or len(self._object) != len(other._object):
            return False
        pairs = [(mine(), theirs()) for mine, theirs in zip(self._object, other._object, strict=True)]
        return all(mine is theirs and mine is not None for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # numbers of other libraries, and their kin: small
        return lambda: value
