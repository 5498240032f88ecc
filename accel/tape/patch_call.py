"""One call of a patch by itself: what it is given, what it gave, and what it wrote into.

A patch gets copies of its tensors. Its arguments are noted as templates, which hold nothing but tensors and plain
values; so a replay can make them again.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .guards import at
from .identity import EQUAL, ids_in
from .layout import spread_out
from .options import COPIED_ALONG, MISSING, NotedOptions
from .overlaps import copies
from .refusals import Generators
from .swaps import swapped
from .this_forward import level_of
from .values import wrapped

KINDS = ("patches", "patches_replace")  # of the options: where other packs' patches are
OVERRIDE = "optimized_attention_override"
RAW = frozenset((*KINDS, OVERRIDE))  # options in whose place a recording has its own


class NotKnown(Exception):
    """Raised where a patch gets something that a replay could not give it."""


@dataclass(frozen=True)
class Options:
    """In the place of the options among a patch's arguments: ``names`` are the caller's, as they are at each replay."""

    names: tuple[Any, ...]


@dataclass(frozen=True)
class Part:
    """In the place of a part of the model."""

    part: "weakref.ref[nn.Module]"


class Owner(NamedTuple):
    """In the place of a patch that is a key of a dict: under it code keeps what is that patch's.

    place: of the patch in the options.
    """

    place: tuple

    @staticmethod
    def of(patch: Any) -> Any:
        """The object that a patch is a method of, or itself."""
        return getattr(patch, "__self__", patch)


class Owners:
    """The patches among a forward's options, where they are keys of dicts."""

    def __init__(self, raw: Mapping[Any, Any]) -> None:
        self._raw = raw
        self._places: dict[int, Owner] | None = None

    def key(self, name: Any) -> Any:
        """``name``, a key, or its ``Owner``. Raises ``NotKnown`` for other objects."""
        if isinstance(name, (*EQUAL, tuple)):
            return name
        if self._places is None:
            self._places = {}
            for kind in KINDS:
                wrapped(self._raw.get(kind), self._add, (kind,))
        if id(name) not in self._places:
            raise NotKnown(type(name).__name__)
        return self._places[id(name)]

    def form(self, name: Any) -> Any:
        """As ``key``; other objects as they are."""
        try:
            return self.key(name)
        except NotKnown:
            return name

    def _add(self, place: tuple, patch: Any) -> None:
        self._places.setdefault(id(Owner.of(patch)), Owner(place))


OPTIONS = object()  # the key of ``Options`` in a dict of what the model itself had written into them


def template(item: Any, raw: Mapping[Any, Any], parts: Callable[[nn.Module], bool], owners: Owners) -> Any:
    """``item``, an argument of a patch, in a form that holds nothing but tensors and plain values.

    raw: the caller's options. parts: whether a module is the model's. Raises ``NotKnown``.
    """
    if isinstance(item, (Tensor, *EQUAL)):
        return item
    if is_options(item, raw):
        theirs = [n for n in dict.keys(item) if n in raw and (n in RAW or dict.get(item, n) is raw[n])]
        own = {name: value for name, value in dict.items(item) if name not in theirs and name not in RAW}
        own = {name: template(value, {}, parts, owners) for name, value in own.items()}
        return {OPTIONS: Options(tuple(theirs))} | own
    if type(item) in (list, tuple):
        return type(item)([template(each, raw, parts, owners) for each in item])
    if type(item) is dict:
        return {owners.key(name): template(each, raw, parts, owners) for name, each in item.items()}
    if isinstance(item, nn.Module) and parts(item):
        return Part(weakref.ref(item))
    raise NotKnown(type(item).__name__)


def is_options(item: Any, raw: Mapping[Any, Any]) -> bool:
    """Whether ``item`` is the forward's options, or a copy of them. Blocks leave out the patches."""
    return isinstance(item, NotedOptions) or (type(item) is dict and bool(raw) and raw.keys() - RAW <= item.keys())


def options_in(item: Any, raw: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
    """The options among a patch's arguments, in the order in which ``perform`` makes them."""
    if is_options(item, raw):
        yield item
    elif type(item) in (list, tuple, dict):
        for each in item.values() if type(item) is dict else item:
            yield from options_in(each, raw)


def give_back(given: tuple, raw: Mapping[Any, Any], wrote: Sequence[dict[Any, Any] | None]) -> None:
    """Has the options among a patch's arguments say what the patch wrote into those that it was given.

    A dict or a list that lies there stays the same one: other options may have it, too.
    """
    for theirs, new in zip(options_in(given, raw), wrote, strict=False):
        for name, value in (new or {}).items():
            there = dict.get(theirs, name, MISSING)
            if name in RAW or there is value:
                continue
            if value is MISSING:
                theirs.pop(name, None)
            elif type(there) is type(value) is dict:
                there.clear()
                there.update(value)
            elif type(there) is type(value) is list:
                there[:] = value
            else:
                theirs[name] = value


class Echo(NamedTuple):
    """What a patch gave that is one of its tensors, the one of this ``number``, or a part of that; a copy of it.

    part: (stride of that tensor; shape, stride and first element of the part); None if it is all of it.
    """

    tensor: Tensor
    number: int
    part: tuple | None

    def of(self, original: Tensor) -> Tensor:
        """The same of the tensor of which the patch got a copy."""
        if self.part is None:
            return original
        whole, shape, stride, offset = self.part
        lies_so = original.stride() == whole
        return original.as_strided(shape, stride, original.storage_offset() + offset) if lies_so else self.tensor


@dataclass
class Done:
    """A call of a patch. tensors: each once, of the copies that it was given, of what it gave, and of what it wrote.

    written: the numbers of the copies that it wrote into. wrote: by each of the options that it was given, in order,
    what it changed there. fits: whether a tape may have that.
    """

    out: Any
    copies: list[Tensor]
    written: frozenset[int]
    echoes: list[Echo]
    tensors: list[Tensor]
    form: Any
    wrote: list[dict[Any, Any] | None] | None
    fits: bool = True
    drawn: Generators | None = None  # after it, where a forward in eager is to go on with them

    def apart(self) -> "Done":
        """The same with copies of its tensors: the program may write into those that it is given."""
        swap = {id(tensor): tensor.clone() for tensor in self.tensors}
        echoes = [echo._replace(tensor=swap[id(echo.tensor)]) for echo in self.echoes]
        copies = [swap[id(copy)] for copy in self.copies]
        out, wrote = swapped(self.out, swap), swapped(self.wrote, swap)
        return replace(self, out=out, wrote=wrote, copies=copies, echoes=echoes, tensors=list(swap.values()))

    def give_to(self, originals: Sequence[Tensor]) -> list[int]:
        """Writes what the patch wrote into its copies into their originals, and returns the numbers of those.

        All are compared first: an original may lie in another one, whose copy does not know what was written.
        """
        pairs = [(n, a, b) for n, (a, b) in enumerate(zip(originals, self.copies, strict=False)) if a.shape == b.shape]
        found = [pair for pair in pairs if pair[0] in self.written or not torch.equal(*pair[1:])]
        for _, original, copy in found:
            original.copy_(copy)
        return [number for number, *_ in found]


class _Filling:
    """A patch's arguments from their templates. given: the options that it gets, of which ``looks`` tell a change.

    own: what the forward itself had written into each of these.
    """

    def __init__(self, raw: Mapping[Any, Any], templates: tuple) -> None:
        self._raw, self.own = raw, []
        self._theirs = {name: level_of(item) if type(item) is Tensor else item for name, item in raw.items()}
        self.copies = copies(tensors_of_call(templates, frozenset()))
        self.given: list[dict[Any, Any]] = []
        self.looks: list[Callable[[], dict[Any, Any]]] = []

    def filled(self, item: Any) -> Any:
        """``item`` with copies of tensors, and with the caller's options where the template says so."""
        if isinstance(item, Tensor):
            return self.copies[id(item)]
        if type(item) is dict and OPTIONS in item:
            return self._options(item)
        if type(item) in (list, tuple):
            return type(item)([self.filled(each) for each in item])
        if type(item) is dict:
            return {self._key(name): self.filled(each) for name, each in item.items()}
        return item.part() if isinstance(item, Part) else item

    def _key(self, name: Any) -> Any:
        return Owner.of(at(self._raw, name.place)) if isinstance(name, Owner) else name

    def _options(self, item: dict[Any, Any]) -> dict[Any, Any]:
        theirs, own = self._theirs, {name: each for name, each in item.items() if name is not OPTIONS}
        options = {name: theirs[name] for name in item[OPTIONS].names if name in theirs}
        options |= {name: theirs[name] for name in COPIED_ALONG if name in theirs and name not in options}
        options |= {name: self.filled(value) for name, value in own.items()}
        self.looks.append(lambda: {key: ids_in(each) if key in own else id(each) for key, each in options.items()})
        self.given.append(options)
        self.own.append(own.keys())
        return options


def perform(patch: Callable[..., Any], args: Any, kwargs: Any, raw: Mapping[Any, Any]) -> Done:
    """Calls a patch with arguments made from their templates."""
    filling = _Filling(raw, (args, kwargs))
    args, kwargs = filling.filled(args), filling.filled(kwargs)
    mine, given, looks = list(filling.copies.values()), filling.given, filling.looks
    versions, before = [copy._version for copy in mine], [look() for look in looks]
    out = patch(*args, **kwargs)
    written = frozenset(n for n, copy in enumerate(mine) if copy._version != versions[n])
    wrote = [_changed(options, was, look()) for options, look, was in zip(given, looks, before, strict=True)]
    skipped, owners = set(map(id, given)), Owners(raw)
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in mine}
    copied = {id(tensor): number for number, tensor in enumerate(mine)}
    echoes: list[Echo] = []
    memory = {tensor.untyped_storage().data_ptr() for tensor in mine}
    shared = len(memory) < len(mine)
    swap: dict[int, Any] = {}
    for tensor in tensors_of_call((out, wrote), skipped):
        if id(tensor) in swap or (id(tensor) in tensors and id(tensor) not in copied):
            continue
        address, new = tensor.untyped_storage().data_ptr(), spread_out(tensor)
        if new is tensor and address in memory:  # what it was given, which it gives back at some steps alone, or a view
            new = tensor.clone()
            echoes += _echo(tensor, new, mine)
        if new is not tensor:
            swap[id(tensor)] = tensors[id(new)] = new
        else:
            memory.add(address)
            tensors[id(tensor)] = tensor
    if swap:
        out, wrote = swapped((out, wrote), swap | {id(options): options for options in given})
    numbers = {key: number for number, key in enumerate(tensors)}
    found = list(tensors.values())
    if shared:  # a tape has a value for each
        alone = {id(tensor): tensor.clone() for tensor in mine}
        mine, found = [alone[id(tensor)] for tensor in mine], [alone.get(id(tensor), tensor) for tensor in found]
    form = _form((out, wrote), numbers, skipped, owners), tuple([(tuple(t.shape), t.dtype, t.device) for t in found])
    fits = all(_may_write(new, own, owners) for new, own in zip(wrote, filling.own, strict=True))
    return Done(out, mine, written, echoes, found, form, wrote if any(wrote) else None, fits)


def _changed(options: Mapping[Any, Any], before: Mapping[Any, Any], now: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """What is another one in ``options`` than before, by two looks at them; ``MISSING`` for what is gone."""
    names = [name for name in {**before, **now} if before.get(name, MISSING) != now.get(name, MISSING)]
    return {name: options.get(name, MISSING) for name in names} or None


def _may_write(new: Mapping[Any, Any] | None, own: Set[Any], owners: Owners) -> bool:
    """Whether a tape may have it: it lies where the forward itself keeps something, and is of tensors and values."""
    try:
        template(dict(new or {}), {}, lambda part: False, owners)
    except NotKnown:
        return False
    return own >= (new or {}).keys()


def _echo(tensor: Tensor, new: Tensor, copies: Sequence[Tensor]) -> list[Echo]:
    """``new``, a copy of ``tensor``, as an echo, if that lies in one of the patch's tensors and in no other layout."""
    for number, copy in enumerate(copies):
        if tensor is copy:
            return [Echo(new, number, None)]
    for number, copy in enumerate(copies):
        if tensor.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr() and tensor.dtype == copy.dtype:
            first = tensor.storage_offset() - copy.storage_offset()
            part = copy.stride(), tuple(tensor.shape), tensor.stride(), first
            return [Echo(new, number, part)] if new.stride() == tensor.stride() else []
    return []


def tensors_of_call(out: Any, skipped: Set[int], raw: Mapping[Any, Any] | None = None) -> Iterator[Tensor]:
    """The tensors among a patch's arguments or results, in order. skipped: ids of options; raw: see ``is_options``."""
    if isinstance(out, Tensor):
        yield out
    elif id(out) not in skipped and not (raw is not None and is_options(out, raw)):
        items = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else ()
        for item in items:
            yield from tensors_of_call(item, skipped, raw)


def _form(out: Any, numbers: Mapping[int, int], skipped: set[int], owners: Owners) -> Any:
    """What must be the same at a replay: structure, plain values, which tensors are the same one."""
    if isinstance(out, Tensor):
        return "tensor", numbers.get(id(out))
    if isinstance(out, EQUAL):
        return type(out), out
    if id(out) not in skipped:
        if isinstance(out, (list, tuple)):
            return type(out), tuple([_form(each, numbers, skipped, owners) for each in out])
        if isinstance(out, dict):
            items = [(owners.form(name), _form(each, numbers, skipped, owners)) for name, each in out.items()]
            return dict, tuple(items)
    return type(out)
