"""Weights that ComfyUI maps in while a model runs (DynamicVRAM), and how a program or a graph may read them.

A layer's weights have one address for as long as the model is there, and memory at it only while there is room. What
ComfyUI does at each layer is done here once per forward, for all of them: ask for the memory (``vbar_fault``, which
also keeps it from being given away), see whether what lies in it is still the weights (the signature is another one
once a page was given away), have ComfyUI's own code fill what is not, and give the pages free when all is launched.
ComfyUI does not wait for the GPU there either: before it gives a page away it waits for everything that was launched.
While ComfyUI's own forward runs none is kept, so that it has all the memory that it would have without us.

Where they do not fit, nothing of ours runs. ComfyUI's own forward streams them. Weights that are too small for pages:
``small_weights``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.model_management as mm
import torch
from torch import Tensor, nn

from .. import graphs, origin
from ..errors import is_out_of_memory, let_go
from ..reasons import say
from ..tape.layer_calls import brought
from ..tape.named_tensors import modules_of, parts_of
from .known_pages import KnownPages, Place, spans, vbars
from .layer_casts import KEYS, Cast, casts_itself
from .shortages import Unfit
from .small_weights import SmallWeights

PREFETCH = "prefetch_dynamic_vbars"  # the option that has a forward's blocks fetched ahead
ROUNDS = 5  # filling needs memory too, which may cost a page
AGAIN = 2  # times in a run that pages are asked for which something else has pushed out
CHUNK = 128 << 20  # bytes that are filled at once
MARGIN = 256 << 20  # bytes that must be free beyond what graphs are known to need: a capture that runs short fails
GIB = 1 << 30

TooShort = Callable[[int], str] | None

_IN_THE_WAY: dict[torch.device, int] = {}  # bytes that graphs held when weights did not fit beside them


def is_mapped(layer: nn.Module) -> bool:
    """Whether this layer's weights are pages that ComfyUI maps in."""
    return "_v" in layer.__dict__


def mapped(
    model: nn.Module, parts: Sequence[nn.Module] = (), known: KnownPages | None = None
) -> "MappedWeights | None":  # fmt: skip
    """Those of ``model``; None if ComfyUI maps in none of its layers. parts: all of the model's, if they are known.

    known: what is kept of them from run to run.
    """
    theirs = [part for part in parts or parts_of(model) if "_v" in part.__dict__]
    return MappedWeights(model, theirs, known or KnownPages()) if theirs and vbars is not None else None


def maps_to(parts: Iterable[nn.Module], device: torch.device) -> bool:
    """Whether what ComfyUI maps in of these parts of a model is mapped in on ``device``."""
    tables = {id(part._v[0]): part._v[0] for part in parts if is_mapped(part)}.values()
    return device.type != "cuda" or all(table.device == (device.index or 0) for table in tables)


def unmapped(parts: Iterable[nn.Module]) -> list[Tensor]:
    """The parameters of these parts of a model that no pages stand for."""
    return [
        weight
        for part in parts
        for name, weight in part._parameters.items()
        if weight is not None and not (name in KEYS and is_mapped(part))
    ]


class MappedWeights:
    """One model's layers whose weights are mapped in. Holds them: keep it no longer than a sampling run."""

    def __init__(self, model: nn.Module, parts: list[nn.Module], known: KnownPages) -> None:
        self._model, self._parts = model, sorted(parts, key=lambda part: part._v[1])
        self._dicts = [part.__dict__ for part in self._parts]
        self._alone = [part for part in self._parts if casts_itself(part)]
        self._places: list[Place] = [part._v for part in self._parts]
        # Of each table the part whose page goes first: the model's, and those of companions.
        self._last = list({id(part._v[0]): part for part in self._parts}.values())
        self._spans = list(spans(self._places))
        self._known = known
        known.look(self._places)
        self._fitted = False  # in this run
        self._small = SmallWeights(model, lambda part: KEYS if is_mapped(part) else ())
        self._held: list[Place] = []  # spans whose pages stay
        self._owners: dict[int, nn.Module] = {}  # by the id of its weight
        self._waited = False  # in this call, for what ran last
        self._again = 0  # how often pages were asked for again after something else had pushed them out
        self.did_not_fit = False  # at the last call
        self.free: int | None = None  # bytes beside them at the call's start, if that was asked

    @property
    def names(self) -> tuple[str, ...]:
        """Which layers these are."""
        return tuple(self.parts())

    def parts(self) -> dict[str, nn.Module]:
        """These layers by path."""
        return {path: part for path, part in modules_of(self._model) if is_mapped(part)}

    @property
    def bytes(self) -> int:
        """Of all pages."""
        return sum(size for _, _, size in self._spans)

    def ready(self, device: torch.device, dtype: torch.dtype, too_short: TooShort, unfit: Unfit) -> str:
        """Has all weights lie on ``device``, and stay there until ``let_go``; why they do not, or "".

        dtype: of the model's inputs, in which patches of weights are computed. too_short: of a call that has pushed
        weights out before, why it would again, given the bytes that are free beside them, or ""; None for any other.
        """
        if not maps_to(self._parts, device):
            return say("weights_elsewhere")
        self._waited, self.did_not_fit = False, True
        self.free, self._tried = None, False
        # Before anything is filled, by an estimate that is too high where other models' pages need not give way.
        if too_short is not None and (why := too_short(self._free_beside(device))):
            return why
        for turn in range(ROUNDS):
            if self.hold():
                if turn or too_short is not None:
                    self.free = mm.get_free_memory(device)
                if too_short is not None and not graphs.cache(device).used_bytes and (why := too_short(self.free)):
                    self.let_go()
                    return why
                self._small.keep(device)
                self.did_not_fit = False
                unfit.clear()
                return ""
            if (part := next((each for each in self._alone if _is_filled(each) is False), None)) is not None:
                self.did_not_fit = False
                return say("casts_itself", name=origin.whose(brought(part)))
            if not turn and (
                self._lacks_room(device) or unfit.expects(self._free_beside(device), self._others(device))
            ):
                break
            filled = self._complete(device, dtype)
            if filled is None and not self._make_room(device):
                break
            if filled == 0:  # looked through once more: what was filled last may have cost a page
                self._note()
        if self._tried:
            unfit.add(self._free_beside(device), self._others(device))
        return self.streamed()

    def still_streamed(self, device: torch.device) -> str:
        """``streamed`` if they did not fit at the last call, and still do not: one question per table; else ""."""
        if self.did_not_fit and self._lacks_room(device):
            return self.streamed()
        for part in self._last if self.did_not_fit else ():
            if _fault(part._v) is None:
                return self.streamed()
            vbars.vbar_unpin(part._v)
        return ""

    def streamed(self) -> str:
        """Says why nothing of ours runs now."""
        there, every = self._told()
        return say("weights_streamed", there=there, all=every)

    def fetched(self) -> str:
        """Says why there is no graph, where steps fetch their weights."""
        there, every = self._told()
        return say("weights_fetched", there=there, all=every)

    def _told(self) -> tuple[str, str]:
        return f"{min(self._loaded(), self.bytes) / GIB:.0f}", f"{self.bytes / GIB:.1f}"

    def hold(self) -> bool:
        """Keeps the pages, if all of them are as they were when all weights were there. Asks for none that is gone."""
        self.let_go()
        if not self._known.may_be_there(self._loaded()):
            return False
        signatures = self._fault()
        if signatures is not None and self._known.are_there(signatures, self._places, self._dicts):
            self._fitted = True
            return True
        self.let_go()
        return False

    def let_go(self) -> None:
        """Releases the pages, because everything is launched."""
        held, self._held = self._held, []
        for span in held:
            vbars.vbar_unpin(span)

    # Layouts ------------------------------------------------------------------------------------------------------

    def _owner(self, weight: Tensor) -> nn.Module | None:
        """The layer that ``weight`` is of, now; None once it was filled again."""
        part = self._owners.get(id(weight))
        if part is None or part.__dict__.get("_v_weight") is not weight:
            owned = zip(self._dicts, self._parts, strict=True)
            self._owners = {id(own["_v_weight"]): part for own, part in owned if "_v_weight" in own}
            part = self._owners.get(id(weight))
        return part

    def companions(self, weight: Tensor) -> int:
        """As in ``weights.Mapped``: the bias lies behind the weight."""
        part = self._owner(weight)
        return int(part is not None and isinstance(part.__dict__.get("_v_bias"), Tensor))

    @contextmanager
    def holding(self, weight: Tensor) -> Iterator[bool]:
        """As in ``weights.Mapped``."""
        part = self._owner(weight)
        signature = None if part is None else _fault(part._v)
        try:
            yield signature is not None and vbars.vbar_signature_compare(signature, part._v_signature)
        finally:
            if signature is not None:
                vbars.vbar_unpin(part._v)

    # Pages --------------------------------------------------------------------------------------------------------

    def _loaded(self) -> int:
        """Bytes of all pages that are there, of layers of other parts of the model too."""
        return sum(whose.loaded_size() for whose in {id(span[0]): span[0] for span in self._spans}.values())

    def _note(self) -> None:
        """All weights are there: what that looks like."""
        signatures = self._fault()
        self._known.note(signatures, self._loaded(), self._places, self._dicts)
        self._fitted = self._fitted or signatures is not None
        self.let_go()

    def _fault(self) -> list[Any] | None:
        """The signatures of all pages, which stay; None if they do not fit.

        Only where none is missing. To find room for many pages at once comfy-aimdo takes away more than it needs.
        """
        found = []
        for span in self._spans:
            signature = _fault(span)
            if signature is None:
                self.let_go()
                return None
            self._held.append(span)
            found.append(signature)
        return found

    def _complete(self, device: torch.device, dtype: torch.dtype) -> int | None:
        """Fills the layers whose weights are not there: how many; None if there is no room for all.

        The last one is asked first. Where the model does not fit, it is the one that has no pages, and one question is
        all that a streamed model costs. Where it fits, other models' pages go at once for all that is missing, for
        which comfy-aimdo waits for the GPU; later questions need not wait, and weights are copied meanwhile.
        """
        stale: list[nn.Module] = []
        filled, size = 0, 0
        for part in (*self._last, *self._parts):
            if (there := _is_filled(part)) is None:
                return None
            if not there and part not in stale:
                stale.append(part)
                size += part._v[2]
                if size >= CHUNK:
                    if not self._fill(stale, device, dtype):
                        return None
                    filled, stale, size = filled + len(stale), [], 0
        if stale and not self._fill(stale, device, dtype):
            return None
        return filled + len(stale)

    def _fill(self, parts: list[nn.Module], device: torch.device, dtype: torch.dtype) -> bool:
        """ComfyUI's own casts and patches, as its layers do them before they compute. False if memory is too short."""
        mm.throw_exception_if_processing_interrupted()
        self._tried = True
        try:
            if device.type == "cuda" and not self._waited:
                torch.cuda.synchronize(device)  # what ran last may still read what is about to be written
                self._waited = True
            with torch.inference_mode(), Cast(parts, device, dtype):
                pass
        except RuntimeError as error:
            if not (is_out_of_memory(error) or "VRAM" in str(error)):
                raise
            let_go(error)
            return False
        return True

    def _make_room(self, device: torch.device) -> bool:
        """Gives the memory of graphs back, if there are any, so that the weights fit; whether that may help.

        A page that something else has pushed out cannot be asked for until the model is loaded again. What pushed it
        may be gone: a capture that failed, say. So they are asked for twice in a run, where all of them fitted before.
        """
        held = graphs.cache(device).used_bytes
        if held:
            graphs.cache(device).clear()
            _IN_THE_WAY[device] = held
        elif not self._fitted or self._again == AGAIN:
            return False
        else:
            self._again += 1
        for span in self._spans:  # as ComfyUI does it when it loads the model
            span[0].prioritize()
        return True

    def _free_beside(self, device: torch.device) -> int:
        """Bytes that would be free beside all of the weights, if no other model and no graph kept any."""
        missing = max(0, self.bytes - self._loaded())
        return mm.get_free_memory(device) + graphs.cache(device).used_bytes + self._others(device) - missing

    def _lacks_room(self, device: torch.device) -> bool:
        """Whether they cannot fit, so that no page need be asked for: that may push out those of another table.

        What torch keeps for later tensors is of no use to pages.
        """
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else mm.get_free_memory(device)
        return free + graphs.cache(device).used_bytes + self._others(device) < self.bytes - self._loaded()

    def _others(self, device: torch.device) -> int:
        """Bytes of other models' pages."""
        models = [loaded.model for loaded in mm.current_loaded_models if loaded.device == device]
        pages = sum(model.loaded_size() for model in models if model is not None and model.is_dynamic())
        return max(0, pages - self._loaded())

    def no_graph(self, device: torch.device) -> str:
        """Says why there is no room for graphs beside the weights now; "" if there may be."""
        held = _IN_THE_WAY.get(device, 0)
        if mm.get_free_memory(device) + self._others(device) > held + MARGIN:
            _IN_THE_WAY.pop(device, None)
            return ""
        return say("graphs_in_the_way", held=held >> 20) if held else say("graphs_no_room")


def _fault(place: Place) -> Any:
    """The signature of its pages; None if they do not fit."""
    try:
        return vbars.vbar_fault(place)
    except RuntimeError:  # the driver has no memory although there should be some
        return None


def _is_filled(part: nn.Module) -> bool | None:
    """Whether the weights of a layer lie in its pages; None if those do not fit."""
    signature = _fault(part._v)
    if signature is None:
        return None
    vbars.vbar_unpin(part._v)
    return bool(vbars.vbar_signature_compare(signature, getattr(part, "_v_signature", None)))
