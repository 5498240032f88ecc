"""Weights that do not fit, which ComfyUI copies to the GPU as its layers need them (DynamicVRAM), under our programs.

A program's steps fetch their weights as the layers would that they stand for: by ComfyUI's own code, in the same order,
into the same memory, small layers several at once. Pages that are there are used as they are. While a forward is
recorded, it is ComfyUI's own layers that fetch: each finds notes of ours in the place of those of a prefetch, and what
they fetch gets its name.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..tape.binding import Bound, NotBound
from ..tape.named_tensors import MAPPED, OfPatch, inner_tensors
from ..tape.program import Program
from ..tape.record import Recorder
from ..tape.values import Weight
from .layer_casts import KEYS, NOTES, Cast, clean, is_elsewhere

BESIDE = 1  # earlier layers whose weights stay while the next one's are fetched: an operation may read two layers'


class _Ahead(dict):
    """A layer's notes of its prefetch: asked whether the weights are there, it fetches them."""

    def __init__(self, fetch: Callable[[], None]) -> None:
        super().__init__(signature=None)
        self._fetch = fetch

    def __getitem__(self, key: str) -> Any:
        if key != "resident":
            return super().__getitem__(key)
        self._fetch()
        return True


class StreamedWeights:
    """Those of one model. Holds it: keep it no longer than a sampling run. parts: by path, those that are mapped in."""

    def __init__(self, model: nn.Module, parts: Mapping[str, nn.Module], device: torch.device) -> None:
        self._model, self._parts, self._device = model, parts, device
        self._mapped = set(parts.values())
        self._bound: dict[Program, Bound] = {}
        self._blocks: dict[str, StreamedWeights] = {}
        self.dtype = torch.float32  # of the inputs of the call that is on
        self.why = self.why_eager = ""  # what the user reads of it, and where nothing of ours runs
        self.ended = False

    def end(self) -> str:
        """Something failed: for the rest of the run ComfyUI's own forward fetches the weights. Says so."""
        self.ended = True
        return self.why_eager

    def bound(self, program: Program, others: Mapping[int, OfPatch]) -> Bound:
        """The program's values, for ``Program.run``: its steps fetch their weights. Raises ``NotBound``."""
        if program not in self._bound:
            self._bound[program] = program.fetching(self._model, self.fetched, self._mapped.__contains__, others)
        return self._bound[program]

    def of_block(self, path: str, block: nn.Module) -> "StreamedWeights":
        """Those of one of the model's blocks, for programs and recordings of it alone."""
        if path not in self._blocks:
            parts = {name: part for name, part in block.named_modules() if part in self._mapped}
            self._blocks[path] = StreamedWeights(block, parts, self._device)
        found = self._blocks[path]
        found.dtype, found.why = self.dtype, self.why
        return found

    def fetched(self, parts: Sequence[nn.Module]) -> Cast:
        """In the body, the weights of these layers are on the GPU. Raises ``NotBound``."""
        if any(map(_has_functions, parts)):
            raise NotBound("a function of weights would be applied twice")
        return Cast(parts, self._device, self.dtype)

    @contextmanager
    def _named(self, part: nn.Module) -> Iterator[bool]:
        """In the body, the weights of a layer are there under the names that they have in its pages.

        Gives whether they are a copy, which stays as long as somebody has it: what is fetched lies in memory that the
        next layers' weights are written into, and code may ask for several layers' before it reads any of them.
        """
        with self.fetched([part]) as ((*weights,),):
            before = {name: part.__dict__.get(name) for name in MAPPED}
            is_lent = is_elsewhere(part)
            if is_lent:
                copies = [None if weight is None else weight.clone() for weight in weights]
                part.__dict__.update(zip(MAPPED, copies, strict=True))
            try:
                yield is_lent
            finally:
                if is_lent:
                    for name, old in before.items():
                        if old is None:
                            part.__dict__.pop(name, None)
                        else:
                            part.__dict__[name] = old

    @contextmanager
    def in_forward(self, recorder: Recorder) -> Iterator[None]:
        """The body is ComfyUI's own forward, which ``recorder`` hears. What was fetched ahead for it is let go."""
        there: OrderedDict[nn.Module, ExitStack] = OrderedDict()
        marked: list[Tensor] = []  # in pages
        heard = 0  # operations, before the latest fetch

        def let_go(count: int) -> None:
            while len(there) > count:
                part, stack = there.popitem(last=False)
                with recorder.not_listening():
                    stack.close()
                part.__dict__[NOTES] = notes[part]

        def fetch(path: str, part: nn.Module) -> None:
            nonlocal heard
            if part in there:
                return
            if len(recorder.operations) != heard:  # else nothing has read what came before: it is asked for with this
                let_go(BESIDE)
            heard = len(recorder.operations)
            part.__dict__.pop(NOTES)
            with recorder.not_listening(), ExitStack() as stack:
                is_copy = stack.enter_context(self._named(part))
                for name in MAPPED:
                    named = _name(recorder, path, name, part.__dict__.get(name))
                    marked.extend([] if is_copy else named)
                if NOTES in part.__dict__:  # its own, which it then clears
                    stack.callback(part.__dict__.__setitem__, NOTES, part.__dict__[NOTES])
                part.__dict__[NOTES], there[part] = notes[part], stack.pop_all()

        notes = {
            part: _Ahead(lambda path=path, part=part: fetch(path, part))
            for path, part in self._parts.items()
            if not _has_functions(part)
        }
        clean(self._parts.values())
        try:
            for part, ahead in notes.items():
                part.__dict__[NOTES] = ahead
            yield
        finally:
            let_go(0)
            for part in notes:
                part.__dict__.pop(NOTES, None)
            for tensor in marked:
                tensor.__dict__.pop("_anyshape", None)


def _has_functions(part: nn.Module) -> bool:
    """Whether something is done to its weights besides patches: by ``Cast``, and by the layer once more."""
    return any(getattr(part, f"{key}_function", None) for key in KEYS)


def _name(recorder: Recorder, path: str, name: str, weight: Tensor | None) -> list[Tensor]:
    """Tells the recorder what ``weight`` is; the tensors that bear its mark now."""
    found = list(inner_tensors(name, weight)) if weight is not None else []
    for full, tensor in found:
        recorder.fetched(tensor, Weight(path, full))
    return [tensor for _, tensor in found]
