"""Functions and classes that a model's code names, wherever they are, so that one in another's place is seen.

A pack may put its own function in place of one that models call: ``optimized_attention`` of a model's module, a rotary
embedding, ``torch.nn.functional.scaled_dot_product_attention``. What was recorded then holds the old one.

A pack may also make such a function again at each step (RadialAttn), of the same code and of the same things. That is
no change here. Whoever compares what lies in those things has to look at the function that is there now: see ``turns``.
"""

import functools
import operator
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from .origin import KNOWN, is_beside_comfyui, is_known, origin
from .tape.code_names import is_library, names_of
from .tape.identity import EQUAL, Same, kept
from .tape.looks import Looks
from .tape.swaps import contents

NAMED = (types.FunctionType, types.BuiltinFunctionType, type)
DEEP = 4  # modules within modules that code names: torch.nn.functional
MOST_STATES = 8  # a pack puts its attention in place, and takes it away again
MOST_NEW = 4  # contents in one run: each costs recordings
LIBRARY = "torch"  # whose functions are noted where models name them, and not followed


class FunctionsRead:
    """What the methods of ``kinds`` name, and the functions that these call. Holds them only where ``hold`` said so.

    functions: more of them, to begin with.
    """

    def __init__(self, kinds: Iterable[type], functions: Sequence[types.FunctionType] = ()) -> None:
        self._found: dict[tuple[int, str], dict[str, Any]] = {}
        self._codes: set[types.CodeType] = set()  # of all that was followed
        kinds = list(kinds)
        own = [kind for kind in kinds if _top(kind) != LIBRARY]
        theirs = [vars(kind)["forward"] for kind in kinds if _top(kind) == LIBRARY and "forward" in vars(kind)]
        methods = [value for kind in own for value in vars(kind).values()]
        self._follow([*methods, *theirs, *functions], {_top(each) for each in (*own, *functions)} | KNOWN)
        self._places = [(there, name) for (_, name), there in self._found.items()]
        self._dicts, self._names = [there for there, _ in self._places], [name for _, name in self._places]
        del self._found
        now = self._now()
        self._states = {0: (list(map(kept, now)), list(map(_made_of, now)))}
        self._number = 0
        self.turns = 0  # how often a function stood there that was made as the one before was
        self._held: tuple[int, list[Any]] | None = None  # a state's number, and what it is of
        self._contents: list[tuple[int, tuple]] = []  # (number, states) of what lay in functions, the latest last
        self._new = 0  # of those, since ``release``
        self.latest = ""  # of those that are another than before: the name of the first

    def state(self) -> int:
        """A number for what they are now: the same as long as they are the same, and when they are so again."""
        held = self._held  # another thread may let go of it
        if held is not None and all(map(operator.is_, held[1], map(dict.get, self._dicts, self._names))):
            return held[0]
        now = self._now()
        number = self._number_of(now)
        if held is not None:
            self._held = number, now
        return number

    def holds(self) -> bool:
        """Whether they are what they were at the last look. Remembers nothing: what a patch puts there goes again."""
        held = self._held
        if held is not None:
            return all(map(operator.is_, held[1], map(dict.get, self._dicts, self._names)))
        return all([seen() is value for seen, value in zip(self._states[self._number][0], self._now(), strict=True)])

    def hold(self) -> None:
        """Holds what there is until ``release``, so that later looks take a third of the time."""
        now = self._now()
        self._held = self._number_of(now), now

    def release(self) -> None:
        """Lets go of it."""
        self._held, self._new = None, 0

    def _now(self) -> list[Any]:
        return list(map(dict.get, self._dicts, self._names))

    def _number_of(self, now: list[Any]) -> int:
        other = self._other(self._number, now)
        if other is None:
            return self._number
        there, name = self._places[other]
        self.latest = f"{there.get('__name__')}.{name}"
        for number in self._states:
            if self._other(number, now) is None:
                self._number = number
                return number
        self._number = max(self._states) + 1
        self._states[self._number] = list(map(kept, now)), list(map(_made_of, now))
        if len(self._states) > MOST_STATES:
            del self._states[min(self._states)]
        return self._number

    def _other(self, number: int, now: list[Any]) -> int | None:
        """The first place where something else is than in this state; None if there is none."""
        seen, made = self._states[number]
        new = [place for place, (each, value) in enumerate(zip(seen, now, strict=True)) if each() is not value]
        for place in new:
            if made[place] is None or made[place] != _made_of(now[place]):
                return place
        for place in new:
            seen[place] = kept(now[place])
        self.turns += bool(new)
        return None

    def brought(self) -> list[tuple[str, Any]]:
        """(its name, it) of what another pack has put into a module of ComfyUI's or torch's."""
        found = [(f"{there.get('__name__')}.{name}", there.get(name)) for there, name in self._places]
        known = [(name, now) for name, now in found if name.partition(".")[0] in KNOWN]
        others = [(name, now) for name, now in known if not is_known(now) and not is_library(origin(now))]
        return [(name, now) for name, now in others if not is_beside_comfyui(origin(now))]

    def content(self, looks: Looks, module: nn.Module, others: Sequence[Any] = ()) -> int | None:
        """A number for what lies in those functions, and in what they can see: the same as long as it is the same.

        None if that cannot be known, or is something else too often. others: more code of other packs.
        """
        values = [*[value for _, value in self.brought()], *others]
        states = looks.at(values, module) if values else ()
        if None in states:
            return None
        for number, known in self._contents:
            if known == states:
                return number
        self._new += 1
        if self._new > MOST_NEW:
            return None
        number = self._contents[-1][0] + 1 if self._contents else 0
        self._contents.append((number, states))
        del self._contents[:-MOST_STATES]
        return number

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """What the code of these methods and functions names: globals, attributes, words."""
        return frozenset().union(*map(names_of, self._codes))

    def _follow(self, left: list[Any], packages: set[str]) -> None:
        """Goes through these functions, and through those that they call in the same packages."""
        while left:
            for function in _functions(left.pop()):
                if function.__code__ not in self._codes:
                    self._codes.add(function.__code__)
                    left += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
                    left += self._named(function.__globals__, names_of(function.__code__), packages, DEEP)

    def _named(self, there: dict[str, Any], names: frozenset[str], packages: set[str], deep: int) -> Iterator[Any]:
        """Notes what ``names`` stand for there; those that are to be followed."""
        for name in names & there.keys():
            value = there[name]
            if isinstance(value, types.ModuleType):
                if deep and vars(value) is not there:
                    yield from self._named(vars(value), names, packages, deep - 1)
            elif _is_function(value) and (id(there), name) not in self._found:
                self._found[id(there), name] = there
                if isinstance(value, types.FunctionType) and _top(value) in packages and _top(value) != LIBRARY:
                    yield value


def _top(value: Any) -> str:
    return (value.__module__ or "").partition(".")[0]


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions in a class's attribute."""
    if isinstance(value, property):
        yield from (each for each in (value.fget, value.fset) if isinstance(each, types.FunctionType))
        return
    value = value.func if isinstance(value, functools.partial) else getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        yield value


def _is_function(value: Any) -> bool:
    """Whether it counts as a function that code names: not what ComfyUI's program puts there in each prompt."""
    return isinstance(value, NAMED) or (callable(value) and not is_beside_comfyui(origin(value)))


def _made_of(value: Any) -> tuple | None:
    """What a function was made of: two of the same do the same while what they hold is as it was. None: not known.

    Values that cannot change are compared by value, all else by identity. What that would have to keep alive, a list
    say, makes it None.
    """
    if type(value) is functools.partial:
        own, found = (functools.partial, len(value.args)), [value.func, *value.args]
        named = {**value.keywords, **vars(value)}
    elif type(value) is types.FunctionType and (held := contents(value)) is not None:
        defaults, keywords, *cells = held
        own, found = (Same(value.__code__), id(value.__globals__)), [defaults, *cells]
        named = {**(keywords or {}), **vars(value)}
    else:
        return None
    parts = [*map(_likeness, found), *map(_likeness, named.values())]
    return None if None in parts else (own, tuple(named), *parts)


def _likeness(item: Any) -> Any:
    """By what two things are told to be the same, without keeping one alive; None if that cannot be told."""
    if type(item) in EQUAL:
        return type(item), item
    if type(item) is tuple:
        parts = tuple(map(_likeness, item))
        return None if None in parts else parts
    return Same(item) if type(item).__weakrefoffset__ else None


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
