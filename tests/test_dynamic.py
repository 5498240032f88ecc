"""DynamicVRAM: weights that ComfyUI maps in while a model runs, under tapes and programs.

comfy-aimdo has no CPU device: its page table, and nothing else, is a stand-in (``tools.pages``). What it does on a GPU
is tested there (test_gpu_dynamic.py): graphs, pinned pages under launches, memory.
"""

import pytest
import torch
from torch import nn

from tools.driving import SMALL_RUN, SMALL_UNET, calls_of, compiled, options_of, unet_inputs
from tools.oracles import assert_fast, error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32; the contract allows 1e-3
ENOUGH = 1 << 20  # pages


@pytest.fixture
def pages(pack, monkeypatch):
    pytest.importorskip("comfy_aimdo.model_vbar")
    import comfy.ops

    if not hasattr(comfy.ops, "cast_modules_with_vbar"):
        pytest.skip("this ComfyUI maps no weights in")
    from tools import pages

    pages.use(monkeypatch)
    return pages


@pytest.fixture
def card(pages, request):
    return pages.Card(ENOUGH, getattr(request, "param", True))


both = pytest.mark.parametrize("card", [True, False], ids=["counted", "flagged"], indirect=True)  # comfy-aimdo's ways


@pytest.fixture
def load(models, pages, card):
    """Makes a UNet, and what a load of it does; its patcher is ``load.patcher``."""
    patcher = models.unet("sd15", torch.float32, **SMALL_UNET)
    made = pages.Loads(patcher.model.diffusion_model, card)
    made.patcher = patcher
    made()
    return made


@pytest.fixture
def bound(pack, monkeypatch):
    """One entry for each time that a program takes its weights."""
    from anyshape.accel.tape.program import Program

    return calls_of(monkeypatch, Program, "bind")


def test_the_users_own_patcher_runs(models, load, card, recordings):
    """Nothing is loaded a second time, and no page is kept when a call is over."""
    source = load.patcher
    fast = compiled(source)
    assert fast.model is source.model
    eager = models.sample(source, **SMALL_RUN)
    out = models.sample(fast, **SMALL_RUN)
    assert error(out, eager) < CLOSE and len(recordings) == 1
    assert_fast()
    assert not fallbacks() and not load.pages.pinned and load.pages.there


@both
def test_a_model_that_is_asked_how_far_rounding_carries_it(models, load, recordings, monkeypatch):
    """Its own forward runs once more, which lets go of the weights; the program goes on with them, and none is kept."""
    from anyshape.accel import sensitivity, verify
    from anyshape.accel.tape.program import Program

    run = Program.run
    other = lambda x: sensitivity.nudged(-x).neg()  # noqa: E731 - one step the other way
    monkeypatch.setattr(Program, "run", lambda self, given: run(self, [other(given[0]), *given[1:]]))
    monkeypatch.setattr(verify, "BOUNDS", dict.fromkeys(verify.BOUNDS, verify.Bounds(0.0, 0.0)))
    asked = calls_of(monkeypatch, sensitivity, "measured")
    eager = models.sample(load.patcher, **SMALL_RUN)
    assert error(models.sample(compiled(load.patcher), **SMALL_RUN), eager) < CLOSE
    assert len(asked) == len(recordings) == 1 and not load.pages.pinned
    assert_fast()
    assert not fallbacks()


def test_blocks_are_alike_wherever_their_weights_lie(models, pages, card, monkeypatch):
    """As many of them are written down as copies as without DynamicVRAM."""
    from anyshape.accel.tapes import Tapes

    from tools.architectures import patchers

    takes, record = [], Tapes.record
    monkeypatch.setattr(Tapes, "record", lambda *args: takes.append(record(*args)) or takes[-1])
    run = SMALL_RUN | {"cfg": 1.0}
    for maps in (False, True):
        patcher = patchers.make("Lumina2", blocks=4)
        if maps:
            pages.Loads(patcher.model.diffusion_model, card)()
        models.sample(compiled(patcher), **run)
    (_, plain, _), (_, mapped, _) = takes
    assert plain.copies == mapped.copies > 0


def test_what_is_read_are_the_mapped_weights(models, load):
    from anyshape.accel.tape.program import Program

    found, bind = set(), Program.bind
    fast = compiled(load.patcher)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Program, "bind", lambda self, m: found.update(v.leaf.name for _, v in self._weights) or bind(self, m)
        )
        models.sample(fast, **SMALL_RUN)
    assert {"_v_weight", "_v_bias"} <= found
    big = [part for part in load.layers if part._v_weight.data_ptr() == part._v[1]]
    assert len(big) == len(load.layers)


@both
def test_weights_that_went_and_came_back(models, load, recordings, bound):
    fast = compiled(load.patcher)
    first = models.sample(fast, **SMALL_RUN)
    before = len(bound)
    load.pages.give_away()
    load()
    again = models.sample(fast, **SMALL_RUN)
    assert torch.equal(first, again) and len(recordings) == 1 and len(bound) == before
    load.pages.give_away(1, 3)  # a part of them, and nobody loads
    assert torch.equal(first, models.sample(fast, **SMALL_RUN)) and len(recordings) == 1
    assert_fast()
    assert not fallbacks() and not load.pages.pinned


@both
def test_what_does_not_fit_runs_as_comfyuis_own(models, load, card, recordings):
    """To the bit, with a reason that helps; and on the tape again as soon as it fits."""
    fast, source = compiled(load.patcher), load.patcher
    card.pages = load.pages.count // 2
    out = models.sample(fast, **SMALL_RUN)
    (shape,) = shapes()
    assert shape["state"] == "eager" and shape["reason"].startswith("weights streamed: of ")
    assert [found["reason"] for found in fallbacks()] == [shape["reason"]]
    assert not recordings and not load.pages.pinned
    ours = len(load.pages.there)
    load.pages.give_away()
    load()
    models.sample(source, **SMALL_RUN)
    assert ours == len(load.pages.there) > card.pages // 2  # as much of it stays as without us
    card.pages = ENOUGH
    load()
    assert torch.equal(out, models.sample(source, **SMALL_RUN))
    assert error(models.sample(fast, **SMALL_RUN), out) < CLOSE and len(recordings) == 1
    assert_fast()
    card.pages = load.pages.count // 2
    load.pages.give_away()
    assert torch.equal(out, models.sample(fast, **SMALL_RUN)) and shapes()[0]["state"] == "eager"
    card.pages = ENOUGH
    load()
    assert error(models.sample(fast, **SMALL_RUN), out) < CLOSE and len(recordings) == 1
    assert_fast()


def test_a_streamed_model_is_not_looked_at_in_each_step(models, load, card, monkeypatch):
    """From the second step on one page is asked for, until there is room."""
    from anyshape.accel.families.sampling_state import SamplingState

    fast, run = compiled(load.patcher), SMALL_RUN | {"steps": 4}
    card.pages = load.pages.count // 2
    looks = calls_of(monkeypatch, SamplingState, "structure")
    models.sample(fast, **run)
    assert len(looks) == 1 and shapes()[0]["state"] == "eager" and not load.pages.pinned

    def room(step, *_):
        if step == 1:
            card.pages = ENOUGH
            load()

    looks.clear()
    models.sample(fast, **run, callback=room)
    assert 1 < len(looks) < 4 and shapes()[0]["state"] != "eager"


@both
def test_a_page_that_goes_in_the_recorded_forward(models, load, recordings):
    """What was written down of such a forward counts for nothing; the next one is recorded."""
    fast, source = compiled(load.patcher), load.patcher
    wanted = models.sample(source, **SMALL_RUN)
    layer = load.layers[len(load.layers) // 2]
    free: list[set] = []  # what is kept while ComfyUI's own forward runs: no more than its layer asks for

    def hook(*_):
        free.append(load.pages.pinned)
        load.pages.give_away(0)

    handle = layer.register_forward_hook(hook)
    out = models.sample(fast, **SMALL_RUN)
    handle.remove()
    assert free == [set()]
    assert error(out, wanted) < CLOSE and shapes()[0]["state"] == "eager"
    assert shapes()[0]["reason"].startswith("weights streamed: of ")
    assert error(models.sample(fast, **SMALL_RUN), wanted) < CLOSE
    assert_fast()


@both
def test_pages_are_kept_while_a_program_runs(models, load, monkeypatch):
    from anyshape.accel.tape.program import Program

    seen, run = [], Program.run
    monkeypatch.setattr(Program, "run", lambda *args, **kw: seen.append(set(load.pages.pinned)) or run(*args, **kw))
    fast = compiled(load.patcher)
    models.sample(fast, **SMALL_RUN | {"steps": 3})
    first, last = load.layers[0]._v[1], load.layers[-1]._v[1] + load.layers[-1]._v[2]
    assert len(seen) >= 2 and all(pinned >= set(load.pages._range(first, last - first)) for pinned in seen)
    assert not load.pages.pinned


def test_small_weights_stay_where_they_were(models, load, recordings, bound):
    """ComfyUI copies them at each load. A program is not bound again, and a graph would find them."""
    fast = compiled(load.patcher)
    first = models.sample(fast, **SMALL_RUN)
    small = {
        part: part._parameters["weight"].data_ptr() for part in load.own if part._parameters.get("weight") is not None
    }
    before = len(bound)
    for _ in range(3):
        load()
        assert torch.equal(first, models.sample(fast, **SMALL_RUN))
    assert {part: part._parameters["weight"].data_ptr() for part in small} == small
    assert len(bound) == before and len(recordings) == 1


def test_small_weights_that_were_patched_are_read(models, load, recordings):
    fast, source = compiled(load.patcher), load.patcher
    first = models.sample(fast, **SMALL_RUN)
    norm = next(part for part in load.own if isinstance(part, nn.GroupNorm))
    with torch.no_grad():
        load.own[norm]["weight"].mul_(1.5)
    load()
    eager = models.sample(source, **SMALL_RUN)
    load()
    out = models.sample(fast, **SMALL_RUN)
    assert error(out, eager) < CLOSE < error(out, first) and len(recordings) == 1


def test_a_lora_on_and_off(models, load, recordings):
    """ComfyUI writes the patched weight where the weight lies, once: to a program it is another value, no more."""
    from comfy.model_patcher import LowVramPatch

    fast, source = compiled(load.patcher), load.patcher
    plain = models.sample(fast, **SMALL_RUN)
    layer = max(load.layers, key=lambda part: part.weight.numel())
    (name,) = (f"{name}.weight" for name, part in load.model.named_modules() if part is layer)
    delta = 0.05 * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))

    def patch(key):
        return LowVramPatch(key, {key: [(1.0, ("diff", (delta,)), 1.0, None, None)]})

    for _ in range(2):
        load({name: patch}, dirty=True)
        patched = models.sample(fast, **SMALL_RUN)
        load({name: patch}, dirty=True)
        assert error(patched, models.sample(source, **SMALL_RUN)) < CLOSE < error(patched, plain)
        load(dirty=True)
        assert torch.equal(models.sample(fast, **SMALL_RUN), plain)
    assert len(recordings) == 1
    assert_fast()


def test_a_layer_that_is_no_longer_mapped_is_recorded_again(models, load, recordings):
    """A LoRA that changes a weight's size is loaded as a whole: what lies in its pages is of nobody."""
    fast, source = compiled(load.patcher), load.patcher
    first = models.sample(fast, **SMALL_RUN)
    layer = load.layers[3]
    del layer._v
    load.pages.give_away()
    load.layers.remove(layer)
    load()
    out = models.sample(fast, **SMALL_RUN)
    assert error(out, first) < CLOSE and len(recordings) == 2
    assert error(out, models.sample(source, **SMALL_RUN)) < CLOSE
    assert_fast()


def test_nothing_is_fetched_ahead_in_a_recorded_forward(models, load):
    """All weights are there. ComfyUI's own graphs of blocks belong to its prefetch, so they stay out as well."""
    fast, model = compiled(load.patcher), load.patcher.model.diffusion_model
    seen = []
    load.patcher.set_model_input_block_patch(lambda h, options: seen.append(options.get("prefetch_dynamic_vbars")) or h)
    patched = compiled(load.patcher)
    with torch.inference_mode():
        options = options_of(patched) | {"prefetch_dynamic_vbars": True}
        call = unet_inputs(patched, 128, 128)
        model(**call, transformer_options=options)
        del seen[1:]
        options_of(fast)
    assert seen == [False]


def test_a_vae(models, pages, card):
    from anyshape.accel.families.vae import compile_vae

    source = models.vae(torch.float32, ch=32, num_res_blocks=1)
    load = pages.Loads(source.first_stage_model, card)
    load()
    fast, message = compile_vae(source)
    assert message == "" and fast.patcher.model is source.patcher.model
    latent = torch.randn(1, 4, 9, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        eager = source.decode(latent)
        for _ in range(2):
            assert error(fast.decode(latent), eager) < CLOSE
            load.pages.give_away()
        assert_fast()
        assert not fallbacks() and not load.pages.pinned
        card.pages = 3
        assert torch.equal(fast.decode(latent), eager)
    assert shapes()[0]["state"] == "eager" and shapes()[0]["reason"].startswith("weights streamed: of ")


def test_convolutions_are_laid_out_for_the_run_and_back(models, load):
    """In their own memory, and back only where it is still theirs."""
    from anyshape.accel.families import sampling_state
    from anyshape.accel.tape.values import Weight
    from anyshape.accel.weights import ChannelsLastWeights

    model, cpu = load.model, torch.device("cpu")
    eager = models.sample(load.patcher, **SMALL_RUN)
    names = {part: name for name, part in model.named_modules()}
    large = [part for part in load.layers if part.weight.ndim == 4 and part.weight.shape[2:].numel() > 1]
    wanted = frozenset(Weight(names[part], "_v_weight") for part in large)
    run = sampling_state.SamplingState(model, sampling_state.fingerprints(model), ChannelsLastWeights())
    with torch.inference_mode():
        assert run.obstacle(cpu, torch.float32) == ""
        plain = run.weights()
        laid = run.lay_out(wanted, plain)
        assert laid != plain and run.lay_out(wanted, laid) == laid and len(large) > 8
        assert all(part._v_weight.is_contiguous(memory_format=torch.channels_last) for part in large)
        assert all(torch.equal(part._v_weight, part.weight) for part in large)
        run.let_go()
        load.pages.give_away(*range(load.pages.count // 3))
        assert run.obstacle(cpu, torch.float32) == ""
        filled = run.weights()
        assert filled not in (plain, laid) and run.lay_out(wanted, filled) == laid  # what came back is laid out again
        run.let_go()
        gone = load.pages.count // 2
        load.pages.give_away(*range(gone))
    run.close()
    assert (load.pages.memory[: gone * 4096] == 0xFF).all() and not load.pages.pinned
    there = [part for part in large if part._v[1] >= load.pages.base_addr + gone * 4096]
    assert there and all(torch.equal(part._v_weight, part.weight) and part._v_weight.is_contiguous() for part in there)
    load()
    assert torch.equal(models.sample(load.patcher, **SMALL_RUN), eager)


def test_graphs_give_way_to_weights(models, load, card, monkeypatch):
    """And no other is captured until there is room for both. There are no graphs on a CPU: these are numbers."""
    from anyshape.accel.families import dynamic

    class Held:
        used_bytes = 100 << 20

        def clear(self):
            self.used_bytes, card.pages = 0, ENOUGH

    held, cpu = Held(), torch.device("cpu")
    monkeypatch.setattr(dynamic.graphs, "cache", lambda device: held)
    monkeypatch.setattr(dynamic, "_IN_THE_WAY", {})
    card.pages = load.pages.count // 2
    weights = dynamic.mapped(load.model)
    assert weights.no_graph(cpu) == ""
    assert weights.ready(cpu, torch.float32) == "" and held.used_bytes == 0
    weights.let_go()
    for free, said in ((1 << 20, "the model's weights did not fit beside 100 MB of graphs"), (1 << 40, "")):
        monkeypatch.setattr(dynamic.mm, "get_free_memory", lambda device, free=free: free)
        assert weights.no_graph(cpu)[: len(said)] == said and bool(weights.no_graph(cpu)) == bool(said)
    monkeypatch.setattr(dynamic.mm, "get_free_memory", lambda device: 1 << 20)
    assert weights.no_graph(cpu).startswith("the model's weights leave no memory for a graph")


def test_the_user_may_cancel_while_weights_are_filled(models, load, monkeypatch):
    """A large model comes from the disk, which takes a while."""
    import comfy.model_management as mm

    fast = compiled(load.patcher)
    monkeypatch.setattr(mm, "interrupt_processing", True)
    with pytest.raises(mm.InterruptProcessingException):
        models.sample(fast, **SMALL_RUN)
    assert not load.pages.pinned
    assert error(models.sample(fast, **SMALL_RUN), models.sample(load.patcher, **SMALL_RUN)) < CLOSE
    assert_fast()


def test_blocks_of_a_model_that_cannot_be_recorded_as_a_whole(pack, pages, card, fusing, block_programs):
    """MiniMax H3 reads its time step back. Pages are asked for before each block's program, and free behind it."""
    from tools import architectures
    from tools.architectures import patchers

    if "MiniMaxH3" not in {entry.name for entry in architectures.present()}:
        pytest.skip("this ComfyUI has no MiniMax H3")
    patcher = patchers.make("MiniMaxH3", blocks=4)
    load = pages.Loads(patcher.model.diffusion_model, card)
    load()
    fast = compiled(patcher)
    with torch.inference_mode():
        eager = patchers.apply(patcher, 1, "MiniMaxH3")
        for turn in range(4):
            out = patchers.apply(patcher, 1, "MiniMaxH3", options_of(fast))
            assert all(error(*pair) < 1e-5 for pair in zip(out, eager, strict=True)) and not load.pages.pinned
            if turn == 2:
                load.pages.give_away()
    assert len(block_programs) >= 8
    assert shapes()[0]["state"] == "tape" and "one by one" in shapes()[0]["note"]


def half(item):
    return item.bfloat16() if isinstance(item, torch.Tensor) and item.is_floating_point() else item


def forward(patcher, name, compiled_by=None):
    """One call of a model of the table, in bfloat16, through Compile Model's wrappers if there are any."""
    from tools import architectures

    arguments, named = architectures.TABLE[name].inputs(1)
    named = {key: half(value) for key, value in named.items()}
    named["transformer_options"] = {**named.get("transformer_options", {}), **options_of(compiled_by or patcher)}
    with torch.inference_mode():
        return patcher.model.diffusion_model(*map(half, arguments), **named)


@pytest.mark.parametrize("form", ["int8_tensorwise", "float8_e4m3fn", "nvfp4"])
def test_quantised_weights(pack, pages, card, form, recordings, bound):
    """A mapped weight is taken apart like another: to the bit, and it may go and come back."""
    quant_ops = pytest.importorskip("comfy.quant_ops")
    if form not in getattr(quant_ops, "QUANT_ALGOS", {}):
        pytest.skip("this ComfyUI has no such weights")
    from tools.architectures import patchers, quantised

    patcher = patchers.make("Flux", torch.bfloat16)
    patcher.model.diffusion_model = quantised.make("Flux", form)
    load = pages.Loads(patcher.model.diffusion_model, card)
    load()
    fast, eager = compiled(patcher), forward(patcher, "Flux")
    assert any(isinstance(part._v_weight, quant_ops.QuantizedTensor) for part in load.layers)
    for _ in range(3):
        assert torch.equal(forward(patcher, "Flux", fast), eager)
        load.pages.give_away()
        load()
    assert len(recordings) == 1 and len(bound) == 1 and not load.pages.pinned
    assert_fast()
    assert not fallbacks()


def test_weights_that_are_cast_on_their_way(pack, pages, card, recordings):
    """From a file in float32 to pages in bfloat16."""
    from tools.architectures import patchers

    patcher = patchers.make("QwenImage", torch.bfloat16)
    model = patcher.model.diffusion_model
    wide = {part: part.weight.detach().float() + 1e-4 for part in model.modules() if isinstance(part, nn.Linear)}
    for part, weight in wide.items():
        part.weight = nn.Parameter(weight, requires_grad=False)
    load = pages.Loads(model, card, torch.bfloat16)
    load()
    fast, eager = compiled(patcher), forward(patcher, "QwenImage")
    for _ in range(2):
        assert torch.equal(forward(patcher, "QwenImage", fast), eager)
        load.pages.give_away()
    assert {part._v_weight.dtype for part in load.layers} == {torch.bfloat16} and len(recordings) == 1
    assert_fast()


def test_a_controlnet(models, pages, card, recordings):
    """Its pages are its own, and so are its reasons."""
    from tools.driving import compiled_control, steering

    patcher = models.unet("sd15", torch.float32, **SMALL_UNET)
    control = models.controlnet_for(patcher)
    load = pages.Loads(control.control_model, card)
    load()
    fast = compiled_control(control)
    eager = models.sample(patcher, **SMALL_RUN, steer=steering(control))
    for _ in range(2):
        assert error(models.sample(patcher, **SMALL_RUN, steer=steering(fast)), eager) < CLOSE
        load.pages.give_away()
    assert_fast()
    card.pages = load.pages.count // 2
    load()
    assert error(models.sample(patcher, **SMALL_RUN, steer=steering(fast)), eager) < CLOSE
    assert shapes()[0]["reason"].startswith("weights streamed: of ") and len(recordings) == 1


def test_skip_blocks(models, load, card):
    """Both programs read the weights where they lie; where these do not fit, every step is full."""
    from tools.driving import skipping
    from tools.oracles import counted

    run = SMALL_RUN | {"steps": 12}
    skip = skipping(compiled(load.patcher))
    models.sample(skip, **run)
    assert counted() == {"full": 4, "skipped": 8, "resets": {}} and not load.pages.pinned
    load.pages.give_away()
    models.sample(skip, **run)
    assert counted() == {"full": 4, "skipped": 8, "resets": {}}
    card.pages = load.pages.count // 2
    load.pages.give_away()
    models.sample(skip, **run)
    found = counted()
    assert (found["full"], found["skipped"]) == (12, 0)
    assert all(reason.startswith("weights streamed: of ") for reason in found["resets"])
