"""Weights that do not fit, which ComfyUI copies to the GPU as its layers need them (DynamicVRAM), under our programs.

A program's steps fetch their weights as the layers would that they stand for: by ComfyUI's own code, in the same order,
into the same memory, small layers several at once. Pages that are there are used as they are. While a forward is
recorded, it is ComfyUI's own layers that fetch: each finds notes of ours in the place of those of a prefetch, and gets
copies of its weights, which bear their names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..tape.binding import Bound, NotBound
from ..tape.named_tensors import MAPPED, OfPatch, inner_tensors
from ..tape.program import Program
from ..tape.record import Recorder
from ..tape.values import Weight
from .layer_casts import KEYS, NOTES, Cast, casts_itself, clean


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
        if any(map(_is_for_itself, parts)):
            raise NotBound("a function of weights would be applied twice, or otherwise")
        return Cast(parts, self._device, self.dtype)

    @contextmanager
    def in_forward(self, recorder: Recorder) -> Iterator[None]:
        """The body is ComfyUI's own forward, which ``recorder`` hears. What was fetched ahead for it is let go.

        Its layers get copies of their weights, under the names that these have in their pages. For code may ask for
        several layers' weights before it reads any of them: what is fetched lies in memory that the next layers'
        weights are written into, and pages may give way to others.
        """
        latest: dict[nn.Module, dict[str, Tensor | None]] = {}  # the layer that was fetched last: what it had before

        def let_go() -> None:
            for part, before in latest.items():
                for name in MAPPED:
                    del part.__dict__[name]
                part.__dict__.update(before)
            latest.clear()

        def fetch(path: str, part: nn.Module) -> None:
            if part in latest:
                return
            let_go()
            part.__dict__.pop(NOTES, None)
            with recorder.not_listening(), self.fetched([part]) as ((*weights,),):
                copies = [None if weight is None else weight.clone() for weight in weights]
            latest[part] = {name: part.__dict__[name] for name in MAPPED if name in part.__dict__}
            part.__dict__.update(zip(MAPPED, copies, strict=True))
            part.__dict__[NOTES] = notes[part]
            for name, weight in zip(MAPPED, copies, strict=True):
                for full, tensor in inner_tensors(name, weight) if weight is not None else ():
                    recorder.fetched(tensor, Weight(path, full))

        notes = {
            part: _Ahead(lambda path=path, part=part: fetch(path, part))
            for path, part in self._parts.items()
            if not _is_for_itself(part)
        }
        clean(self._parts.values())
        try:
            for part, ahead in notes.items():
                part.__dict__[NOTES] = ahead
            yield
        finally:
            let_go()
            for part in notes:
                part.__dict__.pop(NOTES, None)


def _is_for_itself(part: nn.Module) -> bool:
    """Whether something is done to its weights that ``Cast`` would do once more, or otherwise."""
    return any(getattr(part, f"{key}_function", None) for key in KEYS) or casts_itself(part)
