"""Steps on weights that are copied to the GPU as they are needed, and go after the last step that they came for.

So a program runs where its model's weights do not fit, in the memory that ComfyUI's own layers would need.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass

from torch import Tensor, nn

from .binding import NotBound, WeightForm, spread
from .layer_calls import LayerCall
from .named_tensors import MAPPED, PartsByPath, inner_of
from .steps import Called, Launched

# In the body the weights and biases of these parts of a model are there.
Fetch = Callable[[Sequence[nn.Module]], AbstractContextManager[Sequence[tuple[Tensor | None, Tensor | None]]]]
Ours = Launched | Called  # steps as they are made
SMALL = 1 << 20  # bytes of a weight that is kept for a later step, so that its layer need not be fetched again


@dataclass(frozen=True)
class Sources:
    """What the steps of a program may read of a model, by slot.

    weights: (form, whether it may lie channels last). made: (what makes it, of which slots). wide: (of which, rows).
    """

    weights: dict[int, tuple[WeightForm, bool]]
    made: dict[int, tuple[Callable[..., Tensor], tuple[int, ...]]]
    wide: dict[int, tuple[int, int]]


class ReadyStep:
    """A step that reads what is made of weights that are there. views: what takes parts of them, in order."""

    def __init__(self, need: "_Need", of: Sources, wide: Sequence[tuple[int, int, int]]) -> None:
        self._step, self._views, self._wide = need.step, need.views, wide
        self._made = [(slot, *of.made[slot]) for slot in need.slots if slot in of.made]
        lent = (slot for view in need.views for slot in view.outputs if slot >= 0)
        self.outputs = need.step.outputs
        self.free = (*need.step.free, *(slot for slot, *_ in (*self._made, *wide)), *lent)

    def __call__(self, values: list[Tensor | None]) -> None:
        """Runs the step."""
        for slot, make, of in self._made:
            values[slot] = make(*(values[each] for each in of))
        spread(values, self._wide)
        for view in self._views:
            view(values)
        self._step(values)


class FetchedSteps:
    """Steps in a row, with the weights that they read: of any such module, until they are ``on`` one.

    Their layers are fetched at once, and their weights stay until the last of them is done. kept: slots of small
    weights of the same layers, which later steps read.
    """

    outputs: tuple[int, ...] = ()  # some of which are gone when the last step is done
    free: tuple[int, ...] = ()

    def __init__(self, needs: Sequence["_Need"], there: set[int], kept: Sequence[int], of: Sources) -> None:
        read = list(dict.fromkeys(slot for need in needs for slot in need.slots))
        weights = [slot for slot in dict.fromkeys((*kept, *read)) if slot in of.weights and slot not in there]
        self._layers = layers = list(dict.fromkeys(of.weights[slot][0].leaf.module for slot in weights))
        self._weights = [
            _Place(slot, layers.index(form.leaf.module), form, turned, slot in kept)
            for slot, (form, turned) in ((slot, of.weights[slot]) for slot in weights)
        ]
        self._wide = [(slot, *of.wide[slot]) for slot in read if slot in of.wide]
        self._gone = [slot for slot in weights if slot not in kept] + [slot for slot, *_ in self._wide]
        self._steps = [need.ready(of, ()) for need in needs]
        self.parts: list[nn.Module] = []
        self._fetch: Fetch

    def on(self, modules: PartsByPath, fetch: Fetch) -> "FetchedSteps":
        """The steps on the weights of these modules. It holds them."""
        found = copy(self)
        found.parts, found._fetch = [modules[layer] for layer in self._layers], fetch
        return found

    def __call__(self, values: list[Tensor | None]) -> None:
        """Runs the steps. Raises ``NotBound`` where a weight is not as it was recorded."""
        with self._fetch(self.parts) as found:
            for place in self._weights:
                values[place.slot] = place.weight(found)
            spread(values, self._wide)
            for step in self._steps:
                step(values)
                for slot in step.free:
                    values[slot] = None
        for slot in self._gone:
            values[slot] = None


class _Place:
    """Where a step finds a weight among what it has fetched. part: the number of its layer."""

    __slots__ = ("_form", "_inner", "_kept", "_part", "_turned", "_which", "slot")

    def __init__(self, slot: int, part: int, form: WeightForm, turned: bool, kept: bool) -> None:
        name, *self._inner = form.leaf.name.split(":")
        self.slot, self._part, self._which = slot, part, MAPPED.index(name)
        self._form, self._turned, self._kept = form, turned, kept

    def weight(self, found: Sequence[tuple[Tensor | None, Tensor | None]]) -> Tensor:
        """The weight. Raises ``NotBound``."""
        tensor, form = found[self._part][self._which], self._form
        if self._inner or type(tensor) is not Tensor:
            tensor = inner_of(tensor, self._inner)
        same = tensor.shape == form.shape and tensor.dtype == form.dtype
        if not (same and (self._turned or tensor.stride() == form.stride)):
            raise NotBound(f"the weight {form.leaf.module}.{form.leaf.name} has changed its form")
        return tensor.clone() if self._kept else tensor


@dataclass
class _Need:
    """What a step reads of the weights: slots, and steps that take parts of them, in order."""

    step: Ours
    slots: list[int]
    views: list[Ours]

    def ready(self, of: Sources, wide: Sequence[int]) -> Ours | ReadyStep:
        """The step. wide: slots of what it must make itself of a weight, in many rows."""
        if not (self.views or wide or not of.made.keys().isdisjoint(self.slots)):
            return self.step
        return ReadyStep(self, of, [(slot, *of.wide[slot]) for slot in wide])


AnyStep = Ours | ReadyStep | FetchedSteps


def with_fetches(
    steps: Sequence[Ours], sources: Sources, lent: frozenset[int], fetched: Container[str]
) -> tuple[list[AnyStep], set[int]]:
    """The steps, those that read weights with these; and the slots that are filled for them alone.

    fetched: paths of layers. lent: slots of what lies in the memory of a weight; what gives such runs before each step
    that reads it. Raises ``NotBound`` where it reads something else, too.
    """
    mapped = {slot: form for slot, (form, _) in sources.weights.items() if form.leaf.name.startswith(MAPPED)}
    layers = {slot: form.leaf.module for slot, form in mapped.items() if form.leaf.module in fetched}
    filled = set(layers) | {slot for slot, (_, of) in sources.made.items() if not layers.keys().isdisjoint(of)}
    filled |= {slot for slot, (of, _) in sources.wide.items() if of in layers}
    sizes = {slot: math.prod(mapped[slot].shape) * mapped[slot].dtype.itemsize for slot in layers}
    return list(_together(list(_needs(steps, sources, lent, set(layers), filled)), layers, sizes, sources)), filled


def _together(
    needs: Sequence[_Need], layers: Mapping[int, str], sizes: Mapping[int, int], sources: Sources
) -> Iterator[AnyStep]:
    """The steps, those together whose layers are fetched at once. layers, sizes: of weights, by slot.

    The host needs a time per fetch, which small layers feel. So as many are fetched at once as fit into the memory that
    the largest layer but one needs: of ComfyUI's two buffers, which take turns, it lets one alone grow for the largest.
    """
    last = {slot: place for place, need in enumerate(needs) for slot in need.slots if slot in layers}
    slots: dict[str, list[int]] = {}
    for slot in last:
        slots.setdefault(layers[slot], []).append(slot)
    needed = {layer: sum(sizes[slot] for slot in theirs) for layer, theirs in slots.items()}
    room = sorted((0, 0, *needed.values()))[-2]
    there: set[int] = set()  # small weights whose layer an earlier step has fetched
    begin = 0
    while begin < len(needs):
        own, end, size = dict[str, None](), begin, 0
        for place in range(begin, len(needs)):
            if isinstance(needs[place].step.run, LayerCall):  # it fetches its own, into the same memory
                break
            read = dict.fromkeys(layers[slot] for slot in needs[place].slots if slot in layers and slot not in there)
            more = sum(needed[layer] for layer in read if layer not in own)
            if (more and own and size + more > room) or not (own or read):
                break
            if read:
                own, end, size = own | read, place + 1, size + more
        if own:
            later = [slot for layer in own for slot in slots[layer] if slot not in there and last[slot] >= end]
            kept = [slot for slot in later if sizes[slot] <= SMALL]
            yield FetchedSteps(needs[begin:end], there, kept, sources)
            there.update(kept)
            begin = end
        else:
            yield needs[begin].ready(sources, [slot for slot in needs[begin].slots if slot in sources.wide])
            begin += 1


def _needs(
    steps: Sequence[Ours], sources: Sources, lent: frozenset[int], weights: set[int], filled: set[int]
) -> Iterator[_Need]:  # fmt: skip
    """Of each step but those that take parts of weights. Raises ``NotBound``."""
    lenders: dict[int, Ours] = {}

    def below(slot: int) -> Iterator[int | Ours]:
        """What must be there before a step reads this slot, in order."""
        if slot in lenders:
            for each in lenders[slot].reads():
                yield from below(each)
            yield lenders[slot]
        elif slot in filled:
            of = sources.made[slot][1] if slot in sources.made else sources.wide.get(slot, ())[:1]
            yield from (each for each in of if each in weights)
            yield slot

    for step in steps:
        read = list(dict.fromkeys(step.reads()))
        theirs = [slot for slot in read if slot in filled or slot in lenders]
        if theirs and not lent.isdisjoint(step.outputs):
            if len(theirs) < len(read):
                raise NotBound("a part of a weight is taken by what a value decides")
            lenders.update((slot, step) for slot in step.outputs if slot >= 0)
            continue
        if theirs and isinstance(step.run, LayerCall):
            raise NotBound("a layer of another pack is given a weight")
        needed = [each for slot in theirs for each in below(slot)]
        slots = dict.fromkeys(each for each in needed if isinstance(each, int))
        views = {id(each): each for each in needed if not isinstance(each, int)}
        yield _Need(step, list(slots), list(views.values()))
