"""Patches that are called in each forward: steps of a program that run another pack's Python.

A patch whose effect cannot be written down once and for all (it counts its calls, reads a number from the GPU, draws
random numbers) is called at each replay, in the order in which it was, with what it would be given in eager. What is
around it stays on the tape. A graph is in pieces then, with the calls between them.

It gets copies of its tensors: it may write into them or keep them, and a program's memory is not its to change. What it
wrote into a copy is the tensor from there on; of a tensor that lies in another one's memory (tokens of a picture among
all tokens) only if it did so in the recording. If it writes there at one call and not at another, or gives a result of
another form than when it was recorded, ``FormChanged`` ends the replay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .guards import at
from .layout import laid_out, spread_out
from .patch_call import KINDS, Done, give_back, perform, tensors_of_call
from .pieces import Form, between, captured_here
from .swaps import swapped
from .this_forward import now
from .values import once_each, replaced, wrapped


class FormChanged(Exception):
    """Raised where a patch returns another form of result than in the recording. who: its code.

    place: where it is in the options.
    """

    def __init__(self, who: Any, place: tuple = ()) -> None:
        super().__init__("a patch gave another form of result")
        self.who, self.place = who, place

    @property
    def name(self) -> str:
        """The patch's, as a user may know it."""
        return getattr(self.who, "co_name", None) or getattr(self.who, "__name__", "a patch")


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
        patch = at(this.options, self.place)
        done = this.call(self.place, patch, lambda: perform(patch, args, kwargs, this.options))
        if done.form != self.form or not done.fits or done.written & self.shared != self.written:
            raise FormChanged(self.who, self.place)
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
        args, kwargs = replaced((args, kwargs), Tensor, once_each(torch.clone))
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
            given = list({id(tensor): tensor for tensor in tensors_of_call((args, kwargs), set(), options)}.values())
            done.give_to(given)
            if done.drawn is not None:
                done.drawn.restore()
            if done.wrote is not None:
                give_back((args, kwargs), options, done.wrote)
            echoes = [echo for echo in done.echoes if echo.number < len(given)]
            return swapped(done.out, {id(echo.tensor): echo.of(given[echo.number]) for echo in echoes})

        return call

    return dict(options) | {kind: wrapped(options[kind], proxy, (kind,)) for kind in KINDS if options.get(kind)}
