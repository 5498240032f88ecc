"""Weights that do not fit, under programs whose steps fetch their own (DynamicVRAM). On the page table of ``pages``.

What a step has fetched is written over when it is done, as the next layers' weights do it on a GPU.
"""

import pytest
import torch

from tools import pages
from tools.driving import calls_of, compiled
from tools.oracles import error, fallbacks, only_streamed, shapes

pytest_plugins = ("tools.page_fixtures",)
pytestmark = pages.IN_STREAM
RUN = {"width": 64, "height": 64, "steps": 3, "tokens": 8}
BLOCKS = 3
MODELS = ("SD15", "Flux", "Chroma", "ZImage", "QwenImage", "WAN21_T2V", "CosmosT2IPredict2", "LTXV", "Krea2")
NEAR = 1e-4  # relative L2 in fp32, of fused kernels


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_to_the_bit(models, streamed, recordings, fetched, name, share):
    """Steps fetch what ComfyUI's own layers would, and nearly as much of the model stays on the card.

    Small layers come together, in the memory that ComfyUI's two buffers need for the largest ones. (Wan's are of about
    one size.) A run asks for its last page first, which costs Krea 2 more: the last one is the largest of its layers.
    """
    patcher, load = streamed(name, share)
    fast = compiled(patcher)
    wanted = [models.sample(patcher, **RUN, seed=seed) for seed in range(2)]
    kept = len(load.pages.there)
    load()
    for seed in range(2):
        assert torch.equal(models.sample(fast, **RUN, seed=seed), wanted[seed]), fallbacks()
        assert pages.is_clean(load) and len(load.pages.there) >= (0.5 if name == "Krea2" else 0.9) * kept
    (shape,) = shapes()
    assert shape["state"] == "tape" and "The operations are fused" in shape["reason"] and only_streamed()
    sizes = {part: sum(each.nbytes for each in (part.weight, part.bias) if each is not None) for part in load.layers}
    room = sorted(sizes.values())[-2]
    assert len(recordings) == 1 and any(len(parts) > 1 for parts in fetched) == (name != "WAN21_T2V")
    assert all(len(parts) == 1 or sum(sizes[part] for part in parts) <= room for parts in fetched)


def test_it_is_recorded_again_where_the_weights_fit(models, streamed, card, recordings, fetched):
    """One program fetches weights and the other does not. Each is found when its turn comes."""
    patcher, load = streamed("ZImage")
    fast, wanted, short = compiled(patcher), models.sample(patcher, **RUN), card.pages
    for turn in range(4):
        card.pages = pages.ENOUGH if turn % 2 else short
        load.pages.give_away()
        load()
        fetched.clear()
        assert torch.equal(models.sample(fast, **RUN), wanted)
        assert bool(fetched) == (turn % 2 == 0) and pages.is_clean(load)
    assert len(recordings) == 2


@pytest.mark.parametrize("name", ["ZImage", "QwenImage"])
def test_kernels_and_later_sizes(models, streamed, fetched, monkeypatch, name):
    """A later size's blocks do not run for its recording, so their weights are not fetched for it either."""
    from anyshape.accel import tape_tier
    from anyshape.accel.tapes import Tapes

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    takes = []
    monkeypatch.setattr(Tapes, "keep", lambda self, *args, own=Tapes.keep: takes.append(args[-1]) or own(self, *args))
    patcher, load = streamed(name)
    fast = compiled(patcher)
    for number, (width, height) in enumerate(((96, 64), (80, 64), (64, 64), (64, 48))):
        wanted = models.sample(patcher, **RUN | {"width": width, "height": height})
        load()
        assert error(models.sample(fast, **RUN | {"width": width, "height": height}), wanted) < NEAR
        assert pages.is_clean(load) and only_streamed() and len(takes) == number + 1
    assert {shape["state"] for shape in shapes()} == {"tape"}
    assert takes[0].copies and not takes[0].left_out and takes[-1].left_out


@pytest.mark.parametrize("name", ["Flux", "WAN21_T2V", "SD15"])
def test_skip_blocks(models, streamed, card, fetched, name):
    """The same steps are skipped as where all weights fit, to the bit. Weights of skipped blocks are not fetched."""
    from tools.driving import skipping
    from tools.oracles import counted
    from tools.skip_driving import PLANNED, STEPS

    patcher, load = streamed(name)
    run, short = RUN | {"steps": STEPS}, card.pages
    card.pages = pages.ENOUGH
    wanted = models.sample(skipping(patcher, depth="1"), **run)
    assert counted() == PLANNED and not fetched
    card.pages = short
    for way in (patcher, compiled(patcher)):
        load.pages.give_away()
        load()
        assert torch.equal(models.sample(skipping(way, depth="1"), **run), wanted)
        assert counted() == PLANNED and pages.is_clean(load) and only_streamed()
    fetched.clear()
    models.sample(compiled(patcher), **run)
    whole, _ = len(fetched), fetched.clear()
    models.sample(skipping(compiled(patcher), depth="1"), **run)
    assert 0 < len(fetched) < whole


def test_a_forward_that_fails_leaves_layers_as_they_were(models, streamed):
    patcher, load = streamed("ZImage")
    fast, wanted, layer = compiled(patcher), models.sample(patcher, **RUN), load.layers[-1]

    def fails(*_):
        raise KeyboardInterrupt

    for _ in range(2):  # while it is recorded
        load()
        handle = layer.register_forward_hook(fails)
        with pytest.raises(KeyboardInterrupt):
            models.sample(fast, **RUN)
        handle.remove()
        assert pages.is_clean(load)
    load()
    assert torch.equal(models.sample(fast, **RUN), wanted)


def test_after_a_failure(models, streamed, monkeypatch):
    """The rest of the run is ComfyUI's, and one page is asked for before anything else, which would take longer."""
    from anyshape.accel.comfy.sampling_state import SamplingState
    from anyshape.accel.tape.program import Program

    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    patcher, load = streamed("ZImage")
    fast, wanted = compiled(patcher), models.sample(patcher, **RUN)
    load()
    assert torch.equal(models.sample(fast, **RUN), wanted)
    looks = calls_of(monkeypatch, SamplingState, "structure")
    monkeypatch.setattr(Program, "run", fails)
    load()
    assert torch.equal(models.sample(fast, **RUN), wanted) and pages.is_clean(load)
    assert shapes()[-1]["state"] == "eager" and len(looks) == 1


def test_a_forward_that_fetches_its_blocks_ahead(streamed, recordings, queued, fetched):
    """It is recorded as any other. ComfyUI's own one still has its queue."""
    from tools.architectures import patchers

    patcher, load = streamed("LTXAV")
    patcher.model_options["transformer_options"]["prefetch_dynamic_vbars"] = True
    fast = compiled(patcher)
    for k in (3, 3, 4):
        made, wanted = len(queued), patchers.forward(patcher, "LTXAV", k)
        assert len(queued) == made + 1
        load()
        assert torch.equal(patchers.forward(fast, "LTXAV", k), wanted) and pages.is_clean(load)
        assert len(queued) == made + 1
    assert {shape["state"] for shape in shapes()} == {"tape"} and len(recordings) == 2 and fetched and only_streamed()


def test_a_patch_whose_results_must_be_kept(models, streamed, recordings):
    """They would push weights out: of Z-Image's Fun ControlNet on fewer layers than its own table supposes."""
    from tools.model_patches import NODES

    patcher, load = streamed("ZImage")
    _, apply, run = NODES["ZImageFunControlnet"]
    patched = apply(patcher)
    wanted = models.sample(patched, **RUN | run)
    for _ in range(2):
        load()
        assert torch.equal(models.sample(compiled(patched), **RUN | run), wanted) and pages.is_clean(load)
    assert {shape["state"] for shape in shapes()} == {"eager"} and recordings


def test_memory_that_is_too_short_for_a_program(models, streamed, fetched, monkeypatch):
    """ComfyUI's own forward runs for the rest of the run; the next one tries again."""
    from anyshape.accel.tape.program import Program

    patcher, load = streamed("ZImage")
    fast, wanted, own = compiled(patcher), models.sample(patcher, **RUN), Program.run
    load()
    assert torch.equal(models.sample(fast, **RUN), wanted)
    with monkeypatch.context() as patch:

        def run(*args):
            own(*args)
            raise torch.OutOfMemoryError("no memory")

        patch.setattr(Program, "run", run)
        tried = calls_of(patch, Program, "run")
        load()
        assert torch.equal(models.sample(fast, **RUN), wanted) and len(tried) == 1
    fetched.clear()
    load()
    assert torch.equal(models.sample(fast, **RUN), wanted) and fetched


def test_memory_that_is_too_short_for_a_skipped_step(models, streamed, monkeypatch):
    """It runs in full, as all after it in this run, by ComfyUI's own forward."""
    from anyshape.accel.tape.program import Program

    from tools.driving import skipping
    from tools.oracles import counted
    from tools.skip_driving import PLANNED, STEPS

    patcher, load = streamed("ZImage")
    skip, run, own = skipping(compiled(patcher), depth="1"), RUN | {"steps": STEPS}, Program.run
    wanted, skipped = models.sample(patcher, **run), models.sample(skip, **run)
    assert counted() == PLANNED and error(skipped, wanted) > NEAR
    inputs = []

    def short(program, given, bound):
        inputs.append(len(given))
        if len(given) > min(inputs):  # with features
            raise torch.OutOfMemoryError("no memory")
        return own(program, given, bound)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "run", short)
        load()
        assert torch.equal(models.sample(skip, **run), wanted) and pages.is_clean(load)
        assert len(set(inputs)) == 2 and counted()["full"] + counted()["skipped"] == STEPS
    load()
    assert torch.equal(models.sample(skip, **run), skipped)
