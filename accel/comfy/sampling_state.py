"""What is known of one model during a sampling run: its code, where its weights are, and whether they stay there."""

import itertools
from collections import Counter
from collections.abc import Sequence
from types import FunctionType

import torch
from torch import nn

from ..foreign import first_kept, states_of
from ..functions_read import FunctionsRead
from ..key import ShapeKey
from ..reasons import say
from ..tape.companions import put_beside
from ..tape.looks import Looks
from ..tape.named_tensors import PartsByPath, resolve
from ..tape.untouched import UNTOUCHED
from ..tape.values import Weight
from ..weights import ChannelsLastWeights, WeightWatch
from . import dynamic
from .known_code import Fingerprints
from .steady_blocks import SteadyBlocks, brought_into_blocks
from .streaming import StreamedWeights
from .surroundings import surroundings

MOST_CHANGES = 3  # of a model in one run, at calls of one size: each costs a recording
NUMBERS = itertools.count(1)  # of runs


class SamplingState:
    """What is known of one model during one sampling run. Holds the model: dropped when the run ends.

    layout: lays weights of convolutions out until then; outside a run there is none. skips: steps may be skipped in it.
    beside: the networks of patches, which count as parts of the model.
    """

    def __init__(
        self, model: nn.Module, fingerprints: Fingerprints, layout: ChannelsLastWeights | None = None,
        skips: bool = False, beside: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        put_beside(model, beside)
        self.has_companions = bool(beside)
        self.model, self._layout, self.number = model, layout, next(NUMBERS)
        self._laid: tuple[frozenset[Weight], int] = frozenset(), 0  # which weights, and the fingerprint since
        self._fingerprints, self.looks = fingerprints, Looks()
        self._around = 0  # see ``surroundings``
        self._changes: Counter[ShapeKey] = Counter()  # of the model in this run, by the calls that met them
        self._restless = ""  # why it is not recorded any more
        self._steady: SteadyBlocks | None = None  # what of it may be, even so
        self._stream: StreamedWeights | None = None
        self._moves: bool | None = None  # whether it still changes, once somebody looked
        self._look(model)
        if fingerprints.restless and not skips and _has(model, fingerprints.restless):
            # as in the run before; but where steps are skipped, the same ones shall be
            self._take_blocks()
        self._fresh = True  # the call that this is made in need not look again

    def _look(self, model: nn.Module) -> None:
        self._structure, self._functions = self._fingerprints.of(model), self._fingerprints.functions()
        self.foreign, replaced = self._fingerprints.foreign(model), self._fingerprints.replaced  # see ``foreign_code``
        self.read, self._turns = self._fingerprints.read, self._fingerprints.read.turns
        self.within_blocks = brought_into_blocks(model) if self.foreign else []
        self.calls_within = bool(self.within_blocks) or self._fingerprints.brings_functions()
        self._replaced = say("torch_replaced", name=replaced) if replaced else ""
        parts, tensors = self._fingerprints.parts(model)  # one walk through the model is enough
        self._watch, self._stream = WeightWatch(model, parts, tensors), None
        self.mapped = dynamic.mapped(model, parts, self._fingerprints.pages)
        self._names = self.mapped.names if self.mapped is not None else ()
        if self._layout is not None:
            self._layout.mapped = self.mapped
            self._fingerprints.hold()  # there will be many looks

    @property
    def _barred(self) -> str:
        """Why nothing of this model may be recorded, wherever its weights are."""
        return self._replaced or (self._restless if self._steady is None else "")

    def obstacle(self, key: ShapeKey, dtype: torch.dtype, streams: str = "") -> str:
        """Says why nothing of this model may be recorded or replayed; "" if its weights are there, until ``let_go``.

        dtype: of the model's inputs. streams: what ``streams`` said at this call.
        """
        if why := self._barred or streams:
            return why
        if self.mapped is None:
            return ""
        shortages = self._fingerprints.shortages
        return self.mapped.ready(key.device, dtype, shortages.expected(key), shortages.unfit)

    def streams(self, device: torch.device) -> str:
        """Why ComfyUI still streams the weights, or "". Asked before any look at the model, which takes longer."""
        return self.mapped.still_streamed(device) if self.mapped is not None else ""

    @property
    def is_streaming(self) -> bool:
        """Whether ComfyUI streamed the weights at the last look."""
        return self.mapped is not None and self.mapped.did_not_fit

    @property
    def may_fetch(self) -> bool:
        """Whether steps of programs may fetch weights, as far as that is known."""
        return self._stream is None or not self._stream.ended

    def stream(self, device: torch.device, dtype: torch.dtype, streams: str) -> StreamedWeights | None:
        """The weights that ComfyUI streams, for programs that fetch them; None if none may run. streams: as above."""
        if self._barred or not (streams or self.is_streaming):
            return None
        if self._stream is None:  # it is not known yet
            parts = self.mapped.parts()
            self._stream = StreamedWeights(self.model, parts, device)
            self._stream.ended = not dynamic.maps_to(parts.values(), device)
        self._stream.dtype, self._stream.why = dtype, self.mapped.fetched()
        self._stream.why_eager = self.mapped.streamed()
        return None if self._stream.ended else self._stream

    def hold(self, key: ShapeKey) -> str:
        """Has the weights stay where they are, after ComfyUI's own layers have run; why they are gone, or ""."""
        if self.mapped is None or self.mapped.hold():
            return ""
        why = self.mapped.streamed()
        self._fingerprints.shortages.add(key, self.mapped.free or 0, why)
        return why

    def let_go(self) -> None:
        """The call is over, or ComfyUI's own forward is about to run."""
        self._fresh = False
        if self.mapped is not None:
            self.mapped.let_go()

    def no_graph(self, device: torch.device) -> str:
        """Says why no graph may be captured now; "" if one may."""
        return self.mapped.no_graph(device) if self.mapped is not None else ""

    def is_elsewhere(self, device: torch.device) -> bool:
        """Whether weights lie on another device, from which each call fetches them."""
        parts, _ = self._fingerprints.parts(self.model)
        return any(weight.device != device for weight in dynamic.unmapped(parts))

    def fetches(self, device: torch.device, block: nn.Module) -> bool:
        """Whether weights of ``block`` lie on another device. Of a model that is mapped in, that says nothing."""
        return self.mapped is None and any(weight.device != device for weight in block.parameters())

    def rest(self, key: ShapeKey, why: str) -> None:
        """Such calls gain nothing, and why. It holds while part of the weights lies elsewhere: see ``Fingerprints``."""
        if self.mapped is None and self.is_elsewhere(key.device):
            self._fingerprints.rest(key, why, dynamic.unmapped(self._fingerprints.parts(self.model)[0]))

    def weights(self) -> int:
        """Returns where the weights are now."""
        return self._watch.fingerprint()

    def lay_out(self, wanted: frozenset[Weight], known: int) -> int:
        """Has these weights lie channels last, without any all of them as ComfyUI has them; the new fingerprint."""
        laid, since = self._laid
        if self._layout is None or (wanted <= laid and known == since if wanted else not laid):
            return known
        if wanted:
            modules = PartsByPath(self.model)
            self._layout.permute(resolve(modules, weight) for weight in wanted)
        else:
            self._layout.restore()
        self._laid = (laid | wanted if wanted else wanted), self.weights()
        return self._laid[1]

    def structure(self, model: nn.Module, key: ShapeKey) -> int:
        """The model's code at a call of this key, and what else decides its result besides inputs and weights."""
        if self._steady is not None:
            self._stay_with_blocks()
        elif not (self._fresh or self._restless) and self._has_changed():
            self._meet_change(model, key)
        if self._turns != self.read.turns:  # what lies in the function that is there now is to be compared
            self.foreign, self._turns = self._fingerprints.foreign(model), self.read.turns
        self._fresh, self._around = False, surroundings()
        return hash((self._structure, self._functions, self._names, self._around, torch.is_autocast_enabled()))

    def _meet_change(self, model: nn.Module, key: ShapeKey) -> None:
        before, of_model = (self._structure, self._functions), self._fingerprints.changes()
        change = of_model or self._fingerprints.latest()
        untouched = of_model and UNTOUCHED.suppose(self._fingerprints.settings_changed())
        self._look(model)
        self._changes[key] += (self._structure, self._functions) != before
        place = change.partition(" (")[0]  # without what it is now
        again = self._changes[key] and place and place == self._fingerprints.restless
        if not untouched and (self._changes[key] > MOST_CHANGES or again):  # else the next recording shows it
            self._restless = say("changes_itself", change=change)
            self._fingerprints.restless, self._fingerprints.why = place, self._restless
            if of_model:
                self._take_blocks()

    def _take_blocks(self) -> None:
        """From now on only blocks are recorded, if there are any that what changes at each call does not touch."""
        known = self._fingerprints
        if self._layout is None or known.brings_functions():
            return
        steady = SteadyBlocks(self.model, known.restless)
        if len(steady.blocks):
            self._steady, self._restless = steady, known.why
            self._structure = hash(("blocks", known.blocks.number(steady)))

    def _stay_with_blocks(self) -> None:
        """Looks at the blocks; once they change as well, nothing is recorded any more in this run."""
        if not self._fresh:
            self._moves = self._moves or self._fingerprints.changed()
        if self._fingerprints.functions() != self._functions or self._steady.look():
            self._steady.release()
            self._steady = None

    @property
    def in_blocks(self) -> tuple[str, frozenset[str]]:
        """(Why blocks alone may be recorded, or ""; the paths of those that may not be)."""
        return (self._restless, self._steady.left) if self._steady is not None else ("", frozenset())

    def altered(self) -> bool:
        """Whether what the model's code calls is another one than when the forward began.

        A patch that runs has put it there, around a block of the model's, say.
        """
        return not self._fingerprints.holds() or surroundings() != self._around

    def _has_changed(self) -> bool:
        return self._fingerprints.functions() != self._functions or self._fingerprints.changed()

    def foreign_states(self) -> tuple:
        """What other packs' code in the model keeps, now."""
        return states_of(self.foreign, self.model)

    def named(self, patches: Sequence[FunctionType]) -> frozenset[str] | None:
        """What code in the model and in these patches names; None if a pack has more than classes in it."""
        if not all(isinstance(code, type) for _, code in self.foreign):
            return None
        return self.read.names | FunctionsRead((), patches).names if patches else self.read.names

    def kept(self, before: tuple) -> str:
        """Why a forward is not to be repeated with less of it: what it changed or kept since ``before``; else ""."""
        if name := first_kept(self.foreign, before, self.model):
            return say("foreign_state", name=name)
        change = self.changed()
        return say("changes_itself", change=change) if change else ""

    def changed(self) -> str:
        """What a forward changed of the model itself: a counter, say."""
        return self._fingerprints.changes()

    def close(self) -> None:
        """Ends the sampling run."""
        self.let_go()
        if self._layout is not None:
            self._layout.restore()
        if self._steady is not None:
            self._steady.release()
        if self._moves is False:
            self._fingerprints.restless = ""  # the next run may record all of it
        self._fingerprints.release()
        put_beside(self.model, ())


def _has(model: nn.Module, place: str) -> bool:
    """Whether a part of the model has the attribute at ``place``, as ``fingerprint.shown`` names it."""
    path, _, name = place.rpartition(".")
    try:
        return name in vars(PartsByPath(model)[path])
    except KeyError:
        return False
