"""Other packs' code in a model: hooks, functions and classes in place of ComfyUI's own."""

import sys
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .fingerprint import global_hooks, objects_of, shown
from .functions_read import FunctionsRead
from .origin import is_beside_comfyui, is_known, is_of_known, origin, whose
from .parts_seen import FORWARDS
from .reasons import say
from .tape.code_names import is_library, names_of
from .tape.named_tensors import classes_of, modules_of, parts_of
from .tape.options import NotedOptions, Reads
from .tape.record import Recorder
from .tape.state import CONTAINERS, DICTS, HELD, OF_MODULES, State, is_held, look_at
from .tape.unchanged import Unchanged

BUILT_IN = ("scaled_dot_product_attention", "linear", "gelu", "conv1d", "conv2d", "conv3d")  # not in Python
METHODS = (staticmethod, classmethod, property)


def foreign_method(kind: type) -> str:
    """A method of this class, or of a base, that another pack put there, and whose it is; "" if all are its own.

    That is told by the file of its code, so it does not matter who came first.
    """
    return next((name for base in kind.__mro__ for name, _ in _brought_into_class(base)), "")


def _brought_into_class(kind: type) -> Iterator[tuple[str, Any]]:
    """(its name and whose it is, it) of each method of a class that another pack put there."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    for name, method in list(vars(kind).items()):
        if type(method) is types.FunctionType and method.__code__.co_filename == file:
            continue  # as nearly all
        forward = name in FORWARDS and not in_its_file(kind, method)
        if forward or (isinstance(method, METHODS) or callable(method)) and _is_brought(kind, method):
            yield f"{kind.__name__}.{name} of {whose(method)}", method


def _is_brought(kind: type, method: Any) -> bool:
    """Whether a method is another pack's, or around one: torch's decorators are not, but what they are around may be.

    A function that was made to look like another one has that one's module, but its own globals.
    """
    if isinstance(method, property):
        return any(_is_brought(kind, each) for each in (method.fget, method.fset) if each is not None)
    function = getattr(method, "__func__", method)
    if not in_its_file(kind, function):
        module = getattr(function, "__globals__", {}).get("__name__") or origin(function)
        if not (is_of_known(module) or is_library(module) or is_beside_comfyui(module)):
            return True
    inner = getattr(function, "__wrapped__", None)
    return inner is not None and _is_brought(kind, inner)


def in_its_file(owner: Any, function: Any) -> bool:
    """Whether a function's code is in the file of its owner's module: of its class, or what its own name says."""
    file = getattr(sys.modules.get(owner.__module__), "__file__", None) or ""
    if not file.endswith(".py"):  # built in, made in a session, or without its source
        return True
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and code.co_filename == file


def foreign_code(module: nn.Module, functions: FunctionsRead) -> list[tuple[str, Any]]:
    """(where it is and whose, the code) of all that other packs brought: into the model, or into what its code calls.

    functions: that the model's code names.
    """
    found = list(brought_into(module))
    found += [(f"every module.hook {n} of {whose(hook)}", hook) for n, hook in enumerate(global_hooks())]
    return found + [(f"{name} of {whose(value)}", value) for name, value in functions.brought()]


def brought_into(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """As ``foreign_code``, of the module and its classes alone."""
    yield from [(f"{shown(module, key)} of {whose(value)}", value) for key, value in _of_parts(module)]
    yield from _of_classes(parts_of(module))
    yield from _kept_in_parts(module)


def _kept_in_parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Lists and dicts of tensors or modules in parts of other packs' classes: torch has no names for such tensors."""
    for path, part in modules_of(module):
        if is_known(type(part)):
            continue
        for name in part.__dict__.keys() - OF_MODULES:
            value = part.__dict__[name]
            items = value.values() if isinstance(value, DICTS) else value if isinstance(value, CONTAINERS) else ()
            if any(isinstance(each, (Tensor, nn.Module)) for each in items):
                yield f"{path}.{name} of {whose(type(part))}", value


def called_within(modules: Sequence[nn.Module]) -> list[Any]:
    """Other packs' code in these modules but for forwards and hooks of one part, with which a block is left alone."""
    found = [
        value for each in modules for key, value in _of_parts(each) if key[1] not in FORWARDS and "[" not in key[1]
    ]
    parts = dict.fromkeys(part for each in modules for part in parts_of(each))
    return [*found, *[code for _, code in _of_classes(list(parts))]]


def _of_parts(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    for key, value in objects_of(module):
        if key[1] not in ("", "class") and not (isinstance(key[0], str) or isinstance(value, type) or is_known(value)):
            yield key, value


def _of_classes(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    for kind in classes_of(parts):
        if not is_known(kind):
            yield f"{kind.__name__} of {whose(kind)}", kind
            continue
        yield from _brought_into_class(kind)


def replaced_in_torch(functions: FunctionsRead) -> str:
    """A function of torch's, written in Python, that another pack replaced; "" if there is none.

    While a forward is recorded torch calls such a function by its name, from within itself. So the pack's would run
    twice.
    """
    start = "torch.nn.functional."
    names = [name for name, _ in functions.brought() if name.startswith(start)]
    return next((name for name in names if name.removeprefix(start) not in BUILT_IN), "")


def states_of(
    foreign: Sequence[tuple[str, Any]], module: nn.Module, seen: Unchanged | None = None
) -> tuple[State | None, ...]:
    """``look_at`` other packs' code in a model. foreign: (where it is and whose, the code)."""
    return look_at([code for _, code in foreign], module, seen=seen)


def first_kept(foreign: Sequence[tuple[str, Any]], before: tuple[State | None, ...], module: nn.Module) -> str:
    """The code that keeps something from one call to the next, or may; "" if there is none."""
    for (name, _), old, new in zip(foreign, before, states_of(foreign, module), strict=True):
        if old is None or old != new:
            return name
    return ""


class Held:
    """An attribute in which other packs' code keeps the options of the latest forward, where more of it finds them."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self.name = weakref.ref(owner), name

    @property
    def value(self) -> Any:
        """What is there; None once the owner is gone."""
        owner = self._owner()
        return None if owner is None else vars(owner).get(self.name)

    @property
    def is_known(self) -> bool:
        """Whether an earlier recording found it."""
        return is_held(self._owner(), self.name)

    def put(self, options: Mapping[Any, Any]) -> None:
        """Has it hold these, as a forward of this call does."""
        owner = self._owner()
        if owner is not None:
            setattr(owner, self.name, options)

    def remember(self) -> None:
        """From now on it is no part of the code's state."""
        HELD[id(self._owner()), self.name] = self._owner


class Watched:
    """Other packs' code in a model while a forward is recorded: what it may read, and what it keeps.

    Code that puts the options of each forward into an attribute keeps nothing that a replay lacks, if a replay puts
    them there too. Tensors that the code has (a LoRA's, say) are read where they lie, at each replay. states: of the
    code, before. held: the attributes into which this forward put options. again: one of them was not known before, so
    the forward is to be recorded once more.
    """

    def __init__(self, foreign: Sequence[tuple[str, Any]], recorder: Recorder) -> None:
        self._foreign, self._module, self.again = foreign, recorder.module, False
        seen = Unchanged()
        self.states, self.held = states_of(foreign, recorder.module, seen), []
        recorder.hold(seen.new_tensors(), recorder.device)
        known = [place for place in self._places() if place.is_known]
        self._earlier = [(place, place.value, NotedOptions(place.value, _Earlier(recorder))) for place in known]
        for place, _, noted in self._earlier:
            place.put(noted)

    def kept(self, options: Mapping[Any, Any]) -> str:
        """The code that keeps something else from one call to the next, or may; "" if there is none.

        options: those of the call, in place of those by which a recording notes what is read.
        """
        other = ""
        for place, before, noted in self._earlier:
            if place.value is noted:
                place.put(before)
            elif not isinstance(place.value, NotedOptions):  # a copy, say, that a replay would not make
                other = place.name
        for place in self._places():
            if isinstance(place.value, NotedOptions):
                place.put(options)
                self.held.append(place)
                self.again |= not place.is_known
                place.remember()
        return other or first_kept(self._foreign, self.states, self._module)

    def _places(self) -> Iterator[Held]:
        """Attributes of classes and objects which the code can reach, that may hold options."""
        seen: set[int] = set()
        left = [code for _, code in self._foreign]
        while left:
            value = left.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            function = getattr(value, "__func__", value)
            kind = value if isinstance(value, type) else type(value)
            if isinstance(function, types.FunctionType):
                left += _reached(function)
            elif type(value).__weakrefoffset__ and hasattr(value, "__dict__") and not is_library(kind.__module__):
                yield from (Held(value, name) for name, each in list(vars(value).items()) if isinstance(each, dict))


class _Earlier(Reads):
    """Of the options of an earlier forward: no guard can compare what is read of them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(lambda tensor: None)
        self._recorder = recorder

    def note(self, key: Any, value: Any, used: bool = True, loose: bool = False) -> None:
        """As in ``Reads``."""
        self._recorder.refuse(say("foreign_state", name=f"option {key!r} of an earlier forward"))


def _reached(function: types.FunctionType) -> Iterator[Any]:
    """What a function of a pack holds from where it was made, and what its code names."""
    if is_library(function.__globals__.get("__name__", "")):
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is still empty
            continue
    there = function.__globals__
    yield from (there[name] for name in names_of(function.__code__) & there.keys())
