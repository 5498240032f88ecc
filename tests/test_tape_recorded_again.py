"""What is recorded again and what is not, through ComfyUI: weights, code, options, attention, threads, keys. CPU.

``recordings`` counts them, and each result is eager's.
"""

import functools
import gc
import types
import weakref

import pytest
import torch

from tools.driving import FLUX_RUN, SMALL_FLUX, compiled, in_threads, sample_tiny
from tools.oracles import reasons
from tools.patching import choose_attention, reading

pytestmark = pytest.mark.usefixtures("clean_stats")


# Weights ----------------------------------------------------------------------------------------------------------


def test_weights_that_move_are_bound_again_and_none_is_kept(tiny, recordings) -> None:
    """A LoRA, its removal, an unload and a load: no recording more, and each result is eager's."""
    import comfy.model_management

    patcher = tiny("SD3", fresh=True)
    fast = compiled(patcher, mode="exact")
    plain = sample_tiny(fast, "SD3")
    assert len(recordings) == 1
    name = "diffusion_model.joint_blocks.0.x_block.attn.proj.weight"
    weight = patcher.model.get_parameter(name)
    delta = {name: (torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)),)}
    with_lora, fast_lora = patcher.clone(), fast.clone()
    for each in (with_lora, fast_lora):
        each.add_patches(delta, 0.5)
    wanted = sample_tiny(with_lora, "SD3")
    assert not torch.equal(wanted, plain)
    assert torch.equal(sample_tiny(fast_lora, "SD3"), wanted)
    assert torch.equal(sample_tiny(fast, "SD3"), plain) and torch.equal(sample_tiny(fast_lora, "SD3"), wanted)
    comfy.model_management.unload_all_models()
    assert torch.equal(sample_tiny(fast, "SD3"), plain)
    comfy.model_management.unload_all_models()
    for part in patcher.model.diffusion_model.modules():  # as a load from a file does
        for key, value in part._parameters.items():
            if value is not None:
                part._parameters[key] = torch.nn.Parameter(value.data.clone(), requires_grad=False)
    assert torch.equal(sample_tiny(fast, "SD3"), plain)
    assert len(recordings) == 1
    comfy.model_management.unload_all_models()
    gone = weakref.ref(patcher.model.get_parameter(name))
    module = weakref.ref(patcher.model.diffusion_model)
    patcher.model.diffusion_model.joint_blocks[0].x_block.attn.proj.weight = None
    weight = None
    gc.collect()
    assert gone() is None
    del patcher, fast, with_lora, fast_lora, each, part, value
    gc.collect()
    assert module() is None


# The model's code -------------------------------------------------------------------------------------------------


def test_a_changed_model_is_recorded_again(tiny, recordings, monkeypatch) -> None:
    patcher = tiny("Flux", fresh=True)
    fast, model = compiled(patcher, mode="exact"), patcher.model.diffusion_model
    block = model.double_blocks[0]

    def check(count) -> None:
        assert torch.equal(sample_tiny(fast, "Flux"), sample_tiny(patcher, "Flux"))
        assert len(recordings) == count

    check(1)
    hook = block.img_mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    check(2)
    hook.remove()
    check(2)  # it is as it was
    block.img_mlp.forward = types.MethodType(lambda self, x: x * 2, block.img_mlp)
    check(3)
    del block.img_mlp.forward
    check(3)
    with monkeypatch.context() as patch:
        patch.setattr(type(block.img_norm1), "forward", lambda self, x: x * 0.5)  # for every model
        check(4)
    check(4)
    block.img_norm1.eps = 0.5
    check(5)
    check(5)


def test_a_model_with_a_patch_of_its_modules_and_without_in_turn(models, recordings) -> None:
    """ComfyUI puts the patch there when it loads that patcher, and takes it away again."""
    plain = models.flux(torch.float32, **SMALL_FLUX)
    layer = plain.model.diffusion_model.double_blocks[0].img_attn.proj
    patched = plain.clone()
    louder = types.MethodType(lambda self, x: torch.nn.functional.linear(x, self.weight, self.bias) * 1.5, layer)
    patched.add_object_patch("diffusion_model.double_blocks.0.img_attn.proj.forward", louder)
    wanted = [models.sample(each, **FLUX_RUN) for each in (plain, patched)]
    assert not torch.equal(*wanted)
    fast = [compiled(each) for each in (plain.clone(), patched.clone())]
    for _ in range(4):
        for each, eager in zip(fast, wanted, strict=True):
            assert torch.equal(models.sample(each, **FLUX_RUN), eager)
    assert 2 <= len(recordings) <= 3  # until the first patch goes, the forward is the class's, and then the layer's own


def test_only_the_last_few_states_of_a_model_are_known(tiny, recordings) -> None:
    from anyshape.accel.tapes import MAX_STRUCTURES

    patcher = tiny("Flux", fresh=True)
    fast, norm = compiled(patcher, mode="exact"), patcher.model.diffusion_model.double_blocks[0].img_norm1
    states = [0.1 * number for number in range(1, MAX_STRUCTURES + 3)]
    for eps in (*states, *reversed(states)):
        norm.eps = eps
        assert torch.equal(sample_tiny(fast, "Flux"), sample_tiny(patcher, "Flux"))
    assert len(recordings) == 2 * len(states) - MAX_STRUCTURES


# Options ----------------------------------------------------------------------------------------------------------


def test_options_that_a_forward_reads(tiny, recordings) -> None:
    patcher = tiny("SD3", fresh=True)
    model = patcher.model.diffusion_model

    def read(out, options):
        scaled = out * options["scale"] if "scale" in options else out
        return scaled + options["shift"] if options.get("shift") is not None else scaled

    model.forward = reading(model, read)
    fast = compiled(patcher, mode="exact")

    def check(count, **options) -> None:
        wanted = sample_tiny(patcher, "SD3", options=options)
        assert torch.equal(sample_tiny(fast, "SD3", options=options), wanted)
        assert len(recordings) == count

    check(1)
    check(1, unread=3)
    check(2, scale=0.5)
    check(3, scale=0.25)
    check(3, scale=0.5)
    check(4, shift=torch.ones(1))
    check(4, shift=torch.full((1,), 3.0))
    check(5, shift=torch.ones(1, 1))
    assert reasons() == []


def test_an_option_that_differs_in_each_step_is_eager_after_a_while(tiny, recordings) -> None:
    patcher = tiny("SD3", fresh=True)
    model, calls = patcher.model.diffusion_model, []

    def read(out, options):
        return out * len(options["stamp"])

    model.forward = reading(model, read)
    fast = compiled(patcher, mode="exact")
    for number in range(7):
        calls.append(sample_tiny(fast, "SD3", steps=1, options={"stamp": "x" * (number + 1)}))
        wanted = sample_tiny(patcher, "SD3", steps=1, options={"stamp": "x" * (number + 1)})
        assert torch.equal(calls[-1], wanted)
    assert len(recordings) == 4 and any("'stamp'" in reason for reason in reasons())


# Attention --------------------------------------------------------------------------------------------------------


def test_attention_of_another_node_is_kept_and_called_as_one_step(tiny, recordings) -> None:
    patcher = tiny("Flux", fresh=True)
    fast, seen = compiled(patcher, mode="exact"), []

    def override(scale):
        def attention(function, *args, **kwargs):
            options = kwargs["transformer_options"]
            seen.append((options["sigmas"].shape, options.get("block_index")))
            return function(*args, **kwargs) * scale

        return attention

    half, third = override(0.5), override(0.3)
    plain = sample_tiny(patcher, "Flux")
    for each, count in ((half, 1), (half, 1), (third, 2), (half, 2)):
        options = {"optimized_attention_override": each}
        wanted = sample_tiny(patcher, "Flux", options=options)
        called = len(seen)
        assert torch.equal(sample_tiny(fast, "Flux", options=options), wanted) and not torch.equal(wanted, plain)
        assert len(seen) - called > 0 and len(recordings) == count
    assert reasons() == []
    assert torch.equal(sample_tiny(fast, "Flux"), plain) and len(recordings) == 3


def test_attention_that_comfyuis_node_chooses_is_like_comfyuis_choice(tiny, recordings) -> None:
    """The node makes another function each time that it runs: the same recording. A pack's in it is a pack's."""
    import comfy.ldm.modules.attention as attention
    from anyshape.accel.comfy import recorded_attention

    def theirs(*args, **kwargs):
        return attention.attention_pytorch(*args, **kwargs) * 0.5

    def chosen(patcher, function):
        clone = patcher.clone()
        choose_attention(clone, function)
        return clone.model_options["transformer_options"]

    patcher = tiny("Flux", fresh=True)
    fast = compiled(patcher, mode="exact")
    for function, count in ((attention.attention_pytorch, 1), (attention.attention_pytorch, 1), (theirs, 2)):
        options = chosen(patcher, function)
        wanted = sample_tiny(patcher, "Flux", options=options)
        assert torch.equal(sample_tiny(fast, "Flux", options=options), wanted)
        assert len(recordings) == count
        override = options["optimized_attention_override"]
        assert recorded_attention.is_anothers(override) == (function is theirs)
    wrapped = functools.wraps(attention.attention_pytorch)(theirs)
    assert recorded_attention.is_anothers(wrapped) and not recorded_attention.is_anothers(None)
    assert reasons() == []


# Threads ----------------------------------------------------------------------------------------------------------


def test_two_threads_sample_two_models(tiny, recordings) -> None:
    names = ("Flux", "SD3")
    fast = {name: compiled(tiny(name, fresh=True), mode="exact") for name in names}
    import comfy.model_management

    comfy.model_management.load_models_gpu(list(fast.values()))

    def run(name):
        from tools.architectures import patchers

        for k in (0, 1, 0):
            with torch.inference_mode():
                eager = patchers.apply(tiny(name), k, name)[0]
                out = patchers.apply(fast[name], k, name, {"wrappers": fast[name].wrappers})[0]
            assert torch.equal(out, eager), (name, k)

    in_threads(run, names)
    assert gc.isenabled() and reasons() == []
    assert len(recordings) == 4, "each size of each model once"


def test_two_first_calls_make_one_engine(pack, monkeypatch) -> None:
    import time

    from anyshape.accel.comfy import attach

    engine = attach.Engine

    def slow(*args, **kwargs):
        time.sleep(0.05)
        return engine(*args, **kwargs)

    monkeypatch.setattr(attach, "Engine", slow)
    made = in_threads(lambda module: attach.engine_for(module, "M", "model"), [torch.nn.Linear(1, 1)] * 4)
    assert len({id(each) for each in made}) == 1


# The key ----------------------------------------------------------------------------------------------------------


def key_of(forward, *args, **kwargs):
    from anyshape.accel.comfy import taping

    run = types.SimpleNamespace(
        number=1,
        looks=None,
        structure=lambda *_: 1,
        weights=lambda: 1,
        changed=str,
        altered=bool,
        lay_out=None,
        foreign=(),
        calls_within=False,
        in_blocks=("", frozenset()),
        obstacle=lambda *_: "",
        streams=lambda device: "",
        mapped=None,
        hold=str,
        let_go=None,
        fetches=bool,
        no_graph=str,
        rest=None,
    )
    given = taping.take(forward, args, kwargs)
    with torch.inference_mode():
        return taping.call_of(None, forward, given, run, None, lambda shape: (1, 1, 1)).key


def test_what_decides_a_recording_is_in_the_key(pack) -> None:
    """Size, batch, dtype, layout, plain arguments; and whether one tensor comes twice, because a tape has it once."""

    def forward(x, y=None, flag=True, scale=1, transformer_options=None):
        pass

    x, y = torch.zeros(2, 4, 8, 8), torch.zeros(2, 4)
    keys = [
        key_of(forward, x),
        key_of(forward, x[:1]),
        key_of(forward, torch.zeros(2, 4, 8, 9)),
        key_of(forward, x.half()),
        key_of(forward, x.contiguous(memory_format=torch.channels_last)),
        key_of(forward, x, y),
        key_of(forward, x, y=torch.zeros(4, 2).t()),
        key_of(forward, x, x),
        key_of(forward, x, x.clone()),
        key_of(forward, x, flag=False),
        key_of(forward, x, flag=None),
        key_of(forward, x, scale=2),
        key_of(forward, x, scale="2"),
        key_of(forward, x, y=[y, y]),
        key_of(forward, x, y=[y, y.clone()]),
        key_of(forward, x, y={"a": y}),
        key_of(forward, x, y={"b": y}),
    ]
    assert len(set(keys)) == len({str(key) for key in keys}) == len(keys)
    assert key_of(forward, x) == key_of(forward, x.clone(), transformer_options={"a": 1})


def test_different_keys_have_different_names() -> None:
    from anyshape.accel.key import shape_key

    x, t = torch.zeros(2, 4, 8, 8), torch.zeros(2)
    keys = [
        shape_key({"x": x, "timesteps": t}),
        shape_key({"x": x, "timesteps": torch.zeros(1)}),
        shape_key({"x": x, "timesteps": t.long()}),
        shape_key({"x": x, "timesteps": t, "control.a": torch.zeros(2, 8)}),
        shape_key({"x": x, "timesteps": t, "control.a": torch.zeros(2, 9)}),
        shape_key({"x": x, "timesteps": t, "y": t}),
        shape_key({"x": x, "timesteps": t, "y": t.half()}),
        shape_key({"x": x, "timesteps": t}, {"control": "None"}),
        shape_key({"x": x, "timesteps": t}, {"control": "1"}),
    ]
    assert len({str(key) for key in keys}) == len(set(keys)) == len(keys)
