"""What makes a tape right, through ComfyUI: compiled models against eager, sampled as a workflow samples them. CPU.

``recordings`` counts: what must not be recorded again is not, what must be is.
"""

import gc
import types
import weakref

import pytest
import torch

from tools.driving import compiled, in_threads, sample_tiny

pytestmark = pytest.mark.usefixtures("clean_stats")


def sample(patcher, name, height=8, width=8, seed=0, steps=2, options=None):
    """A sampling run, with more ``options`` for the model."""
    if options:
        patcher = patcher.clone()
        patcher.model_options["transformer_options"].update(options)
    return sample_tiny(patcher, name, seed=seed, height=height, width=width, steps=steps)


def reasons():
    from anyshape.accel import stats

    return [entry["reason"] for entry in stats.snapshot()["fallbacks"]]


def states():
    from anyshape.accel import stats

    return {shape["state"] for model in stats.snapshot()["models"] for shape in model["shapes"]}


def fused(monkeypatch):
    """Kernels on the CPU, in Triton's interpreter."""
    from anyshape.accel import maker, tape_tier

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    monkeypatch.setattr(maker.KEEPER, "watch", lambda *_: None)


@pytest.mark.parametrize("name", ["Flux", "SD3", "WAN21_T2V"])
def test_exact_is_bit_equal_at_every_size_and_recorded_once(tiny, recordings, name) -> None:
    patcher = tiny(name)
    fast = compiled(patcher, mode="exact")
    for height, width, seed in ((8, 8, 0), (8, 12, 1), (8, 8, 2)):
        wanted = sample(patcher, name, height, width, seed)
        assert torch.equal(sample(fast, name, height, width, seed), wanted)
    assert len(recordings) == 2 and states() == {"tape"} and reasons() == []


def test_unet_in_exact_mode_is_recorded_once(tiny, models, fresh, recordings) -> None:
    """Its blocks copy every option, those too that differ in each sampling run."""
    from tools.driving import SMALL_RUN

    fast = compiled(fresh, mode="exact")
    for seed in range(3):
        wanted = models.sample(fresh, **SMALL_RUN | {"seed": seed, "steps": 2})
        assert torch.equal(models.sample(fast, **SMALL_RUN | {"seed": seed, "steps": 2}), wanted)
    assert len(recordings) == 1 and reasons() == []


def test_the_same_seed_queued_twice_is_the_same_picture(tiny, monkeypatch) -> None:
    patcher = tiny("Flux")
    for fuse in (False, True):
        if fuse:
            fused(monkeypatch)
        fast = compiled(tiny("Flux", fresh=True) if fuse else patcher)
        first, second = (sample(fast, "Flux", 4, 4) for _ in range(2))
        assert torch.equal(first, second) and reasons() == []


@pytest.mark.parametrize("fuse", [False, True])
def test_cancelling_while_a_size_is_prepared_leaves_nothing_half_made(tiny, recordings, monkeypatch, fuse) -> None:
    """Wherever it is broken off, the next run prepares the size as if nothing had been."""
    from anyshape.accel import preparing, stats
    from comfy.model_management import InterruptProcessingException

    if fuse:
        fused(monkeypatch)
    asked, at = [], [0]

    def ask() -> None:
        if preparing.snapshot():
            asked.append(True)
            if len(asked) == at[0]:
                raise InterruptProcessingException

    monkeypatch.setattr(preparing, "_ASK", [ask])
    patcher = tiny("Flux", fresh=True)
    wanted = sample(compiled(tiny("Flux", fresh=True)), "Flux", 4, 4)
    whole = len(asked)
    assert whole > 20
    fast = compiled(patcher)
    for number, place in enumerate((1, whole // 4, whole // 2), 1):
        asked.clear()
        at[0] = place
        with pytest.raises(InterruptProcessingException):
            sample(fast, "Flux", 4, 4)
        assert len(recordings) == number + 1 and preparing.snapshot() == {} and reasons() == []
        assert sum(len(model["shapes"]) for model in stats.snapshot()["models"]) == 1  # of the other model
    at[0] = 0
    assert torch.equal(sample(fast, "Flux", 4, 4), wanted) and states() == {"tape"} and reasons() == []
    assert len(recordings) == 5


# Weights ----------------------------------------------------------------------------------------------------------


def test_weights_that_move_are_bound_again_and_none_is_kept(tiny, recordings) -> None:
    """A LoRA, its removal, an unload and a load: no recording more, and each result is eager's."""
    import comfy.model_management

    patcher = tiny("SD3", fresh=True)
    fast = compiled(patcher, mode="exact")
    plain = sample(fast, "SD3")
    assert len(recordings) == 1
    name = "diffusion_model.joint_blocks.0.x_block.attn.proj.weight"
    weight = patcher.model.get_parameter(name)
    delta = {name: (torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)),)}
    with_lora, fast_lora = patcher.clone(), fast.clone()
    for each in (with_lora, fast_lora):
        each.add_patches(delta, 0.5)
    wanted = sample(with_lora, "SD3")
    assert not torch.equal(wanted, plain)
    assert torch.equal(sample(fast_lora, "SD3"), wanted)
    assert torch.equal(sample(fast, "SD3"), plain) and torch.equal(sample(fast_lora, "SD3"), wanted)
    comfy.model_management.unload_all_models()
    assert torch.equal(sample(fast, "SD3"), plain)
    comfy.model_management.unload_all_models()
    for part in patcher.model.diffusion_model.modules():  # as a load from a file does
        for key, value in part._parameters.items():
            if value is not None:
                part._parameters[key] = torch.nn.Parameter(value.data.clone(), requires_grad=False)
    assert torch.equal(sample(fast, "SD3"), plain)
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
        assert torch.equal(sample(fast, "Flux"), sample(patcher, "Flux"))
        assert len(recordings) == count

    check(1)
    hook = block.img_mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    check(2)
    hook.remove()
    check(3)
    block.img_mlp.forward = types.MethodType(lambda self, x: x * 2, block.img_mlp)
    check(4)
    del block.img_mlp.forward
    check(5)
    with monkeypatch.context() as patch:
        patch.setattr(type(block.img_norm1), "forward", lambda self, x: x * 0.5)  # for every model
        check(6)
    check(7)
    block.img_norm1.eps = 0.5
    check(8)
    check(8)


# Options ----------------------------------------------------------------------------------------------------------


def reading(model, read):
    """The model's last layer reads the options of the forward."""
    forward = model.forward

    def ours(*args, **kwargs):
        return read(forward(*args, **kwargs), kwargs["transformer_options"])

    return ours


def test_options_that_a_forward_reads(tiny, recordings) -> None:
    patcher = tiny("SD3", fresh=True)
    model = patcher.model.diffusion_model

    def read(out, options):
        scaled = out * options["scale"] if "scale" in options else out
        return scaled + options["shift"] if options.get("shift") is not None else scaled

    model.forward = reading(model, read)
    fast = compiled(patcher, mode="exact")

    def check(count, **options) -> None:
        wanted = sample(patcher, "SD3", options=options)
        assert torch.equal(sample(fast, "SD3", options=options), wanted)
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
        calls.append(sample(fast, "SD3", steps=1, options={"stamp": "x" * (number + 1)}))
        wanted = sample(patcher, "SD3", steps=1, options={"stamp": "x" * (number + 1)})
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
    plain = sample(patcher, "Flux")
    for each, count in ((half, 1), (half, 1), (third, 2), (half, 2)):
        options = {"optimized_attention_override": each}
        wanted = sample(patcher, "Flux", options=options)
        called = len(seen)
        assert torch.equal(sample(fast, "Flux", options=options), wanted) and not torch.equal(wanted, plain)
        assert len(seen) - called > 0 and len(recordings) == count
    assert reasons() == []
    assert torch.equal(sample(fast, "Flux"), plain) and len(recordings) == 3


# Refusals and faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda out: out * (1 + 0 * out.sum().item()), "test_tape_engine.py:"),
        (lambda out: out + 0 * torch.randn_like(out), "random"),
    ],
)
def test_what_cannot_be_repeated_runs_in_eager(tiny, recordings, change, word) -> None:
    patcher = tiny("SD3", fresh=True)
    model = patcher.model.diffusion_model
    model.forward = reading(model, lambda out, options: change(out))
    fast = compiled(patcher)
    torch.manual_seed(5)
    wanted = sample(patcher, "SD3")
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(sample(fast, "SD3"), wanted) and torch.equal(torch.get_rng_state(), state)
    assert len(recordings) == 1 and any(word in reason for reason in reasons()) and states() == {"eager"}


FAULTS = {
    "record": ("tapes", "record"),
    "recorder": ("tapes", "Recorder"),
    "an operation": ("tape.record", "traits"),
    "settle": ("tape.aliasing", "settle"),
    "guards": ("tapes", "Guards"),
    "program": ("maker", "Program"),
    "bind": ("tape_tier", "bound"),
    "run": ("tape.program", "Program.run"),
    "compare": ("verify", "compare"),
}


@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_of_ours_costs_no_image(tiny, monkeypatch, place) -> None:
    import importlib

    where, name = FAULTS[place]
    owner = importlib.import_module(f"anyshape.accel.{where}")
    *path, name = name.split(".")
    for each in path:
        owner = getattr(owner, each)

    def broken(*_args, **_kwargs):
        raise RuntimeError("injected")

    patcher = tiny("SD3", fresh=True)
    wanted = sample(patcher, "SD3")
    monkeypatch.setattr(owner, name, broken)
    assert torch.equal(sample(compiled(patcher), "SD3"), wanted)
    assert any("injected" in reason for reason in reasons()), reasons()


def test_a_fault_at_a_later_run_costs_no_image(tiny, monkeypatch) -> None:
    from anyshape.accel.tape.program import Program

    patcher = tiny("SD3", fresh=True)
    fast, wanted = compiled(patcher), sample(patcher, "SD3")
    assert torch.equal(sample(fast, "SD3"), wanted)

    def broken(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(Program, "run", broken)
    assert torch.equal(sample(fast, "SD3"), wanted) and any("injected" in reason for reason in reasons())


def test_a_wrong_kernel_is_named_and_left_out(tiny, monkeypatch) -> None:
    from anyshape.accel.tape import diagnose, kernels

    fused(monkeypatch)
    patcher = tiny("SD3", fresh=True)
    wanted = sample(patcher, "SD3", 4, 4, steps=1)
    call, found, bad = kernels.Launch.__call__, [], []

    def wrong(self, operands, outputs):
        call(self, operands, outputs)
        if not bad:
            bad.append(self.source.text)
        if self.source.text == bad[0]:
            outputs[0].add_(1.0)

    def told(*args):
        found.append((diagnosed(*args), args[1]))
        return found[-1][0]

    diagnosed = diagnose.wrong_kernels
    monkeypatch.setattr(kernels.Launch, "__call__", wrong)
    monkeypatch.setattr(diagnose, "wrong_kernels", told)
    fast = compiled(patcher)
    out = sample(fast, "SD3", 4, 4, steps=1)
    assert (out - wanted).norm() / wanted.norm() < 1e-4
    ((named, program),) = found
    assert named == frozenset(bad) and len({launch.source.text for launch in program.launches}) > 1
    from anyshape.accel.families.attach import engine_of

    takes = engine_of(fast)(patcher.model.diffusion_model)._tape._tapes._takes
    (left,) = [take.program for group in takes.values() for take in group]
    sources = {launch.source.text for launch in left.launches}
    assert sources and bad[0] not in sources
    assert any("wrong result" in reason for reason in reasons()) and states() == {"tape"}


@pytest.mark.parametrize("verify", [True, False])
def test_what_could_not_be_compared_is_not_used(tiny, recordings, verify) -> None:
    """The model itself overflows: a wrong program would look no different. Without ``verify`` nobody wants to know."""
    from anyshape.accel import maker

    patcher = tiny("SD3", fresh=True)
    bias = patcher.model.diffusion_model.final_layer.linear.bias
    with torch.inference_mode():
        bias.data[0] = float("inf")
    wanted = sample(patcher, "SD3", steps=1)
    assert not torch.isfinite(wanted).all()
    fast = compiled(patcher, verify=verify)
    for _ in range(2):
        out = sample(fast, "SD3", steps=1)
        assert torch.equal(out.nan_to_num(), wanted.nan_to_num()) and torch.equal(out.isnan(), wanted.isnan())
    assert len(recordings) == 1
    assert reasons() == ([maker.NOT_COMPARED] if verify else []) and states() == {"eager" if verify else "tape"}


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
                options = {"wrappers": fast[name].wrappers} if name == "Flux" else {}
                out = patchers.apply(fast[name], k, name, options)[0]
            assert torch.equal(out, eager), (name, k)

    in_threads(run, names)
    assert gc.isenabled() and reasons() == []
    assert len(recordings) == 4, "each size of each model once"


def test_two_first_calls_make_one_engine(pack, monkeypatch) -> None:
    import time

    from anyshape.accel.families import attach

    engine = attach.Engine

    def slow(*args, **kwargs):
        time.sleep(0.05)
        return engine(*args, **kwargs)

    monkeypatch.setattr(attach, "Engine", slow)
    made = in_threads(lambda module: attach.engine_for(module, "M", "model"), [torch.nn.Linear(1, 1)] * 4)
    assert len({id(each) for each in made}) == 1


def key_of(forward, *args, **kwargs):
    from anyshape.accel.families import taping

    run = types.SimpleNamespace(
        structure=lambda model: 1,
        weights=lambda: 1,
        changed=str,
        lay_out=None,
        foreign=(),
        obstacle=lambda *_: "",
        streams=lambda: "",
        mapped=None,
        hold=str,
        let_go=None,
        no_graph=str,
    )
    given = taping.take(forward, args, kwargs)
    with torch.inference_mode():
        return taping.call_of(None, forward, given, run, None, (1, 1, 1)).key


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
