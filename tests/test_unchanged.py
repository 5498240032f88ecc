"""Looks at patches' code in a run: the quick ones say what whole ones say, whatever changes."""

import collections
import functools
import sys
import types
import weakref

import pytest
import torch
from torch import nn

from tools import embed
from tools.driving import calls_of

embed.bare_pack()

from anyshape.accel.tape import state  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.looks import Looks  # noqa: E402
from anyshape.accel.tape.pictures import picture_of_notes  # noqa: E402
from anyshape.accel.tape.state import look_at  # noqa: E402
from anyshape.accel.tape.unchanged import Unchanged  # noqa: E402

FACTOR = 2.0


class Settings:
    """As a pack has them."""

    kind = "soft"

    def __init__(self):
        self.weight, self.names, self.table = 0.5, ["a", "b"], {"x": (1, [2.0])}


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1


class Own(nn.Module):
    """A pack's own module, that several of its patches hold."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(2, 2) for n in range(20)})
        self.scale, self.modes = 1.0, {"soft"}


class Patches:
    """Several of one pack: what they share, and what each has for itself."""

    def __init__(self):
        self.own, self.settings, self.slots, self.queue = Own(), Settings(), Slots(), collections.deque([1])
        self.tensor, self.target, self.counts = torch.ones(2), Settings(), [0]
        self.weak, self.module = weakref.ref(self.target), types.ModuleType("a_pack")
        self.module.level = 3
        number = 1

        def closed(x, default=[1.0], *, named=(2,)):  # noqa: B006 - a default that changes is what this is about
            return x * number * FACTOR + self.tensor + default[0]

        def change_number():
            nonlocal number
            number = 2

        def reads_a_module(x):
            return x * sys.modules["a_pack"].level

        self.change_number, self.closed = change_number, closed
        self.all = [closed, functools.partial(closed, default=self.counts), self.method, self.call, reads_a_module]

    def method(self, x):
        return self.own.layers["0"](x) * self.settings.weight

    def call(self, x):
        return x * self.slots.value * self.queue[0] * len(self.weak().names)


CHANGES = {
    "a number": lambda p: setattr(p.settings, "weight", 0.25),
    "an attribute more": lambda p: setattr(p.settings, "new", 1),
    "an attribute less": lambda p: delattr(p.settings, "weight"),
    "an element": lambda p: p.settings.names.__setitem__(0, "c"),
    "an element more": lambda p: p.settings.names.append("c"),
    "deep inside": lambda p: p.settings.table["x"][1].append(3.0),
    "a key": lambda p: p.settings.table.__setitem__("y", p.settings.table.pop("x")),
    "a queue": lambda p: p.queue.append(2),
    "a slot": lambda p: setattr(p.slots, "value", 2),
    "a class": lambda p: setattr(Settings, "kind", "hard"),
    "a closure": lambda p: p.change_number(),
    "a global": lambda p: setattr(sys.modules[__name__], "FACTOR", FACTOR + 1.0),
    "defaults": lambda p: setattr(p.closed, "__defaults__", ([2.0],)),
    "a default inside": lambda p: p.closed.__defaults__[0].append(1),
    "named defaults": lambda p: setattr(p.closed, "__kwdefaults__", {"named": (3,)}),
    "its code": lambda p: setattr(
        p.closed, "__code__", p.closed.__code__.replace(co_consts=(*p.closed.__code__.co_consts, 9))
    ),
    "what a partial holds": lambda p: p.counts.append(1),
    "what is held weakly": lambda p: delattr(p, "target"),
    "a module's number": lambda p: setattr(p.own, "scale", 2.0),
    "a module's set": lambda p: p.own.modes.add("hard"),
    "a module's weight": lambda p: setattr(p.own.layers["7"], "bias", None),
    "a module's form": lambda p: setattr(p.own.layers["7"].weight, "data", torch.ones(3, 3)),
    "a module's layer": lambda p: p.own.layers.__setitem__("8", nn.Linear(2, 2)),
    "a module's hook": lambda p: p.own.layers["9"].register_forward_hook(lambda *args: None),
    "a module's mode": lambda p: p.own.layers["9"].eval(),
    "a tensor's form": lambda p: setattr(p.tensor, "data", torch.ones(3)),
}


@pytest.fixture
def patches(monkeypatch):
    monkeypatch.setattr(Settings, "kind", Settings.kind)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", FACTOR)
    return Patches()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(patches, change):
    before, looks = look_at(patches.all), Looks()
    assert None not in before
    for _ in range(3):
        assert looks.changed(patches.all, before, None) is None
    change(patches)
    changed = looks.changed(patches.all, before, None)
    assert changed is not None and changed == next(
        n for n, (old, new) in enumerate(zip(before, look_at(patches.all), strict=True)) if old != new
    )
    after = look_at(patches.all)
    assert looks.changed(patches.all, after, None) is None
    assert Looks().changed(patches.all, after, None) is None


def test_later_looks_are_quick(patches, monkeypatch):
    """They go through nothing; another run's first one does again."""
    walks = calls_of(monkeypatch, state._Look, "of")
    before, looks = look_at(patches.all), Looks()
    looks.changed(patches.all, before, None)
    once = len(walks)
    for _ in range(5):
        assert looks.changed(patches.all, before, None) is None
    assert len(walks) == once
    Looks().changed(patches.all, before, None)
    assert len(walks) > once


def test_each_look_is_as_if_it_were_alone(patches):
    """Also at what patches share, and where one of them cannot be looked into."""
    alone = tuple([look_at([patch])[0] for patch in patches.all])
    assert look_at(patches.all) == look_at(patches.all) == alone
    hidden = (number for number in range(3))
    holding = functools.partial(patches.closed, default=[hidden])
    assert look_at([holding, *patches.all]) == (None, *alone)
    patches.own.hidden = hidden
    assert look_at([patches.method])[0] is None is look_at(patches.all)[2]


def test_nothing_is_kept_alive_beyond_a_run():
    patches, looks = Patches(), Looks()
    gone, before = weakref.ref(patches.own), look_at(patches.all)
    looks.changed(patches.all, before, None)
    del patches
    import gc

    gc.collect()
    assert gone() is not None  # as long as the run takes
    del looks
    gc.collect()
    assert gone() is None and before


CHANGES = {
    "a number": lambda notes: notes["lora"].update(strength=0.5),
    "a list": lambda notes: notes["patches"].append(1.0),
    "deep in a list": lambda notes: notes["patches"][0][0][0].__setitem__(0, 0.5),
    "a set": lambda notes: notes["keys"].symmetric_difference_update({"a", "b"}),
    "an object": lambda notes: setattr(notes["settings"], "weight", 0.1),
    "an object with slots": lambda notes: setattr(notes["slots"], "value", 2),
    "a tensor": lambda notes: notes["lora"].update(up=torch.ones(1)),
    "a layer": lambda notes: notes.update(layer=nn.Linear(1, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_weights_notes_is_seen(change):
    """By the quick look and by the whole one; without a change neither sees any."""
    notes = {
        "lora": {"strength": 1.0, "up": torch.ones(1)}, "patches": [([[1.0, "name"]], "key")], "keys": {"a"},
        "settings": Settings(), "slots": Slots(), "layer": nn.Linear(1, 1),
    }  # fmt: skip
    seen = Unchanged()
    before = picture_of_notes(notes, seen)
    assert seen.holds() and picture_of_notes(notes) == before
    CHANGES[change](notes)
    assert not seen.holds() and picture_of_notes(notes) != before


def test_notes_that_are_too_much_are_never_the_same():
    notes, seen = {"deep": [[[[[[[[[[[[1]]]]]]]]]]]]}, Unchanged()
    assert picture_of_notes(notes, seen) != picture_of_notes(notes) and not seen.holds()
