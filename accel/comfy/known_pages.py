"""What a model's pages looked like when all of its weights were there (DynamicVRAM).

It outlives a sampling run: where nothing has changed since, the next run asks once for all pages, and not for each
layer's, which took SDXL 8 ms of a GPU's host. It holds no weights, and no pages.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

try:
    import comfy_aimdo.model_vbar as vbars
except ImportError:  # ComfyUI before DynamicVRAM
    vbars = None

Place = tuple[Any, int, int]  # (whose pages, address, bytes), as comfy-aimdo has it
Layer = Mapping[str, Any]  # a layer's attributes


class _Noted(NamedTuple):
    places: list[tuple["weakref.ref[Any]", int, int]]  # the layers'
    bytes: int  # of all pages that were there
    signatures: list[Any]  # the spans'
    filled: list[Any]  # the layers'


class KnownPages:
    """Of one model."""

    def __init__(self) -> None:
        self._noted: _Noted | None = None

    def note(self, signatures: list[Any] | None, loaded: int, places: Sequence[Place], layers: Sequence[Layer]) -> None:
        """All weights are there. signatures: the spans'; None if they went meanwhile. loaded: bytes of the pages."""
        if signatures is None:
            self._noted = None
            return
        weak = [(weakref.ref(whose), address, size) for whose, address, size in places]
        self._noted = _Noted(weak, loaded, signatures, [each.get("_v_signature") for each in layers])

    def look(self, places: Sequence[Place]) -> None:
        """A sampling run begins. Forgets everything if the layers' weights are at other places now."""
        noted = self._noted
        if noted is not None and [(whose(), *place) for whose, *place in noted.places] != list(places):
            self._noted = None

    def may_be_there(self, loaded: int) -> bool:
        """Whether it is known what all weights look like, and as many bytes of pages are there."""
        return self._noted is not None and loaded >= self._noted.bytes

    def are_there(self, signatures: list[Any], places: Sequence[Place], layers: Sequence[Layer]) -> bool:
        """Whether these pages hold the weights that they held when all were there."""
        noted = self._noted
        if noted is None or not all(map(vbars.vbar_signature_compare, signatures, noted.signatures)):
            return False
        same = zip(layers, places, noted.filled, strict=True)
        return all([own.get("_v") is place and own.get("_v_signature") is filled for own, place, filled in same])


def spans(places: list[Place]) -> Iterator[Place]:
    """From the first to the last byte of each one's pages: asked for as one."""
    for whose in {id(place[0]): place[0] for place in places}.values():
        own = [place for place in places if place[0] is whose]
        start = min(address for _, address, _ in own)
        yield whose, start, max(address + size for _, address, size in own) - start
