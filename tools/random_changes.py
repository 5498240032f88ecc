"""Random changes that another pack makes to a model or to ComfyUI's functions: are the pictures ComfyUI's?

    python -m tools.random_changes [--first 0] [--seconds 60]

A pack's function stands at random in the place of a layer's forward, of a class's method or of a function that the
model's code calls, or hooks a layer. What it does follows from a number that lies somewhere at random: in its closure,
in an object, a list, a dict, a tensor, in the layer. That number changes never, in each step, once, between runs, in
each call or in the first one; or the function is made again. Half of the models read a value back, so that their
blocks are recorded one by one. On a CPU. The number of a draw makes it again.
"""

import collections
import contextvars
import functools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

from tools import random_patches
from tools.random_patches import ROUNDING, SIZES

KINDS = ("QwenImage", "Flux", "ZImage", "WAN21_T2V", "SD15", "Anima")
HOLDERS = (
    "closure", "object", "object in an object", "list", "dict", "tensor", "another tensor", "default", "partial",
    "attribute of the layer", "attribute of its class", "module", "set of names", "method", "class", "cache", "array",
    "slots", "queue", "thread", "context",
)  # fmt: skip
WHERE = ("function", "function", "forward", "forward", "hook", "pre-hook", "method", "layer", "convolution")
WHEN = ("never", "each step", "once", "in turns", "between runs", "each call", "first call", "made again")
STEPS = 6


class Far(NamedTuple):
    """A draw whose picture is another."""

    number: int
    what: str
    run: int
    error: float


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
        self.list, self.dict, self.tensor, self.names = [1.0], {"gain": 1.0}, torch.ones(1), {"g10"}
        self.module = types.ModuleType("a_pack")
        self.module.gain = 1.0
        self.slots, self.kind, self.thread = Slots(), type("Settings", (), {"gain": 1.0}), threading.local()
        self.slots.gain = self.thread.gain = 1.0
        self.array, self.queue = numpy.ones(1), collections.deque([1.0])
        self.context = contextvars.ContextVar("gain", default=1.0)
        self.put: Callable[[float], None] = lambda gain: None

    def reader(self) -> Callable[[], Any]:
        """What gives the number; made again, it is another function of the same things."""
        gain, held, inner, items, named = 1.0, self.object, self.inner, self.list, self.dict
        tensor, module, names, layer = self.tensor, self.module, self.names, self.layer
        slots, kind, thread, array, queue = self.slots, self.kind, self.thread, self.array, self.queue
        context = self.context

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
            "another tensor": (lambda: held.gain, lambda new: setattr(held, "gain", torch.full((1,), new))),
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


def _of_list(items: list[float]) -> float:
    return items[0]


def _scaled(out: Any, gain: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(each * gain if isinstance(each, Tensor) and each.is_floating_point() else each for each in out)
    return out * gain if isinstance(out, Tensor) and out.is_floating_point() else out


class Change:
    """One change of a pack's."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.where, self.holder, self.when = draw.choice(WHERE), draw.choice(HOLDERS), draw.choice(WHEN)
        self.place, self.name = draw.random(), ""

    def __str__(self) -> str:
        return f"{self.where} {self.name}: {self.holder}, {self.when}"

    def begin(self, model: nn.Module, stack: ExitStack) -> None:
        """Puts the pack's function there, until the stack is closed."""
        self.store, self._stack = Store(self.holder, self.when == "each call"), stack
        layers = [layer for layer in model.modules() if next(layer.parameters(recurse=False), None) is not None]
        blocks = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
        blocks = [block for each in blocks for block in each if not isinstance(block, nn.ModuleList)]
        convolutions = [each for each in layers if isinstance(each, nn.Conv2d)]
        found = convolutions if self.where == "convolution" and convolutions else layers
        layer = self._one(blocks if self.where in ("function", "layer", "method") else found)
        self.store.layer = layer
        if self.holder == "attribute of its class":
            kind = type(layer)
            stack.callback(lambda: delattr(kind, "a_gain") if "a_gain" in vars(kind) else None)
        self._put(layer)

    def _one(self, found: list[Any]) -> Any:
        return found[int(self.place * len(found))]

    def _put(self, layer: nn.Module) -> None:
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
        elif self.where == "method":
            kind, own = type(layer), vars(type(layer)).get("forward")
            if own is not None:
                self._stack.callback(setattr, kind, "forward", own)
                self._again = lambda: setattr(kind, "forward", self._around(own))
                self._again()
        else:
            name = "_conv_forward" if isinstance(layer, nn.Conv2d) and self.where == "convolution" else "forward"
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

    def _around(self, own: Callable[..., Any]) -> Callable[..., Any]:
        store, read = self.store, self.store.reader()
        if self.when in ("each call", "first call"):
            return lambda *args, **kwargs: _scaled(own(*args, **kwargs), store.counted(read))
        return lambda *args, **kwargs: _scaled(own(*args, **kwargs), read())

    def step(self, number: int) -> None:
        """What the pack does before each step."""
        if self.when == "made again":
            self._again()
        elif self.when == "each step" or (self.when == "once" and number == STEPS // 2):
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


def compared(number: int) -> Iterator[Far]:
    """What is wrong with one draw. Nothing is said of changes with which ComfyUI itself fails."""
    from bench import models
    from tools.architectures import patchers
    from tools.driving import compiled
    from tools.oracles import error
    from tools.patching import read_back
    from tools.recording import plan_kernels

    draw = random.Random(number)
    kind, reads_back, fused = draw.choice(KINDS), draw.random() < 0.5, draw.random() < 0.7
    seeds = [draw.randint(0, 10**6) for _ in range(draw.choice((1, 1, 2)))]

    def pictures(fast: bool) -> Iterator[Tensor]:
        patcher, changes = patchers.make(kind), [Change(seed) for seed in seeds]
        with ExitStack() as stack:
            if reads_back:
                read_back(patcher.model.diffusion_model)
            for change in changes:
                change.begin(patcher.model.diffusion_model, stack)
            if fast and fused:
                plan_kernels(stack.enter_context(pytest.MonkeyPatch.context()))
            model = compiled(patcher) if fast else patcher

            def callback(number: int, *_: Any) -> None:
                for change in changes:
                    change.step(number + 1)

            for seed, (width, height) in enumerate(SIZES):
                for change in changes:
                    change.run(seed)
                run = {"width": width, "height": height, "frames": 5 if kind.startswith("WAN") else 1, "cfg": 3.0}
                yield models.sample(model, steps=STEPS, seed=seed, tokens=24, callback=callback, **run)
        shown.append("; ".join(map(str, changes)))

    shown: list[str] = []
    try:
        wanted = list(pictures(False))
    except Exception:  # noqa: BLE001 - such changes are of no use
        return
    if not all(out.isfinite().all() for out in wanted):
        return
    found = list(pictures(True))
    what = f"{kind}{', reads back' if reads_back else ''}{', fused' if fused else ''}; {shown[0]}"
    for run, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if (far := error(mine, theirs)) > ROUNDING:
            yield Far(number, what, run, far)


if __name__ == "__main__":
    random_patches.run(__doc__, compared)
