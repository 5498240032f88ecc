"""Whether all parts of a model are as they were, in half the time that it takes to find out what changed.

Most looks see no change, and each prompt waits for one. So a part's attributes are compared as a whole: their names,
the types of their values, the plain values, and by identity what may be called. Holds no part and no function.
"""

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import nn


class PartsSeen:
    """What the parts of a model looked like. is_plain, is_code: which values are compared, and which by identity.

    but: attributes that do not matter. lists: those whose items matter. tables: those whose values do.
    """

    def __init__(
        self, parts: Iterable[nn.Module], is_plain: Callable[[Any], bool], is_code: Callable[[Any], bool],
        but: Collection[str], lists: Sequence[str], tables: Sequence[str],
    ) -> None:  # fmt: skip
        self._seen = [_Part(part, is_plain, is_code, but, lists, tables) for part in parts]

    def fits(self, parts: Sequence[nn.Module]) -> bool:
        """Whether these are the same parts, unchanged. False says little: what changed may not matter."""
        return len(parts) == len(self._seen) and all(map(_Part.fits, self._seen, parts))


class _Part:
    """What one part looked like."""

    __slots__ = ("part", "kind", "names", "types", "get", "values", "code", "lists", "tables", "all_tables")

    def __init__(
        self, part: nn.Module, is_plain: Callable[[Any], bool], is_code: Callable[[Any], bool], but: Collection[str],
        lists: Sequence[str], tables: Sequence[str],
    ) -> None:  # fmt: skip
        own = part.__dict__
        self.part, self.kind = weakref.ref(part), type(part)
        self.names, self.types = tuple(own), tuple(map(type, own.values()))
        plain = [name for name, value in own.items() if name not in but and is_plain(value)]
        self.get = operator.itemgetter(*plain) if plain else None
        self.values = self.get(own) if plain else None
        self.lists = [(name, _refs(own[name])) for name in lists if name in own]
        self.all_tables = operator.itemgetter(*tables)
        self.tables = [_refs(table.values()) for table in self.all_tables(own)] if any(self.all_tables(own)) else None
        others = [(name, value) for name, value in own.items() if name not in but and name not in lists]
        self.code = [(name, *_refs([value])) for name, value in others if not is_plain(value) and is_code(value)]

    def fits(self, part: nn.Module) -> bool:
        own = part.__dict__
        return (
            self.part() is part
            and type(part) is self.kind
            and tuple(own) == self.names
            and tuple(map(type, own.values())) == self.types
            and (self.get is None or self.get(own) == self.values)
            and (not any(self.all_tables(own)) if self.tables is None else self._tables_fit(own))
            and (not self.lists or all([_same(refs, own[name]) for name, refs in self.lists]))
            and (not self.code or all([ref() is own[name] for name, ref in self.code]))
        )

    def _tables_fit(self, own: dict[str, Any]) -> bool:
        return all(_same(refs, table.values()) for refs, table in zip(self.tables, self.all_tables(own), strict=True))


def _refs(values: Iterable[Any]) -> list[Callable[[], Any]]:
    return [kept(value) for value in values]


def _same(refs: list[Callable[[], Any]], values: Collection[Any]) -> bool:
    if not refs:
        return not values
    return len(refs) == len(values) and all(ref() is value for ref, value in zip(refs, values, strict=True))


def kept(value: Any) -> Callable[[], Any]:
    """What gives ``value`` as long as it lives, so that nothing new at its address is taken for it."""
    try:
        return weakref.ref(value)
    except TypeError:  # a property and its kin: small, and of no module
        return lambda: value
