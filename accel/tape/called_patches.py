"""Patches that are called in each forward: steps of a program that run another pack's Python.

A patch whose effect cannot be written down once and for all (it counts its calls, reads a number from the GPU, draws
random numbers) is called at each replay, in the order in which it was, with what it would be given in eager. What is
around it stays on the tape. A graph is in pieces then, with the calls between them.

It gets copies of its tensors: it may write into them or keep them, and a program's memory is not its to change. What it
wrote into a copy is the tensor from there on; of a tensor that lies in another one's memory (tokens of a picture among
all tokens) only if it did so in the recording. If it writes there at one call and not at another, or gives a result of
another form than when it was recorded, ``FormChanged`` ends the replay.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .identity import EQUAL, ids_in
from .layout import laid_out, spread_out
from .options import COPIED_ALONG, NotedOptions, at
from .pieces import Form, between, captured_here
from .refusals import Generators
from .swaps import swapped
from .this_forward import level_of, now
from .values import replaced, wrapped

KINDS = ("patches", "patches_replace")  # of the options: where other packs' patches are
OVERRIDE = "optimized_attention_override"
RAW = frozenset((*KINDS, OVERRIDE))  # options in whose place a recording has its own


class FormChanged(Exception):
    """Raised where a patch returns another form of result than in the recording. who: its code.

    place: where it is in the options. done: that call of it.
    """

    def __init__(self, who: Any, place: tuple = (), done: "Done | None" = None) -> None:
        super().__init__("a patch gave another form of result")
        self.who, self.place, self.done = who, place, done

    @property
    def name(self) -> str:
        """The patch's, as a user may know it."""
        return getattr(self.who, "co_name", None) or getattr(self.who, "__name__", "a patch")


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


OPTIONS = object()  # the key of ``Options`` in a dict of what the model itself had written into them


def template(item: Any, raw: Mapping[Any, Any], parts: Callable[[nn.Module], bool]) -> Any:
    """``item``, an argument of a patch, in a form that holds nothing but tensors and plain values.

    raw: the caller's options. parts: whether a module is the model's. Raises ``NotKnown``.
    """
    if isinstance(item, (Tensor, *EQUAL)):
        return item
    if is_options(item, raw):
        theirs = [n for n in dict.keys(item) if n in raw and (n in RAW or dict.get(item, n) is raw[n])]
        own = {name: value for name, value in dict.items(item) if name not in theirs and name not in RAW}
        own = {name: template(value, {}, parts) for name, value in own.items()}
        return {OPTIONS: Options(tuple(theirs))} | own
    if type(item) in (list, tuple):
        return type(item)([template(each, raw, parts) for each in item])
    if type(item) is dict and all(isinstance(name, (*EQUAL, tuple)) for name in item):
        return {name: template(each, raw, parts) for name, each in item.items()}
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
    """Has the options among a patch's arguments say what the patch wrote into those that it was given."""
    for theirs, new in zip(options_in(given, raw), wrote, strict=False):
        for name, value in (new or {}).items():
            if name not in RAW and dict.get(theirs, name) is not value:
                theirs[name] = value


@dataclass
class Done:
    """A call of a patch. tensors: each once, of the copies that it was given and of what it gave.

    written: the numbers of the copies that it wrote into. echoes: what it gave that is one of them, and its number.
    """

    out: Any
    copies: list[Tensor]
    written: frozenset[int]
    echoes: list[tuple[Tensor, int]]
    tensors: list[Tensor]
    form: Any
    wrote: list[dict[Any, Any] | None] | None  # the options that it was given, in order, where it changed them
    drawn: Generators | None = None  # after it, where a forward in eager is to go on with them

    def apart(self) -> "Done":
        """The same with copies of its tensors: the program may write into those that it is given."""
        swap = {id(tensor): tensor.clone() for tensor in self.tensors}
        echoes = [(swap[id(echo)], number) for echo, number in self.echoes]
        copies = [swap[id(copy)] for copy in self.copies]
        return replace(self, out=swapped(self.out, swap), copies=copies, echoes=echoes, tensors=list(swap.values()))

    def give_to(self, originals: Sequence[Tensor]) -> list[int]:
        """Writes what the patch wrote into its copies into their originals, and returns the numbers of those.

        All are compared first: an original may lie in another one, whose copy does not know what was written.
        """
        pairs = [(n, a, b) for n, (a, b) in enumerate(zip(originals, self.copies, strict=False)) if a.shape == b.shape]
        found = [pair for pair in pairs if pair[0] in self.written or not torch.equal(*pair[1:])]
        for _, original, copy in found:
            original.copy_(copy)
        return [number for number, *_ in found]


@dataclass
class LiveCall:
    """The function of a step that calls a patch. place: where that is in the options. name: as a user may know it."""

    place: tuple
    who: Any
    name: str
    form: Any = None
    forms: list[Form] = field(default_factory=list)  # of its tensors
    shared: frozenset[int] = frozenset()  # the numbers of the copies whose tensors lie in others' memory
    written: frozenset[int] = frozenset()  # of those, the ones that it wrote into
    recorded: list[Tensor] | None = None  # what it gave while it was recorded, until the program was checked
    lives = True  # it is kept whether its results are read or not

    def __call__(self, args: Any, kwargs: Any, wanted: Sequence[bool] | None = None) -> list[Tensor | None]:
        """The patch's tensors at a replay. wanted: which of them are read; None: all."""
        wanted = wanted or [True] * len(self.forms)
        if (graph := captured_here()) is not None:
            outs = [form.empty() if want else None for form, want in zip(self.forms, wanted, strict=True)]
            graph.cut(between(self._called, (args, kwargs), {}, outs))
            return outs
        given = zip(self._called(args, kwargs), self.forms, wanted, strict=True)
        return [laid_out(tensor, form.stride) if want else None for tensor, form, want in given]

    def _called(self, args: Any, kwargs: Any) -> list[Tensor]:
        this = now()
        if this.silent:
            return [form.empty().zero_() for form in self.forms]
        if this.playing and self.recorded is not None:
            return [tensor.clone() for tensor in self.recorded]
        done = perform(at(this.options, self.place), args, kwargs, this.options)
        this.log.append((self.place, done.apart() if this.keeps else None))
        if done.form != self.form or done.wrote is not None or done.written & self.shared != self.written:
            raise FormChanged(self.who, self.place, done)
        return done.tensors

    def record(self, done: Done) -> None:
        """Keeps what the call that is recorded gave."""
        self.form, self.forms = done.form, [Form.of(tensor) for tensor in done.tensors]
        self.recorded = [tensor.clone() for tensor in done.tensors]


class Played:
    """Another pack's function as a step, where nothing but its call is known. A recording's check does not call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._form: Form | None = None
        self.recorded: Tensor | None = None  # see ``LiveCall``

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, or the recorded one."""
        if (graph := captured_here()) is not None:
            out = self._form.empty()
            graph.cut(between(self._apart, args, kwargs, [out]))
            return out
        this = now()
        if this is not None and this.silent:
            return self._form.empty().zero_()
        if this is not None and this.playing and self.recorded is not None:
            return self.recorded.clone()
        return self._function(*args, **kwargs)

    def _apart(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Between two pieces of a graph. It gets copies: it may keep them, and a graph's memory is not its to read."""
        args, kwargs = replaced((args, kwargs), Tensor, torch.clone)
        out = self(*args, **kwargs)
        like = self._form
        if not isinstance(out, Tensor) or (out.shape, out.dtype, out.device) != (like.shape, like.dtype, like.device):
            raise FormChanged(self._function)
        return [out]

    def keep(self, out: Any) -> Any:
        """``out``, which the function gave while it was recorded."""
        if isinstance(out, Tensor):
            out = spread_out(out)
            self.recorded, self._form = out.clone(), Form.of(out)
        return out


BETWEEN = (LiveCall, Played)  # functions of steps that run between the pieces of a graph


class _Filling:
    """A patch's arguments from their templates. given: the options that it gets, of which ``looks`` tell a change."""

    def __init__(self, raw: Mapping[Any, Any]) -> None:
        self._theirs = {name: level_of(item) if type(item) is Tensor else item for name, item in raw.items()}
        self.copies: dict[int, Tensor] = {}
        self.given: list[dict[Any, Any]] = []
        self.looks: list[Callable[[], Any]] = []

    def filled(self, item: Any) -> Any:
        """``item`` with copies of tensors, and with the caller's options where the template says so."""
        if isinstance(item, Tensor):
            if id(item) not in self.copies:
                with torch.inference_mode(False), torch.no_grad():  # torch counts what is written into such a tensor
                    self.copies[id(item)] = item.clone()
            return self.copies[id(item)]
        if type(item) is dict and OPTIONS in item:
            return self._options(item)
        if type(item) in (list, tuple):
            return type(item)([self.filled(each) for each in item])
        if type(item) is dict:
            return {name: self.filled(each) for name, each in item.items()}
        return item.part() if isinstance(item, Part) else item

    def _options(self, item: dict[Any, Any]) -> dict[Any, Any]:
        theirs, own = self._theirs, {name: each for name, each in item.items() if name is not OPTIONS}
        options = {name: theirs[name] for name in item[OPTIONS].names if name in theirs}
        options |= {name: theirs[name] for name in COPIED_ALONG if name in theirs and name not in options}
        options |= {name: self.filled(value) for name, value in own.items()}
        self.looks.append(lambda: (list(map(id, options.values())), [ids_in(options.get(name)) for name in own]))
        self.given.append(options)
        return options


def perform(patch: Callable[..., Any], args: Any, kwargs: Any, raw: Mapping[Any, Any]) -> Done:
    """Calls a patch with arguments made from their templates."""
    filling = _Filling(raw)
    args, kwargs = filling.filled(args), filling.filled(kwargs)
    mine, given, looks = list(filling.copies.values()), filling.given, filling.looks
    versions, before = [copy._version for copy in mine], [look() for look in looks]
    out = patch(*args, **kwargs)
    written = frozenset(n for n, copy in enumerate(mine) if copy._version != versions[n])
    wrote = [options if look() != was else None for options, look, was in zip(given, looks, before, strict=True)]
    skipped = set(map(id, given))
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in mine}
    copied = {id(tensor): number for number, tensor in enumerate(mine)}
    echoes: list[tuple[Tensor, int]] = []
    memory = {tensor.untyped_storage().data_ptr() for tensor in mine}
    swap: dict[int, Any] = {}
    for tensor in _tensors(out, skipped):
        if id(tensor) in swap or (id(tensor) in tensors and id(tensor) not in copied):
            continue
        address, new = tensor.untyped_storage().data_ptr(), spread_out(tensor)
        if new is tensor and address in memory:  # what it was given, which it gives back at some steps alone, or a view
            new = tensor.clone()
            echoes += [(new, copied[id(tensor)])] if id(tensor) in copied else []
        if new is not tensor:
            swap[id(tensor)] = tensors[id(new)] = new
        else:
            memory.add(address)
            tensors[id(tensor)] = tensor
    out = swapped(out, swap | {id(options): options for options in given}) if swap else out
    numbers = {key: number for number, key in enumerate(tensors)}
    found = list(tensors.values())
    form = _form(out, numbers, skipped), tuple([(tuple(t.shape), t.dtype, t.device) for t in found])
    return Done(out, mine, written, echoes, found, form, wrote if any(each is not None for each in wrote) else None)


def replaying(options: Mapping[Any, Any], log: Sequence[tuple[tuple, Done | None]]) -> dict[Any, Any]:
    """``options`` for a forward in eager. Its first calls of patches that are called give what is in ``log``.

    log: by the patch's place; None: it is called. Patches that are written down are not in it.
    """
    left = list(log)

    def proxy(place: tuple, patch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done = left.pop(0)[1] if left and left[0][0] == place else None
            if done is None:
                return patch(*args, **kwargs)
            given = list({id(tensor): tensor for tensor in _tensors((args, kwargs), set(), options)}.values())
            done.give_to(given)
            if done.drawn is not None:
                done.drawn.restore()
            if done.wrote is not None:
                give_back((args, kwargs), options, done.wrote)
            return swapped(done.out, {id(echo): given[number] for echo, number in done.echoes if number < len(given)})

        return call

    return dict(options) | {kind: wrapped(options[kind], proxy, (kind,)) for kind in KINDS if options.get(kind)}


def _tensors(out: Any, skipped: Set[int], raw: Mapping[Any, Any] | None = None) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif id(out) not in skipped and not (raw is not None and is_options(out, raw)):
        items = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else ()
        for item in items:
            yield from _tensors(item, skipped, raw)


def _form(out: Any, numbers: Mapping[int, int], skipped: set[int]) -> Any:
    """What must be the same at a replay: structure, plain values, which tensors are the same one."""
    if isinstance(out, Tensor):
        return "tensor", numbers.get(id(out))
    if isinstance(out, EQUAL):
        return type(out), out
    if id(out) not in skipped:
        if isinstance(out, (list, tuple)):
            return type(out), tuple([_form(each, numbers, skipped) for each in out])
        if isinstance(out, dict):
            return dict, tuple([(name, _form(each, numbers, skipped)) for name, each in out.items()])
    return type(out)
