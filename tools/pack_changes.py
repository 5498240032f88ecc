"""A random change that another pack makes to a model: where its function stands, where its number lies, and when
that changes. For ``tools.random_changes``.
"""

import collections
import contextvars
import functools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tools.draws import device

HOLDERS = (
    "closure", "object", "object in an object", "list", "dict", "tensor", "another tensor", "default", "partial",
    "attribute of the layer", "attribute of its class", "module", "set of names", "method", "class", "cache", "array",
    "slots", "queue", "thread", "context",
)  # fmt: skip
TENSORS = (  # holders of tensors, by which layers multiply as they lie
    "tensor",
    "another tensor",
    "memory of a tensor",
    "list of tensors",
    "module in a list",
    "another module in a list",
)
WHERE = ("function", "function", "forward", "forward", "hook", "pre-hook", "method", "layer", "convolution")
WHEN = ("never", "each step", "once", "in turns", "between runs", "each call", "first call", "made again")
MORE = (*WHERE, "method of a layer", "another method", "attribute", "whole", "whole of the class")
ONLY_CLASSES = ("function", "function", "method", "method of a layer", "another method")  # a layer is there for one run
STEPS = 6  # of a run
FORMS = ("function", "object", "bound method", "partial")  # of what a pack puts there


class Slots:
    """It has no dict."""

    __slots__ = ("gain",)

    def read(self) -> float:
        """As a bound method."""
        return self.gain


class Store:
    """The number by which a pack's function multiplies, and where it lies."""

    def __init__(self, holder: str, always: bool) -> None:
        self.holder, self.always, self.calls, self.layer = holder, always, 0, types.SimpleNamespace()
        self.object, self.inner = types.SimpleNamespace(gain=1.0), types.SimpleNamespace(inner=None)
        self.inner.inner = self.object
        self.list, self.dict, self.tensor, self.names = [1.0], {"gain": 1.0}, torch.ones(1, device=device()), {"g10"}
        self.module = types.ModuleType("a_pack")
        self.module.gain = 1.0
        self.slots, self.kind, self.thread = Slots(), type("Settings", (), {"gain": 1.0}), threading.local()
        self.slots.gain = self.thread.gain = 1.0
        self.tensors, self.modules = [torch.ones(1, device=device())], [_module(1.0)]
        self.array, self.queue = numpy.ones(1), collections.deque([1.0])
        self.context = contextvars.ContextVar("gain", default=1.0)
        self.put: Callable[[float], None] = lambda gain: None

    def reader(self) -> Callable[[], Any]:
        """What gives the number; made again, it is another function of the same things."""
        gain, held, inner, items, named = 1.0, self.object, self.inner, self.list, self.dict
        tensor, module, names, layer = self.tensor, self.module, self.names, self.layer
        slots, kind, thread, array, queue = self.slots, self.kind, self.thread, self.array, self.queue
        context, tensors, modules = self.context, self.tensors, self.modules

        def closed() -> float:
            return gain

        def put_closed(new: float) -> None:
            nonlocal gain
            gain = new

        def with_default(gain: float = 1.0) -> float:
            return gain

        cached = functools.lru_cache(lambda: held.gain)

        holders: dict[str, tuple[Callable[[], Any], Callable[[float], None]]] = {
            "closure": (closed, put_closed),
            "object": (lambda: held.gain, lambda new: setattr(held, "gain", new)),
            "object in an object": (lambda: inner.inner.gain, lambda new: setattr(held, "gain", new)),
            "list": (lambda: items[0], lambda new: items.__setitem__(0, new)),
            "dict": (lambda: named["gain"], lambda new: named.update(gain=new)),
            "tensor": (lambda: tensor, lambda new: tensor.fill_(new)),
            "another tensor": (lambda: held.gain, lambda new: setattr(held, "gain", _tensor(new))),
            "memory of a tensor": (lambda: tensor, lambda new: setattr(tensor, "data", _tensor(new))),
            "list of tensors": (lambda: tensors[0], lambda new: tensors.__setitem__(0, _tensor(new))),
            "module in a list": (lambda: modules[0].weight, lambda new: modules[0].weight.fill_(new)),
            "another module in a list": (
                lambda: modules[0].weight, lambda new: modules.__setitem__(0, _module(new)),
            ),
            "default": (with_default, lambda new: setattr(with_default, "__defaults__", (new,))),
            "partial": (functools.partial(_of_list, items), lambda new: items.__setitem__(0, new)),
            "attribute of the layer": (
                lambda: getattr(layer, "a_gain", 1.0), lambda new: setattr(layer, "a_gain", new),
            ),
            "attribute of its class": (
                lambda: getattr(type(layer), "a_gain", 1.0), lambda new: setattr(type(layer), "a_gain", new),
            ),
            "method": (slots.read, lambda new: setattr(slots, "gain", new)),
            "class": (lambda: kind.gain, lambda new: setattr(kind, "gain", new)),
            "cache": (cached, lambda new: (setattr(held, "gain", new), cached.cache_clear())),
            "array": (lambda: float(array[0]), lambda new: array.fill(new)),
            "slots": (lambda: slots.gain, lambda new: setattr(slots, "gain", new)),
            "queue": (lambda: queue[-1], lambda new: queue.append(new)),
            "thread": (lambda: thread.gain, lambda new: setattr(thread, "gain", new)),
            "context": (context.get, context.set),
            "module": (lambda: module.gain, lambda new: setattr(module, "gain", new)),
            "set of names": (
                lambda: int(next(iter(names))[1:]) / 10,
                lambda new: (names.clear(), names.add(f"g{round(new * 10)}")),
            ),
        }  # fmt: skip
        read, self.put = holders[self.holder]
        return read

    def counted(self, read: Callable[[], Any]) -> Any:
        """The number, which is another one in each call, or from the first one on."""
        self.calls += 1
        if self.always or self.calls == 1:
            self.put(1.0 + (self.calls % 7) / 10)
        return read()


def _module(gain: float) -> nn.Module:
    """Of one weight."""
    made = nn.Linear(1, 1, bias=False)
    made.weight = nn.Parameter(_tensor(gain), requires_grad=False)
    return made


def _tensor(gain: float) -> Tensor:
    return torch.full((1,), gain, device=device())


def _of_list(items: list[float]) -> float:
    return items[0]


def _scaled(out: Any, gain: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(each * gain if isinstance(each, Tensor) and each.is_floating_point() else each for each in out)
    return out * gain if isinstance(out, Tensor) and out.is_floating_point() else out


class Patch:
    """A pack's function as an object."""

    def __init__(self, own: Callable[..., Any], read: Callable[[], Any]) -> None:
        self.own, self.read = own, read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """As a bound method."""
        return _scaled(self.own(*args, **kwargs), self.read())


def _around_own(own: Callable[..., Any], read: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    return _scaled(own(*args, **kwargs), read())


class Change:
    """One change of a pack's. where, holders: what it is drawn from. steps: of a run. whole: by what it is called."""

    def __init__(
        self, seed: int, where: Sequence[str] = WHERE, steps: int = STEPS, whole: Sequence[str] = ("forward",),
        holders: Sequence[str] = HOLDERS,
    ) -> None:  # fmt: skip
        draw = random.Random(seed)
        self.where, self.holder, self.when = draw.choice(where), draw.choice(holders), draw.choice(WHEN)
        self.place, self.name = draw.random(), ""
        self.form = FORMS[0] if where is WHERE else draw.choice(FORMS)
        self._steps, self._whole = steps, draw.choice(whole)

    def __str__(self) -> str:
        return f"{self.where} {self.name} ({self.form}): {self.holder}, {self.when}"

    def begin(self, model: nn.Module, stack: ExitStack) -> None:
        """Puts the pack's function there, until the stack is closed."""
        self.store, self._stack = Store(self.holder, self.when == "each call"), stack
        layers = [layer for layer in model.modules() if next(layer.parameters(recurse=False), None) is not None]
        blocks = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
        blocks = [block for each in blocks for block in each if type(block) not in (nn.ModuleList, nn.Module)]
        convolutions = [each for each in layers if isinstance(each, nn.Conv2d)]
        found = convolutions if self.where == "convolution" and convolutions else layers
        if self.where == "another method":
            found = [model, *blocks]
        layer = self._one((blocks or layers) if self.where in ("function", "layer", "method") else found)
        if self.where.startswith("whole"):
            layer = model
        self.store.layer = layer
        if self.holder == "attribute of its class":
            kind = type(layer)
            stack.callback(lambda: delattr(kind, "a_gain") if "a_gain" in vars(kind) else None)
        self._put(layer, model)

    def _one(self, found: list[Any]) -> Any:
        return found[int(self.place * len(found))]

    def _put(self, layer: nn.Module, model: nn.Module) -> None:
        self.name = type(layer).__name__
        if self.where in ("hook", "pre-hook"):
            self._hook(layer)
        elif self.where == "function":
            there = vars(sys.modules[type(layer).__module__])
            functions = {name for name, each in there.items() if isinstance(each, types.FunctionType)}
            names = sorted(functions & _named(type(layer)))
            self.name = self._one(names) if names else ""
            if self.name:
                own = there[self.name]
                self._stack.callback(there.__setitem__, self.name, own)
                self._again = lambda: there.__setitem__(self.name, self._around(own))
                self._again()
        elif self.where in ("method", "method of a layer", "another method", "whole of the class"):
            kind, method = type(layer), self._whole if self.where == "whole of the class" else "forward"
            if layer is model:  # which may read back by a class of the tests' own
                kind = next(base for base in kind.__mro__ if base.__module__.startswith("comfy"))
            methods = sorted(name for name, each in vars(kind).items() if isinstance(each, types.FunctionType))
            others = [name for name in methods if not name.startswith("__") and name != "forward"]
            if self.where == "another method" and others:
                method = others[int(self.place * 1000) % len(others)]
                self.name = f"{self.name}.{method}"
            own = vars(kind).get(method)
            if own is not None:
                self._stack.callback(setattr, kind, method, own)
                self._again = lambda: setattr(kind, method, self._around(own, FORMS[0]))  # which is given the layer
                self._again()
        else:
            name = "_conv_forward" if isinstance(layer, nn.Conv2d) and self.where == "convolution" else "forward"
            if self.where == "whole":
                name = self._whole
            elif self.where == "attribute" and (found := list(_functions_held(model))):
                layer, name = self._one(found)
                self.name = f"{type(layer).__name__}.{name}"
            own = getattr(layer, name)
            self._again = lambda: setattr(layer, name, self._around(own))
            self._again()

    def _hook(self, layer: nn.Module) -> None:
        before, handle = self.where == "pre-hook", []

        def again() -> None:
            read = self.store.reader()
            for each in handle:
                each.remove()
            if before:
                hook = lambda module, args: tuple(_scaled(each, read()) for each in args)  # noqa: E731
                handle[:] = [layer.register_forward_pre_hook(hook)]
            else:
                hook = lambda module, args, out: _scaled(out, read())  # noqa: E731
                handle[:] = [layer.register_forward_hook(hook)]

        self._again = again
        again()

    def _around(self, own: Callable[..., Any], form: str = "") -> Callable[..., Any]:
        store, read, form = self.store, self.store.reader(), form or self.form
        always = self.when in ("each call", "first call")
        if form != FORMS[0]:
            read = functools.partial(store.counted, read) if always else read
            if form == "partial":
                return functools.partial(_around_own, own, read)
            return Patch(own, read) if form == "object" else Patch(own, read).call
        if always:
            return lambda *args, **kwargs: _scaled(own(*args, **kwargs), store.counted(read))
        return lambda *args, **kwargs: _scaled(own(*args, **kwargs), read())

    def step(self, number: int) -> None:
        """What the pack does before each step."""
        if self.when == "made again":
            self._again()
        elif self.when == "each step" or (self.when == "once" and number == self._steps // 2):
            self.store.put(1.0 + (number + 1) / 10)
        elif self.when == "in turns":
            self.store.put(1.0 + (number % 2) / 5)

    def run(self, number: int) -> None:
        """What it does before each run."""
        if self.when == "between runs":
            self.store.put(1.0 + number / 5)
        self.step(0)


@functools.lru_cache
def _named(kind: type) -> set[str]:
    from anyshape.accel.tape.code_names import names_of

    methods = [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, types.FunctionType)]
    return {name for method in methods for name in names_of(method.__code__)}


def _functions_held(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """(a part, the name of the attribute) of each function that a part holds in an attribute and calls."""
    for part in model.modules():
        for name, value in vars(part).items() if part is not model else ():  # which has those that we put there, too
            if callable(value) and not isinstance(value, nn.Module) and not name.startswith("_"):
                if not isinstance(value, type):
                    yield part, name
