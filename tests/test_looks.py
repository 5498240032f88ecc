"""What each step of a sampling run asks in a short way: the long way gives the same."""

import functools
import inspect
import sys
import types

import pytest
import torch
from torch import nn

from tools import embed

embed.bare_pack()

from anyshape.accel.fingerprint import ModuleFingerprint  # noqa: E402
from anyshape.accel.functions_read import FunctionsRead  # noqa: E402
from anyshape.accel.key import shape_key  # noqa: E402

HERE = sys.modules[__name__]


def named(x):
    """A function that the layer's code names."""
    return x


def another(x):
    """In its place."""
    return x + 1


class Layer(nn.Module):
    def forward(self, x):
        return named(x)


@pytest.mark.parametrize("held", [False, True])
def test_a_function_in_the_place_of_one_that_code_names(monkeypatch, held) -> None:
    """And the old one again. held: what there is at first is held, as in a sampling run."""
    found = FunctionsRead([Layer])
    first = found.state()
    if held:
        found.hold()
    assert found.state() == found.state() == first
    monkeypatch.setattr(HERE, "named", another)
    second = found.state()
    assert second == found.state() != first and found.latest.endswith(".named")
    monkeypatch.undo()
    assert found.state() == found.state() == first
    monkeypatch.setattr(HERE, "named", another)
    found.release()
    assert found.state() == second


def test_a_partial_counts_and_what_comfyui_puts_there_in_each_prompt_does_not(comfy, monkeypatch) -> None:
    from comfy_execution import caching

    monkeypatch.setattr(HERE, "named", functools.partial(another))
    found = FunctionsRead([Layer])
    first = found.state()
    monkeypatch.setattr(HERE, "named", functools.partial(print))
    assert found.state() != first
    monkeypatch.setattr(HERE, "named", types.MethodType(caching.BasicCache.get_local, object()))  # its cache's callback
    found = FunctionsRead([Layer])
    first = found.state()
    monkeypatch.setattr(HERE, "named", types.MethodType(caching.BasicCache.get_local, object()))
    assert found.state() == first and not found.brought()


def test_what_was_held_is_let_go_of(monkeypatch) -> None:
    import weakref

    def passing(x):
        return x

    monkeypatch.setattr(HERE, "named", passing)
    found, lives = FunctionsRead([Layer]), weakref.ref(passing)
    found.hold()
    monkeypatch.undo()
    del passing
    assert lives() is not None
    found.release()
    assert lives() is None


class Set(nn.Sequential):
    """It has settings of its own."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.SiLU())
        self.strength, self.places = 1.0, [1, 2]
        self.last = nn.Sequential(nn.Linear(2, 2))


CHANGES = {
    "a setting": lambda model: setattr(model, "strength", 2.0),
    "a setting by its type": lambda model: setattr(model, "strength", True),
    "what lies in a list": lambda model: model.places.append(3),
    "one layer more": lambda model: model.last.append(nn.SiLU()),
    "one layer less": lambda model: model.last.__delitem__(0),
    "another layer": lambda model: model.last.__setitem__(0, nn.Linear(2, 2)),
    "a hook": lambda model: model.last[0].register_forward_hook(print),
    "another class": lambda model: setattr(model[0], "__class__", nn.SiLU),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("runs", [0, 1, 3])
def test_a_change_in_mid_run(change, runs) -> None:
    """runs: that saw no change, so what there is to watch is known from the last one."""
    model = Set()
    found = ModuleFingerprint(model)
    for _ in range(runs):
        found.release()
        assert not found.quick()
    assert not found.quick()
    CHANGES[change](model)
    assert found.quick() and found.full()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_runs(change) -> None:
    model = Set()
    found = ModuleFingerprint(model)
    for _ in range(3):
        found.release()
        assert not found.quick()
    found.release()
    CHANGES[change](model)
    assert found.quick() and found.look() and found.full()


def test_what_does_not_matter_changes_what_there_is_to_watch() -> None:
    """What ComfyUI notes of weights comes and goes; lists that came with it are watched all the same."""
    model = Set()
    found = ModuleFingerprint(model)
    for _ in range(3):
        assert not found.look()
    model[0]._v_signature = 1
    assert not found.look() and not found.look()
    model.strength = 2.0
    assert found.quick()


def test_a_part_that_is_gone_is_named() -> None:
    """The last one, so that all others are as they were."""
    model = Set()
    found = ModuleFingerprint(model)
    del model.last[0]
    assert found.full() == "a part is gone"


class Model:
    def plain(self, x, timesteps, context=None, *rest, options=None, **more):
        """As a diffusion model's forward."""

    def taken(*given):
        """It has no name for itself."""

    def after(self, x, /, y, *, z=1):
        """Some by place alone."""

    @staticmethod
    def static(x, y):
        """Of no instance."""

    @functools.wraps(plain)
    def wrapped(self, *args, **kwargs):
        """It says of itself that it is another one."""

    def told(self, x):
        """It has a signature of its own."""

    told.__signature__ = inspect.Signature([inspect.Parameter("z", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __call__(self, x, sigma):
        """As a module's."""


FORMS = {
    "a method": (Model().plain, ["x", "timesteps", "context"]),
    "a function": (Model.plain, ["self", "x", "timesteps", "context"]),
    "no names": (Model().taken, []),
    "by place": (Model().after, ["x", "y"]),
    "static": (Model.static, ["x", "y"]),
    "wrapped": (Model().wrapped, ["x", "timesteps", "context"]),
    "a signature": (Model.told, ["z"]),
    "partial": (functools.partial(Model().plain, 1), ["timesteps", "context"]),
    "an object": (Model(), ["x", "sigma"]),
    "a method of an object": (types.MethodType(Model(), 1), ["sigma"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_names_of_arguments(pack, form) -> None:
    from anyshape.accel.comfy import taping

    original, names = FORMS[form]
    assert list(taping._names(original)) == names


def test_a_size_on_the_processor_is_called_so_where_there_is_a_gpu(monkeypatch) -> None:
    key = shape_key({"x": torch.zeros(1, 4, 8, 8)})
    shown = str(key)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not shown.endswith("cpu"))
    assert str(key) == f"{shown} on cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(key) == shown


# What a patch's code reads of modules ------------------------------------------------------------------------------


class Holding:
    """A patch that has a module in an attribute."""

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return x * self.module.gain


def importing(x):
    from a_pack_of_nodes.settings import gain

    return x * gain


def importing_whole(x):
    import a_pack_of_nodes.settings

    return x * a_pack_of_nodes.settings.gain


@pytest.mark.parametrize("kind", ["closed over", "in an object", "imported", "imported whole"])
def test_a_number_in_a_module(monkeypatch, kind) -> None:
    """However code comes by the module, what it reads of it counts, and nothing else does."""
    from anyshape.accel.tape.state import look

    above, settings = types.ModuleType("a_pack_of_nodes"), types.ModuleType("a_pack_of_nodes.settings")
    above.settings, settings.gain, settings.other = settings, 1.0, 1.0
    for module in (above, settings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patch = {
        "closed over": lambda x: x * settings.gain, "in an object": Holding(settings), "imported": importing,
        "imported whole": importing_whole,
    }[kind]  # fmt: skip
    before = look(patch)
    settings.other = 2.0
    assert before is not None and look(patch) == before
    settings.gain = 2.0
    assert look(patch) != before
    settings.gain = 1.0
    assert look(patch) == before


def test_a_function_with_a_cache() -> None:
    from anyshape.accel.tape.state import look

    settings = types.SimpleNamespace(gain=1.0)

    @functools.lru_cache
    def gain():
        return settings.gain

    patch = lambda x: x * gain()  # noqa: E731
    before = look(patch)
    assert before is not None and look(patch) == before
    settings.gain = 2.0
    gain.cache_clear()
    assert look(patch) != before


def test_relative_imports_in_a_function(monkeypatch) -> None:
    from anyshape.accel.tape.code_names import imported_by, imports_of

    def relative(x):
        from . import settings
        from .settings import gain

        return x * gain * settings.gain

    assert set(imports_of(relative.__code__)) == {("", 1), ("settings", 1)}
    above, settings = types.ModuleType("a_pack_of_nodes"), types.ModuleType("a_pack_of_nodes.settings")
    for module in (above, settings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    there = {**relative.__globals__, "__package__": "a_pack_of_nodes"}
    assert {above, settings} <= set(imported_by(types.FunctionType(relative.__code__, there)))
    assert imported_by(types.FunctionType(relative.__code__, {**there, "__package__": ""})) == []
