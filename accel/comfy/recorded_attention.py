"""Attention on a tape: torch's own as the operations that it is made of, any other as one call.

A model's attention is ComfyUI's choice at its start, or a function among the options. That may be another pack's, or
what ComfyUI's own node puts there to choose for one model: then it keeps nothing, and is called like ComfyUI's choice.
A layer's file may name one, too. Nothing among the options says so: it is called where the layer has it.
"""

import dis
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import comfy.ldm.modules.attention as attention
from torch import Tensor

from ..block_call import OPTIONS
from ..foreign import in_its_file
from ..origin import is_known
from ..reasons import say
from ..tape.called_patches import Played
from ..tape.identity import EQUAL
from ..tape.options import COPIED_ALONG, NotedOptions, Reads
from ..tape.patch_call import OVERRIDE
from ..tape.record import Recorder
from ..tape.swaps import contents
from ..tape.unplanned import without_plans
from .compat import preferences

# torch's attention is made of operations that a tape can hold; other backends may work past torch's dispatcher
OPEN_ATTENTION = {getattr(attention, "attention_pytorch", None)}
_CHOSEN: dict[tuple, FunctionType] = {}  # the first function of those that call the same: see ``settled``
_ANOTHERS: dict[Any, FunctionType] = {}  # the same of other packs'
MOST = 64  # of those
_HERE = threading.local()  # recorder: that of this thread's forward, where layers name their attention


def is_open() -> bool:
    """Whether attention is torch's, where no option names another."""
    return attention.optimized_attention in OPEN_ATTENTION


def is_anothers(chosen: Any) -> bool:
    """Whether the attention that an option names is another pack's, or wraps one; not if there is none."""
    return chosen is not None and not (_is_comfyuis(chosen) and all(map(_is_comfyuis, _held(chosen))))


def settled(options: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The options with one function for each attention: ComfyUI's node makes another each time that it runs."""
    chosen = options.get(OVERRIDE)
    if chosen is None:
        return options
    if not is_anothers(chosen):
        first = _CHOSEN.setdefault((chosen.__code__, *_held(chosen)), chosen)
    elif (key := _made_of(chosen)) is None:
        return options
    else:
        first = _ANOTHERS.get(key, chosen)
        if first is chosen or _made_of(first) != key:  # what it holds is something else by now
            first = _ANOTHERS[key] = chosen
            while len(_ANOTHERS) > MOST:
                del _ANOTHERS[next(iter(_ANOTHERS))]
    return options if first is chosen else {**options, OVERRIDE: first}


def _made_of(item: Any, depth: int = 4) -> Any:
    """What a function was made of: of two that were made by the same code of the same, either may be called.

    None if it may keep something: an object that it holds, or a name of where it was made that it gives another value.
    """
    if isinstance(item, EQUAL):
        return type(item), item
    plain = type(item) is FunctionType and item.__closure__ is None
    if plain or isinstance(item, (type, BuiltinFunctionType)) or _is_comfyuis(item):
        return item  # the key holds it
    held = contents(item) if type(item) is FunctionType and depth and not _rebinds(item.__code__) else None
    if held is None:
        return None
    defaults, named, *cells = held
    parts = [*(defaults or ()), *(named or {}).values(), *cells, *item.__dict__.values()]
    found = [_made_of(each, depth - 1) for each in parts]
    names = tuple(named or ()), tuple(item.__dict__)
    return None if None in found else (item.__code__, id(item.__globals__), names, *found)


@functools.lru_cache(maxsize=256)
def _rebinds(code: CodeType) -> bool:
    """Whether code, or code within it, gives another value to a name of where it was made."""
    stores = {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    return not stores.isdisjoint(code.co_freevars) or any(map(_rebinds, inside))


def _is_comfyuis(function: Any) -> bool:
    """Whether it is a function of ComfyUI's, by the file of its code: a wrapper may have another one's name."""
    return type(function) is FunctionType and is_known(function) and in_its_file(function, function)


def _held(function: FunctionType) -> list[Any]:
    """What it has from where it was made."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


@functools.lru_cache(maxsize=64)
def _with(chosen: Callable[..., Tensor], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``chosen`` in the place of ``function``; the same object each time, so that two recordings are alike."""
    return partial(chosen, function)


def prepare(options: NotedOptions, recorder: Recorder) -> None:
    """Attention that is not torch's own goes on the tape as one call, whatever it does inside; torch's as it runs."""
    foreign = options.get(OVERRIDE)  # noted: another one, another recording
    if foreign is None and (named := preferences(recorder.module)):  # which an override would put aside
        recorder.within = _noted(recorder, named)
        return
    if foreign is None and is_open():
        if recorder.turned:  # what the recorder hears it writes down as it would be, and what it does not is a copy
            options.hide(OVERRIDE, partial(_planning_little, recorder))
        return

    anothers = is_anothers(foreign)
    recorder.calls_packs = recorder.calls_packs or anothers

    def override(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        called = function
        if foreign is not None:
            called = partial(foreign, function) if anothers else _with(foreign, function)
        return _step(recorder, called, anothers, args, kwargs)

    options.hide(OVERRIDE, override)


def _step(
    recorder: Recorder, called: Callable[..., Tensor], anothers: bool, args: tuple, kwargs: dict[str, Any]
) -> Tensor:
    """What ``called`` gives, recorded as one call. anothers: it is another pack's, or wraps one."""
    given = kwargs.get(OPTIONS)
    if not isinstance(given, NotedOptions):  # a plain copy, whose every key was noted when it was made
        given = NotedOptions(given, _Copied(recorder)) if isinstance(given, dict) else None
    play = called
    if anothers:
        play = Played(called)
        recorder.played.append(play)
    keep = play.keep if isinstance(play, Played) else lambda out: out
    if given is None:
        return recorder.call(play, args, kwargs, lambda: keep(called(*args, **kwargs)))
    given = given.copy()
    given.hide(OVERRIDE)
    # what it read of the options, it gets at each replay; nothing else of them is kept
    later = {name: item for name, item in kwargs.items() if name != OPTIONS}
    seen: dict[Any, Any] = {}
    given.heard = seen
    return recorder.call(play, args, later | {OPTIONS: seen}, lambda: keep(called(*args, **later, **{OPTIONS: given})))


@contextmanager
def _noted(recorder: Recorder, named: list[Any]) -> Iterator[None]:
    """Within, an attention of ComfyUI's that a layer names is one call for ``recorder``: not torch's, which is open.

    Some of them start kernels past torch's dispatcher, to save memory between two halves of their work.
    """
    outer, put = getattr(_HERE, "recorder", None), []
    _HERE.recorder = recorder
    try:
        for layer in dict.fromkeys(named):
            own = vars(layer).get("function")
            base, before = (own.func, (own.args, (*own.keywords.items(),))) if type(own) is partial else (own, ((), ()))
            if _is_closed(base) and all(isinstance(item, EQUAL) for item in (*before[0], *dict(before[1]).values())):
                layer.function = _heard(base, *before)
                put.append((layer, own))
        yield
    finally:
        _HERE.recorder = outer
        for layer, own in put:
            layer.function = own


def _is_closed(function: Any) -> bool:
    """Whether it is an attention of ComfyUI's that is not torch's."""
    return function is not None and function not in OPEN_ATTENTION and not is_anothers(function)


@functools.lru_cache(maxsize=MOST)
def _heard(function: Callable[..., Tensor], before: tuple, named: tuple) -> Callable[..., Tensor]:
    """``function``, recorded as one call; the same object each time, so that layers with the same one stay alike."""
    called = partial(function, *before, **dict(named)) if before or named else function

    def hear(*args: Any, **kwargs: Any) -> Tensor:
        recorder = getattr(_HERE, "recorder", None)
        if recorder is None or recorder.is_deaf:
            return called(*args, **kwargs)
        # ComfyUI hands some of them their tensors in containers
        plain = [each if isinstance(each, Tensor) or not hasattr(each, "take") else each.take() for each in args]
        return _step(recorder, called, False, tuple(plain), kwargs)

    return hear


def _planning_little(recorder: Recorder, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Attention of a forward whose libraries plan as little as they can, see ``Recorder``."""
    return without_plans(function, *args, **kwargs) if recorder.is_deaf else function(*args, **kwargs)


class _Copied(Reads):
    """Reads of a plain copy of the options. What was copied along with the rest is no guard, so it must not be read."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.value)  # it must be one that we know
        self._recorder = recorder

    def note(self, key: Any, value: Any, used: bool = True, loose: bool = False) -> None:
        """As in ``Reads``."""
        if key in COPIED_ALONG:
            self._recorder.refuse(say("attention_option", option=repr(key)))
        super().note(key, value, used)
