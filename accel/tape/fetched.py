"""Steps on weights that are copied to the GPU as they are needed: each step has its own there, which go after it.

So a program runs where its model's weights do not fit, in the memory that ComfyUI's own layers would need.
"""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass

from torch import Tensor, nn

from .binding import NotBound, WeightForm, spread
from .named_tensors import MAPPED, PartsByPath, inner_of
from .steps import Called, Launched

# In the body the weights and biases of these parts of a model are there.
Fetch = Callable[[Sequence[nn.Module]], AbstractContextManager[Sequence[tuple[Tensor | None, Tensor | None]]]]
Ours = Launched | Called
SMALL = 1 << 20  # bytes of a weight that is kept for a later step, so that its layer need not be fetched again


@dataclass(frozen=True)
class Sources:
    """What the steps of a program may read of a model, by slot.

    weights: (form, whether it may lie channels last). made: (what makes it, of which slots). wide: (of which, rows).
    """

    weights: dict[int, tuple[WeightForm, bool]]
    made: dict[int, tuple[Callable[..., Tensor], tuple[int, ...]]]
    wide: dict[int, tuple[int, int]]


class FetchedStep:
    """A step, with the weights that it reads: of any such module, until it is ``on`` one.

    slots: of those, and of what is made of them. views: what takes parts of them, in order. kept: slots of small
    weights of the same layers, which later steps read.
    """

    def __init__(self, step: Ours, slots: list[int], views: list[Ours], kept: list[int], of: Sources) -> None:
        lent = [slot for view in views for slot in view.outputs if slot >= 0]
        self._step, self._views = step, views
        self.outputs, self.free = step.outputs, (*step.free, *(each for each in slots if each not in kept), *lent)
        weights = [slot for slot in dict.fromkeys((*kept, *slots)) if slot in of.weights]
        self._layers = layers = list(dict.fromkeys(of.weights[slot][0].leaf.module for slot in weights))
        self._weights = [
            _Place(slot, layers.index(form.leaf.module), form, turned, slot in kept)
            for slot, (form, turned) in ((slot, of.weights[slot]) for slot in weights)
        ]
        self._made = [(slot, *of.made[slot]) for slot in slots if slot in of.made]
        self._wide = [(slot, *of.wide[slot]) for slot in slots if slot in of.wide]
        self.parts: list[nn.Module] = []
        self._fetch: Fetch

    def on(self, modules: PartsByPath, fetch: Fetch) -> "FetchedStep":
        """The step on the weights of these modules. It holds them."""
        found = copy(self)
        found.parts, found._fetch = [modules[layer] for layer in self._layers], fetch
        return found

    def __call__(self, values: list[Tensor | None]) -> None:
        """Runs the step. Raises ``NotBound`` where a weight is not as it was recorded."""
        if not self.parts:
            self._run(values)
            return
        with self._fetch(self.parts) as found:
            for place in self._weights:
                values[place.slot] = place.weight(found)
            self._run(values)

    def _run(self, values: list[Tensor | None]) -> None:
        for slot, make, of in self._made:
            values[slot] = make(*(values[each] for each in of))
        if self._wide:
            spread(values, self._wide)
        for view in self._views:
            view(values)
        self._step(values)


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


def with_fetches(
    steps: Sequence[Ours], sources: Sources, lent: frozenset[int], fetched: Container[str]
) -> tuple[list[Ours | FetchedStep], set[int]]:
    """The steps, each with its weights; and the slots that are filled for a step alone. fetched: paths of layers.

    lent: slots of what lies in the memory of a weight; what gives such runs before each step that reads it. Raises
    ``NotBound`` where it reads something else, too.
    """
    mapped = {slot: form for slot, (form, _) in sources.weights.items() if form.leaf.name.startswith(MAPPED)}
    layers = {slot: form.leaf.module for slot, form in mapped.items() if form.leaf.module in fetched}
    filled = set(layers) | {slot for slot, (_, of) in sources.made.items() if not layers.keys().isdisjoint(of)}
    filled |= {slot for slot, (of, _) in sources.wide.items() if of in layers}
    needs = list(_needs(steps, sources, lent, set(layers), filled))
    last = {slot: place for place, need in enumerate(needs) for slot in need.slots if slot in layers}
    small: dict[str, list[int]] = {}
    for slot in last:
        if math.prod(mapped[slot].shape) * mapped[slot].dtype.itemsize <= SMALL:
            small.setdefault(layers[slot], []).append(slot)
    there: set[int] = set()  # small weights whose layer an earlier step has fetched
    found: list[Ours | FetchedStep] = []
    for place, need in enumerate(needs):
        left = [slot for slot in need.slots if slot not in there]
        own = dict.fromkeys(layers[slot] for slot in left if slot in layers)
        kept = [slot for layer in own for slot in small.get(layer, ()) if slot not in there and last[slot] > place]
        there.update(kept)
        fetching = left or need.views
        found.append(FetchedStep(need.step, left, need.views, kept, sources) if fetching else need.step)
    return found, filled


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
        needed = [each for slot in theirs for each in below(slot)]
        slots = dict.fromkeys(each for each in needed if isinstance(each, int))
        views = {id(each): each for each in needed if not isinstance(each, int)}
        yield _Need(step, list(slots), list(views.values()))
