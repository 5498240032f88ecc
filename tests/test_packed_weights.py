"""Weights of a tensor class of another pack's, which its layers unpack in each forward, as GGUF files are run."""

import pytest
import torch

from tools.driving import FLUX_RUN, SMALL_FLUX, calls_of, compiled, randn
from tools.oracles import error, fallbacks, shapes

pytestmark = pytest.mark.usefixtures("clean_stats")

RUN = FLUX_RUN | {"steps": 2}
OTHER = RUN | {"width": 160}
CLOSE = 1e-5  # relative L2 in fp32


def flux(models, apart=False):
    from tools import packed

    patcher = models.flux(torch.float32, **SMALL_FLUX)
    assert packed.use(patcher.model.diffusion_model, apart) > 30
    return patcher


@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_unpacked_by_torch_they_are_on_the_tape(models, recordings, mode):
    patcher = flux(models)
    wanted = [models.sample(patcher, **run) for run in (RUN, OTHER)]
    fast = compiled(patcher, mode=mode)
    for _ in range(2):
        for run, eager in zip((RUN, OTHER), wanted, strict=True):
            assert torch.equal(models.sample(fast, **run), eager)
    assert {shape["state"] for shape in shapes()} == {"tape"} and fallbacks() == []
    assert len(recordings) == 2


@pytest.mark.usefixtures("fusing")
def test_with_fused_kernels(models, recordings):
    patcher = flux(models)
    fast = compiled(patcher)
    assert error(models.sample(fast, **RUN), models.sample(patcher, **RUN)) < CLOSE
    assert {shape["state"] for shape in shapes()} == {"tape"} and len(recordings) == 1


def test_another_weight_needs_no_new_recording(models, recordings):
    from tools import packed

    patcher = flux(models)
    fast = compiled(patcher)
    first = models.sample(fast, **RUN)
    layer = patcher.model.diffusion_model.get_submodule("double_blocks.0.img_attn.proj")
    layer.weight = torch.nn.Parameter(packed.pack(randn(*layer.weight.shape, seed=1) * 0.3), requires_grad=False)
    out = models.sample(fast, **RUN)
    assert torch.equal(out, models.sample(patcher, **RUN)) and error(out, first) > 1e-3
    assert len(recordings) == 1


def test_blocks_are_alike_if_their_weights_say_the_same(models):
    from anyshape.accel.tape.blocks import likeness

    blocks = flux(models).model.diffusion_model.single_blocks
    assert len({likeness(block) for block in blocks}) == 1
    blocks[1].linear1.weight.patches = [2.0]
    assert len({likeness(block) for block in blocks}) == 2


@pytest.mark.parametrize("in_mid_run", [False, True])
def test_a_note_at_a_weight_that_its_layer_reads(models, recordings, in_mid_run):
    """As a LoRA is put on packed weights: the model is the same, its weights lie where they lay."""
    patcher = flux(models)
    fast = compiled(patcher)
    plain = models.sample(fast, **RUN)
    weight = patcher.model.diffusion_model.get_submodule("double_blocks.0.img_attn.proj").weight

    def put(*_):
        weight.patches = [2.0]

    weight.patches = []
    assert torch.equal(models.sample(fast, **RUN), plain)
    if in_mid_run:
        out = models.sample(fast, **RUN, callback=put)
        weight.patches = []
        eager = models.sample(patcher, **RUN, callback=put)
    else:
        put()
        out, eager = models.sample(fast, **RUN), models.sample(patcher, **RUN)
    assert torch.equal(out, eager) and error(out, plain) > 1e-3
    weight.patches = []
    assert torch.equal(models.sample(fast, **RUN), plain)


def test_a_lora_is_on_the_tape(models, recordings):
    """Two of them, with several strengths, on and off, at two sizes: recorded again only where it is a new one."""
    from tools import packed

    patcher = flux(models)
    fast, before, made = compiled(patcher), None, []
    for seed, strength in ((0, 0.0), (0, 1.0), (0, 1.0), (0, 0.5), (5, 0.5), (0, 0.0)):
        if (seed, strength) != before:
            packed.put_lora(patcher.model.diffusion_model, seed, strength)
        before = seed, strength
        for run in (RUN, OTHER):
            assert torch.equal(models.sample(fast, **run), models.sample(patcher, **run))
        made.append(len(recordings))
    assert made == [2, 4, 4, 6, 8, 8] and fallbacks() == []


def test_a_lora_that_is_written_into(models, recordings):
    """Its tensors are read at each replay, wherever they lie."""
    from tools import packed

    patcher = flux(models)
    fast = compiled(patcher)
    packed.put_lora(patcher.model.diffusion_model, 0)
    before = models.sample(fast, **RUN)
    lora = patcher.model.diffusion_model.get_submodule("double_blocks.0.img_attn.proj").weight.patches[0][0][0][1]
    lora.weights[0].mul_(3.0)
    out = models.sample(fast, **RUN)
    assert torch.equal(out, models.sample(patcher, **RUN)) and error(out, before) > 1e-4
    lora.weights[0].data = lora.weights[0] * 3.0  # another place in memory
    assert torch.equal(models.sample(fast, **RUN), models.sample(patcher, **RUN))
    assert len(recordings) == 1


@pytest.fixture
def room(pack, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU that has room for a LoRA in main memory: a layer's copy in another dtype counts as one of these.

    Programs that run on a CPU are made without rules.
    """
    from anyshape.accel import take_graphs
    from anyshape.accel.maker import Maker
    from anyshape.accel.tape.rules import resident

    made = Maker.made
    monkeypatch.setattr(Maker, "made", lambda self, tape, *args: (resident.keep(tape), made(self, tape, *args))[1])
    monkeypatch.setattr(resident, "is_away", lambda value, tape: True)
    monkeypatch.setattr(take_graphs, "copies_fit", lambda size, device: True)


def tensors_of_loras(model) -> list[torch.Tensor]:
    notes = [getattr(getattr(layer, "weight", None), "patches", ()) for layer in model.modules()]
    return [tensor for each in notes for patches, _ in each for _, lora in patches for tensor in lora.weights]


def sorted_by_sum(tensors):
    return sorted((each.float() for each in tensors), key=lambda each: each.abs().sum().item())


@pytest.mark.usefixtures("fusing", "room")
def test_a_lora_stays_on_the_device(models, recordings):
    """Once for all sizes, in the dtype that it has. What is written into it counts from the next run on."""
    from anyshape.accel.tape import binding

    from tools import packed

    patcher = flux(models)
    fast, model = compiled(patcher), patcher.model.diffusion_model
    packed.put_lora(model, 0, dtype=torch.float16)
    wanted = [models.sample(patcher, **run) for run in (RUN, OTHER)]
    for run, eager in zip((RUN, OTHER, RUN), (*wanted, wanted[0]), strict=True):
        assert error(models.sample(fast, **run), eager) < CLOSE
    held = list(binding._COPIES.values())
    own = tensors_of_loras(model)
    assert len(held) == len(own) and sum(each.nbytes for each in held) == sum(each.nbytes for each in own)
    assert all(torch.equal(a, b) for a, b in zip(sorted_by_sum(held), sorted_by_sum(own), strict=True))
    before = models.sample(patcher, **RUN)
    own[0].mul_(3.0)
    for run in (RUN, OTHER):
        assert error(models.sample(fast, **run), models.sample(patcher, **run)) < CLOSE
    assert error(models.sample(fast, **RUN), before) > 1e-4
    assert len(recordings) == 2
    del held
    for strength, left in ((1.0, len(own)), (0.0, 0)):  # the copies go with the LoRA, although two sizes had them
        packed.put_lora(model, 1, strength, dtype=torch.float16)
        wanted = models.sample(patcher, **RUN)
        assert error(models.sample(fast, **RUN), wanted) < CLOSE
        assert len(binding._COPIES) == left


@pytest.mark.usefixtures("fusing", "room")
def test_a_lora_that_is_written_into_while_it_stays(models, recordings):
    """In mid-run, which torch counts, and between two runs where torch does not."""
    from tools import packed

    patcher, outs = flux(models), {}
    fast = compiled(patcher)
    for each in (fast, fast, patcher):
        packed.put_lora(patcher.model.diffusion_model, 0, dtype=torch.float16)
        made = iter(tensors_of_loras(patcher.model.diffusion_model))
        out = models.sample(each, **RUN | {"steps": 4}, callback=lambda *_, made=made: next(made).mul_(3.0))
        outs.setdefault(each is fast, []).append(out)
    assert max(error(out, outs[False][0]) for out in outs[True]) < CLOSE
    patched = patcher.model.diffusion_model.get_submodule("double_blocks.0.img_attn.proj").weight.patches[0][0][0][1]
    with torch.inference_mode():
        patched.weights = tuple(tensor.clone() for tensor in patched.weights)
    assert patched.weights[0].is_inference()
    before = models.sample(fast, **RUN)
    with torch.inference_mode():
        patched.weights[0].mul_(3.0)
    out = models.sample(fast, **RUN)
    assert error(out, before) > 1e-4 and error(out, models.sample(patcher, **RUN)) < CLOSE


@pytest.mark.usefixtures("fusing")
def test_a_note_about_a_lora_goes_with_it(models, monkeypatch):
    from anyshape.accel.take_graphs import TakeGraphs

    from tools import packed

    def settle(graphs, call, settings, shape, take, *args):
        take.program.fetches = 3 << 20 if strength else 0  # as on a GPU without room
        own(graphs, call, settings, shape, take, *args)

    own, notes = TakeGraphs.settle, []
    monkeypatch.setattr(TakeGraphs, "settle", settle)
    patcher = flux(models)
    fast = compiled(patcher)
    for strength in (1.0, 0.0, 1.0, 0.0):  # the last two are not recorded again
        packed.put_lora(patcher.model.diffusion_model, 0, strength)
        models.sample(fast, **RUN)
        notes += [shape["note"] for shape in shapes()]
    assert ["a LoRA of 3 MB" in note for note in notes] == [True, False] * 2 and notes[1] == notes[3] == ""


@pytest.mark.usefixtures("fusing", "room")
def test_copies_are_made_once_in_each_state(models, monkeypatch):
    from anyshape.accel.tape.program import Program

    from tools import packed

    patcher = flux(models)
    model = patcher.model.diffusion_model
    packed.put_lora(model, 0, dtype=torch.float16)
    programs = calls_of(monkeypatch, Program, "bind", lambda program, *args: program)
    models.sample(compiled(patcher), **RUN)
    program = programs[-1]
    program.bind(model, program.others, 1)
    copy, source = (program._bound[slot] for slot in program.resident[0])
    with torch.inference_mode():
        source.mul_(3.0)
    program.renew(1)
    assert not torch.equal(copy, source)
    program.renew(2)
    assert torch.equal(copy, source)


@pytest.mark.parametrize("what", ["strength", "tensor", "one more", "the weight"])
def test_a_lora_that_changes_in_mid_run(models, what):
    from tools import packed

    patcher = flux(models)
    layer = patcher.model.diffusion_model.get_submodule("double_blocks.0.img_attn.proj")
    fast = compiled(patcher)

    def change(*_):
        patches, name = layer.weight.patches[0]
        up, down = patches[0][1].weights
        if what == "strength":
            patches[0] = (2.0, patches[0][1])
        elif what == "tensor":
            patches[0][1].weights = (up * 2.0, down)
        elif what == "one more":
            patches.append((0.5, patches[0][1]))
        else:
            weight = packed.Packed(layer.weight.data, unpacked=layer.weight.shape)
            weight.patches = [([(2.0, patches[0][1])], name)]
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            layer.weight.unpacked, layer.weight.patches = weight.unpacked, weight.patches

    outs = []
    for each in (fast, fast, patcher):
        packed.put_lora(patcher.model.diffusion_model, 0)
        outs.append(models.sample(each, **RUN | {"steps": 4}, callback=change))
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[2])
    packed.put_lora(patcher.model.diffusion_model, 0)
    assert error(models.sample(patcher, **RUN | {"steps": 4}), outs[2]) > 1e-4


def test_unpacked_apart_from_torch_they_run_as_in_comfyui(models):
    """The picture is ComfyUI's, and the reason names the code that did it."""
    patcher = flux(models, apart=True)
    fast = compiled(patcher)
    wanted = models.sample(patcher, **RUN)
    assert torch.equal(models.sample(fast, **RUN), wanted) and torch.equal(models.sample(fast, **RUN), wanted)
    reasons = [fallback["reason"] for fallback in fallbacks()]
    assert reasons and all("came back" in reason and "tools/packed.py" in reason for reason in reasons), reasons


def test_the_tools_weights_are_what_they_stand_for(pack):
    from tools import packed

    weight = randn(48, 64)
    unpacked = packed._unpacked(packed.pack(weight), torch.float32)
    assert unpacked.shape == weight.shape and error(torch.Tensor(unpacked), weight) < 1e-2
