"""Layers of other packs that compute past torch: each of their calls is one step of the tape.

Such a layer starts its own kernels (int8 and 4 bit layers do), and to a recorder its result is memory that nothing
has written. It may also be ComfyUI's layer, in which a pack has replaced a method. What was written down of that call
is dropped then, as for operations (``wrapped``), and the call becomes one step. At each replay the layer that is there
then is called, with all that it does to its weights.
"""

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..origin import is_known
from .blocks import is_plain
from .named_tensors import PLAIN
from .options import NotedOptions
from .refusals import UNWRITTEN
from .swaps import swapped
from .values import tensors_in

CALLED = (types.FunctionType, types.MethodType, functools.partial)


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer's forward. model: what ``path`` names it in."""

    model: weakref.ref[nn.Module]
    path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer gives."""
        return self.model().get_submodule(self.path).forward(*args, **kwargs)

    def of(self, model: nn.Module) -> "LayerCall":
        """The same layer of another model, or block, of this structure."""
        return self if self.model() is model else replace(self, model=weakref.ref(model))

    def at(self, path: str, other: str) -> "LayerCall":
        """The same layer of another block; one that is no block's stays. path, other: of the two blocks."""
        inside = f"{self.path}.".startswith(f"{path}.")
        return replace(self, path=other + self.path.removeprefix(path)) if inside else self


def brought(part: nn.Module) -> Any:
    """The class of a layer, or what it has in the place of a method, if that is another pack's; None otherwise."""
    own = [each for each in part.__dict__.values() if isinstance(each, CALLED)]
    return next((each for each in (type(part), getattr(type(part), "forward", None), *own) if not is_known(each)), None)


def paths(model: nn.Module) -> list[str]:
    """Of the layers, and larger parts, of which other packs brought the class or a method."""
    return [path for path, part in model.named_modules() if path and brought(part) is not None]


class LayerCalls:
    """What runs in place of such layers' forwards while ``recorder`` listens."""

    def __init__(self, recorder: Any, model: nn.Module) -> None:
        self._recorder, self._model = recorder, weakref.ref(model)

    def forward(self, path: str, layer: nn.Module, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The layer's own result."""
        recorder = self._recorder
        if recorder.is_deaf or recorder.module is None:  # a pack that took this for the layer's own has kept it
            return own(*args, **kwargs)
        before, seen = recorder.place(), dict[Any, Any]()
        options = next((each for each in (*args, *kwargs.values()) if isinstance(each, NotedOptions)), None)
        if options is None:
            out = own(*args, **kwargs)
        else:  # what it reads of them it gets at each replay
            had = list(map(id, dict.values(options)))
            with options.heard_in(seen):
                out = own(*args, **kwargs)
            if list(map(id, dict.values(options))) != had or next(tensors_in(seen), None) is not None:
                return out
            args, kwargs = swapped((args, kwargs), {id(options): seen})
        results = out if isinstance(out, (tuple, list)) else [out]
        if recorder.guarded(lambda: self._is_apart(before, args, kwargs, results) and recorder.back_to(before)):
            recorder.guarded(lambda: recorder.step(LayerCall(self._model, path), args, results, kwargs))
        return out

    def _is_apart(self, before: Any, args: tuple, kwargs: dict[str, Any], results: Sequence[Any]) -> bool:
        """Whether the layer has computed these past torch, and did nothing else that a step could not repeat."""
        recorder = self._recorder
        if not (results and all([type(result) in PLAIN for result in results])):
            return False
        unwritten = not recorder.refusal and recorder.writes.are_missing([recorder.value(each) for each in results])
        if not (unwritten or recorder.refusal.startswith(UNWRITTEN)):
            return False
        if not is_plain((args, kwargs)):  # with a function among the options that it reads, say
            return False
        if any(torch._C._is_alias_of(result, each) for result in results for each in tensors_in((args, kwargs))):
            return False
        written = (each.writes.root for each in recorder.operations[before.operations :] if each.writes is not None)
        return all(root.number >= before.number for root in written)
