"""What notices that a model's code changed: hooks, methods of instances and of classes, layers, plain attributes."""

import gc
import types
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from tools import embed

embed.bare_pack()

from anyshape.accel.fingerprint import ModuleFingerprint, Watch  # noqa: E402
from anyshape.accel.foreign import foreign_code, foreign_method  # noqa: E402
from anyshape.accel.functions_read import FunctionsRead  # noqa: E402


class Layer(nn.Linear):
    """As ComfyUI's: a linear layer that may do something to its weight first."""

    def __init__(self):
        super().__init__(4, 4)
        self.weight_function, self.bias_function = [], []
        self.comfy_cast_weights = False

    def forward(self, x):
        return self.helper(super().forward(x))

    def helper(self, x):
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = Layer(), nn.LayerNorm(4)
        self.heads, self.size, self.scale, self.kind = 2, (1, 2), 1.0, torch.float16
        self.attention = torch.sigmoid

    def forward(self, x):
        return self._forward(x) * self.scale

    def _forward(self, x):
        return self.norm(self.layer(x))


@pytest.fixture
def model():
    return nn.Sequential(Block(), Block(), nn.SiLU())


def other(*args, **kwargs):
    """A pack's function."""


def class_method(name, kind=Block, new=other):
    return lambda model, patch: patch.setattr(kind, name, new, raising=False)


def a_hook(model, patch):
    model[0].layer.register_forward_hook(other)


def a_pre_hook(model, patch):
    model[0].norm.register_forward_pre_hook(lambda *args: None)


def set_on(path, name, value):
    return lambda model, patch: setattr(model.get_submodule(path), name, value)


QUICK = {  # change -> what the answer says
    "an instance's forward": (set_on("1", "forward", other), "1.forward (tests.test_fingerprint)"),
    "an instance's _forward": (set_on("0", "_forward", partial(other, 1)), "0._forward (tests.test_fingerprint)"),
    "an instance's method": (set_on("0.layer", "helper", other), "0.layer.helper (tests.test_fingerprint)"),
    "a hook": (a_hook, "0.layer._forward_hooks[0] (tests.test_fingerprint)"),
    "a hook before": (a_pre_hook, "0.norm._forward_pre_hooks[0] (tests.test_fingerprint)"),
    "a hook for every module": (
        lambda model, patch: patch.setitem(nn.modules.module._global_forward_hooks, 7, other),
        "every module.hook 0 (tests.test_fingerprint)",
    ),
    "a weight's function": (
        lambda model, patch: model[0].layer.weight_function.append(other),
        "0.layer.weight_function[0] (tests.test_fingerprint)",
    ),
    "functions": (set_on("1.layer", "bias_function", [other]), "1.layer.bias_function[0] (tests.test_fingerprint)"),
    "weights that are cast": (set_on("0.layer", "comfy_cast_weights", True), "0.layer.comfy_cast_weights (True)"),
    "another layer": (set_on("1", "layer", nn.Identity()), "1.layer (torch.nn.modules.linear)"),
    "another class": (lambda model, patch: setattr(model[0], "__class__", type("Theirs", (Block,), {})), "0.class ("),
    "a class's forward": (class_method("forward"), "Block.forward (tests.test_fingerprint)"),
    "a class's _forward": (class_method("_forward"), "Block._forward (tests.test_fingerprint)"),
    "a class's method": (class_method("helper", Layer), "Layer.helper (tests.test_fingerprint)"),
    "a setting of torch's class": (class_method("gain", nn.LayerNorm, 2.0), "LayerNorm.gain ("),
    "torch's own class": (class_method("forward", nn.LayerNorm), "LayerNorm.forward (tests.test_fingerprint)"),
    "a base's forward": (class_method("forward", nn.Linear), "Linear.forward (tests.test_fingerprint)"),
    "every module's call": (class_method("__call__", nn.Module), "Module.__call__ (tests.test_fingerprint)"),
    "a new attribute": (set_on("0", "patched", 1), "0.patched (1)"),
}
FULL = {
    "a number": (set_on("0", "heads", 3), "0.heads (3)"),
    "a truth for a number": (set_on("1", "scale", True), "1.scale (True)"),
    "a tuple": (set_on("1", "size", (1, 3)), "1.size ((1, 3))"),
    "a dtype": (set_on("0", "kind", torch.bfloat16), "0.kind (torch.bfloat16)"),
    "training": (lambda model, patch: model[1].norm.eval(), "1.norm.training (False)"),
    "a function": (set_on("1", "attention", torch.tanh), "1.attention ("),
}


@pytest.mark.parametrize("runs", [0, 3])
@pytest.mark.parametrize("change", QUICK)
def test_a_quick_look_sees(model, monkeypatch, change, runs) -> None:
    """And a full one says what it was, and whose. runs: that saw no change, so what there is to watch is known."""
    make, words = QUICK[change]
    found, watch = ModuleFingerprint(model), Watch(list(model.modules()))
    for _ in range(runs):
        found.release()
        assert not found.look()
    assert not (found.quick() or watch.changed()) and found.full() == found.changed() == ""
    make(model, monkeypatch)
    assert watch.changed() and found.quick()
    assert words in found.changed() and words in found.full()


@pytest.mark.parametrize("change", FULL)
def test_a_full_look_sees(model, monkeypatch, change) -> None:
    make, words = FULL[change]
    found = ModuleFingerprint(model)
    assert found.full() == found.full() == ""  # the second one compares parts as a whole
    make(model, monkeypatch)
    assert words in found.full()


def test_a_forward_in_place_of_the_one_left_behind(model) -> None:
    """ComfyUI leaves the class's own forward as an attribute, so that their number does not change."""
    model[1].forward = model[1].forward  # left behind
    found = ModuleFingerprint(model)
    model[1].forward = types.MethodType(other, model[1])
    assert "1.forward" in found.changed()


def test_a_hook_in_place_of_another(model) -> None:
    handle = model[0].register_forward_hook(lambda *args: None)
    found = ModuleFingerprint(model)
    handle.remove()
    model[0].register_forward_hook(lambda *args: None)
    assert "0._forward_hooks[0]" in found.changed()


def test_a_new_function_at_the_old_ones_address(model) -> None:
    """Python gives memory out again at once, so an address alone says nothing."""
    found = None
    for number in range(50):
        model[0].forward = partial(other, number)
        assert found is None or "0.forward" in found.full()
        found = ModuleFingerprint(model)
        found.release()
        del model[0].forward
        assert "0.forward is gone" in found.full()


def test_what_weights_do_is_no_change(model) -> None:
    found = ModuleFingerprint(model)
    model[0].layer.weight = nn.Parameter(torch.zeros(4, 4))
    model[0].layer.weight.data = torch.ones(4, 4)
    model[1].scale = float("1.0")  # equal, another object
    model.requires_grad_(False)
    model(torch.zeros(1, 4))
    assert found.full() == "" == found.changed()


def test_what_comfyui_notes_of_a_load_is_no_change(model) -> None:
    """On a VAE and a ControlNet it lies on the module itself, and changes while that runs (DynamicVRAM)."""
    model.dynamic_pins, model.dynamic_vbars, model.dynamic_patchers = {}, {}, set()
    model.model_loaded_weight_memory = 0
    found = ModuleFingerprint(model)
    model.dynamic_pins["cuda"] = {"active": True}
    model.dynamic_vbars["cuda"], model.model_loaded_weight_memory = object(), 1 << 20
    model.dynamic_patchers.add(1)
    assert not found.quick() and found.full() == ""


def test_an_equal_setting_is_no_change(model) -> None:
    """A forward may note a size at each call. Another size is a change."""
    model[0].size, model[0].scale = (10, 20), 1000.5
    found = ModuleFingerprint(model)
    model[0].size, model[0].scale = tuple([10, 20]), float("1000.5")
    assert not found.quick()
    model[0].size = (10, 21)
    assert found.quick() and "0.size" in found.full()


def test_what_lies_in_a_list_or_an_object(model) -> None:
    """A quick look sees it in every part, and a full one says where."""
    model[1].norm.skipped, model[0].own = [1, [2]], types.SimpleNamespace(theta={"x": 1})
    found = ModuleFingerprint(model)
    assert not found.quick() and found.full() == found.full() == ""
    model[1].norm.skipped[1].append(3)
    assert found.quick() and "1.norm.skipped" in found.full()
    model[1].norm.skipped[1].pop()
    assert not found.quick() and found.full() == ""
    model[0].own.theta["x"] = True
    assert found.quick() and "0.own" in found.full()


def test_another_empty_list_is_no_change(model) -> None:
    """ComfyUI puts one there whenever it loads a model."""
    found = ModuleFingerprint(model)
    model[0].layer.weight_function = []
    assert found.quick() and found.changed() == "" and not found.quick()
    model[0].layer.weight_function.append(other)
    assert "weight_function[0]" in found.changed()


def test_nothing_is_kept_alive() -> None:
    model = nn.Sequential(Block(), Block())
    model[0].forward = model[0].forward  # ComfyUI leaves such behind
    model[1].register_forward_hook(lambda *args: None)
    found = ModuleFingerprint(model)
    found.release()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and found.quick() and found.full() == "the module is gone"


def test_the_first_look_after_release_is_a_full_one(model) -> None:
    found = ModuleFingerprint(model)
    found.release()
    assert not found.quick()
    found.release()
    model[0].heads = 5
    assert found.quick() and "0.heads (5)" in found.full()


@pytest.mark.parametrize("change", QUICK | FULL)
def test_another_module_of_the_same_code_fits(monkeypatch, change) -> None:
    """Also when the first one is gone; not one in which anything differs."""
    first, again, changed = (nn.Sequential(Block(), Block(), nn.SiLU()) for _ in range(3))
    found = ModuleFingerprint(first)
    assert found.is_of(first) and not found.is_of(again)
    found.release()
    gone = weakref.ref(first)
    del first
    assert gone() is None and found.fits(again)
    (QUICK | FULL)[change][0](changed, monkeypatch)
    assert not found.fits(changed)


def test_hooked_and_replaced_parts(model, monkeypatch) -> None:
    model[1].forward = model[1].forward  # left behind
    model[0].heads = 5
    own = brought(model)  # the classes themselves are of no package that is known
    hook = model[0].layer.register_forward_hook(other)
    assert brought(model) - own == {"0.layer._forward_hooks[0] of tests.test_fingerprint"}
    hook.remove()
    model[1].norm.forward = other
    assert brought(model) - own == {"1.norm.forward of tests.test_fingerprint"}
    del model[1].norm.forward
    assert brought(model) == own
    monkeypatch.setitem(nn.modules.module._global_forward_hooks, 7, other)
    assert brought(model) - own == {"every module.hook 0 of tests.test_fingerprint"}


def brought(model) -> set[str]:
    return {name for name, _ in foreign_code(model, FunctionsRead([]))}


def test_parts_are_torchs_in_their_order(model) -> None:
    """A part that is there twice is one, and a place may be empty."""
    from anyshape.accel.tape.named_tensors import PartsByPath, modules_of, parts_of

    model.append(model[0])
    model[0].register_module("nothing", None)
    assert parts_of(model) == list(model.modules()) == [part for _, part in modules_of(model)]
    found = PartsByPath(model)
    assert all(found[path] is part for path, part in modules_of(model))
    for path in ("0.nothing", "0.other", "9", "0.nothing.layer"):
        with pytest.raises(KeyError):
            found[path]


@pytest.mark.parametrize("known", [False, True])
def test_a_tensor_among_attributes_is_a_weight(known) -> None:
    """known: which ones there are is known of the last run."""
    from anyshape.accel.weights import WeightWatch

    class Own(list):
        """Of a kind that nobody knows."""

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].table, model[1].other = torch.ones(2), Own()
    found = ModuleFingerprint(model)
    assert not found.look() and found.tensors == [(1, "table")]
    watch = WeightWatch(model, found.parts, found.tensors) if known else WeightWatch(model)
    before = watch.fingerprint()
    assert watch.fingerprint() == before
    model[0].table = torch.ones(2)
    assert watch.fingerprint() != before


def test_a_forward_while_another_thread_records_is_no_change(model) -> None:
    from anyshape.accel.block_forwards import Blocks

    blocks = Blocks()
    blocks.paths, own = ["0"], brought(model)
    with blocks.ours(model, lambda path, block, own, args, kwargs: own(*args, **kwargs)):
        assert "forward" in model[0].__dict__ and brought(model) == own


# Classes that were replaced before anybody looked -----------------------------------------------------------------


def test_a_class_with_its_own_methods() -> None:
    assert {foreign_method(kind) for kind in (Block, Layer, nn.Linear, nn.Conv2d, nn.GroupNorm, nn.Module, int)} == {""}


@pytest.mark.parametrize(("kind", "base"), [(nn.GroupNorm, nn.GroupNorm), (Layer, nn.Linear), (nn.SiLU, nn.Module)])
def test_a_method_from_elsewhere(monkeypatch, kind, base) -> None:
    monkeypatch.setattr(base, "forward", other)
    assert foreign_method(kind) == f"{base.__name__}.forward of tests.test_fingerprint"
    monkeypatch.undo()
    assert foreign_method(kind) == ""


def test_a_method_that_is_no_function(monkeypatch) -> None:
    monkeypatch.setattr(nn.GroupNorm, "forward", partial(other))
    assert "GroupNorm.forward" in foreign_method(nn.GroupNorm)


def test_classes_of_one_name_are_not_taken_for_one_another():
    """ComfyUI makes one for each kind of layer that it is asked for (Stable Cascade's norms)."""

    def made():
        class Norm(nn.LayerNorm):
            def forward(self, x):
                return super().forward(x)

        return Norm(4)

    model = nn.Sequential(made(), made())
    seen = ModuleFingerprint(model)
    assert seen.full() == ""
    type(model[1]).forward = other
    assert "Norm 2.forward" in seen.full()
