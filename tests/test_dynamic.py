"""DynamicVRAM: weights that ComfyUI maps in while a model runs, under tapes and programs.

comfy-aimdo has no CPU device: its page table, and nothing else, is a stand-in (``tools.pages``). What it does on a GPU
is tested there (test_gpu_dynamic.py): graphs, pinned pages under launches, memory.
"""

import pytest
import torch

from tools import pages
from tools.driving import SMALL_RUN, calls_of, compiled, options_of, unet_inputs
from tools.oracles import assert_fast, error, fallbacks, shapes
from tools.pages import ENOUGH

pytest_plugins = ("tools.page_fixtures",)
pytestmark = pytest.mark.usefixtures("clean_stats")

CLOSE = 1e-4  # relative L2 in fp32; the contract allows 1e-3


both = pytest.mark.parametrize("card", [True, False], ids=["counted", "flagged"], indirect=True)  # comfy-aimdo's ways


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


def test_a_later_run_asks_once_for_all_pages(models, load, card, monkeypatch):
    """Where nothing has changed. A run before asked for each layer's, and so does one after a change."""
    fast, faults = compiled(load.patcher), calls_of(monkeypatch, pages.Pages, "fault")

    def asked():
        load()
        faults.clear()
        out = models.sample(fast, **SMALL_RUN)
        assert error(out, wanted) < CLOSE and not load.pages.pinned
        return len(faults)

    wanted = models.sample(load.patcher, **SMALL_RUN)
    layers = len(load.layers)
    assert asked() > layers and asked() == asked() < 5
    load.pages.give_away(0)
    assert asked() > layers and asked() < 5
    load.layers[0]._v_signature = None  # as of a layer that is patched
    assert asked() > layers and asked() < 5
    before = load.pages
    for part in load.layers:  # loaded again, at other addresses
        del part._v
        part._v_signature = None
    load.__init__(load.model, card)
    assert load.pages is not before and asked() > layers and asked() < 5
    assert_fast()


def test_what_is_known_of_pages_is_about_one_place_of_the_weights(pack):
    """Another table may count its pages alike, and one that is gone has no weights."""
    from anyshape.accel.comfy.known_pages import KnownPages

    one, other = pages.Pages(pages.Card(), pages.PAGE), pages.Pages(pages.Card(), pages.PAGE)
    places, layers, known = [(one, 1, 2), (one, 3, 4)], [{}, {}], KnownPages()
    for changed in ([(other, 1, 2), (other, 3, 4)], places[:1], [(one, 1, 2), (one, 5, 4)], [(one, 1, 2), (one, 3, 6)]):
        known.note([], 8, places, layers)
        known.look(list(places))
        assert known.may_be_there(8) and not known.may_be_there(7)
        known.look(changed)
        assert not known.may_be_there(8)
    known.note([], 8, places, layers)
    known.note(None, 8, places, layers)
    assert not known.may_be_there(8)


@both
def test_a_model_that_is_asked_how_far_rounding_carries_it(models, load, recordings, monkeypatch):
    """Its own forward runs once more, which lets go of the weights; the program goes on with them, and none is kept."""
    from anyshape.accel import sensitivity, verify
    from anyshape.accel.tape.program import Program

    run = Program.run
    other = lambda x: sensitivity.nudged(-x).neg()  # noqa: E731 - one step the other way
    monkeypatch.setattr(Program, "run", lambda self, given, bound: run(self, [other(given[0]), *given[1:]]))
    monkeypatch.setattr(verify, "BOUNDS", dict.fromkeys(verify.BOUNDS, verify.Bounds(0.0, 0.0)))
    asked = calls_of(monkeypatch, sensitivity, "measured")
    eager = models.sample(load.patcher, **SMALL_RUN)
    assert error(models.sample(compiled(load.patcher), **SMALL_RUN), eager) < CLOSE
    assert len(asked) == len(recordings) == 1 and not load.pages.pinned
    assert_fast()
    assert not fallbacks()


def test_blocks_are_alike_wherever_their_weights_lie(models, card, monkeypatch):
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
            Program,
            "bind",
            lambda self, *args: found.update(leaf.name for leaf, *_ in self._weights) or bind(self, *args),
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
def test_what_does_not_fit_is_fetched_step_by_step(models, load, card, recordings):
    """To the bit, with a reason that helps; and from where the weights lie as soon as they fit."""
    fast, source = compiled(load.patcher), load.patcher
    card.pages = load.pages.count // 2
    out = models.sample(fast, **SMALL_RUN)
    (shape,) = shapes()
    assert shape["state"] == "tape" and shape["reason"].startswith("weights streamed: of "), shape["reason"]
    assert all(found["reason"].startswith("weights streamed: of ") for found in fallbacks())
    assert len(recordings) == 1 and not load.pages.pinned
    ours = len(load.pages.there)
    load.pages.give_away()
    load()
    models.sample(source, **SMALL_RUN)
    assert ours == len(load.pages.there) > card.pages // 2  # as much of it stays as without us
    card.pages = ENOUGH
    load()
    assert torch.equal(out, models.sample(source, **SMALL_RUN))
    assert error(models.sample(fast, **SMALL_RUN), out) < CLOSE and len(recordings) == 2
    assert not shapes()[0]["reason"]
    card.pages = load.pages.count // 2
    load.pages.give_away()
    assert torch.equal(out, models.sample(fast, **SMALL_RUN)) and shapes()[0]["reason"]
    card.pages = ENOUGH
    load()
    assert error(models.sample(fast, **SMALL_RUN), out) < CLOSE and len(recordings) == 2
    assert not shapes()[0]["reason"]


def test_a_streamed_models_pages_are_not_asked_for_in_each_step(models, load, card, monkeypatch):
    """From the second step on one page is, until there is room."""
    from anyshape.accel.comfy.dynamic import MappedWeights

    fast, run = compiled(load.patcher), SMALL_RUN | {"steps": 4}
    card.pages = load.pages.count // 2
    looks = calls_of(monkeypatch, MappedWeights, "ready")
    models.sample(fast, **run)
    assert len(looks) == 1 and shapes()[0]["reason"] and not load.pages.pinned

    def room(step, *_):
        if step == 1:
            card.pages = ENOUGH
            load()

    looks.clear()
    models.sample(fast, **run, callback=room)
    assert 1 < len(looks) < 4 and not shapes()[0]["reason"]


@both
def test_a_page_that_goes_in_the_recorded_forward(models, load, recordings):
    """What was written down of such a forward counts for nothing; the next one is recorded."""
    fast, source, run = compiled(load.patcher), load.patcher, SMALL_RUN | {"steps": 1}
    models.sample(fast, **run)  # one step is recorded in the second run
    wanted = models.sample(source, **run)
    layer = load.layers[len(load.layers) // 2]
    free: list[set] = []  # what is kept while ComfyUI's own forward runs: no more than its layer asks for

    def hook(*_):
        free.append(load.pages.pinned)
        load.pages.give_away(0)

    handle = layer.register_forward_hook(hook)
    out = models.sample(fast, **run)
    handle.remove()
    assert free == [set()]
    assert error(out, wanted) < CLOSE and shapes()[0]["state"] == "eager"
    assert shapes()[0]["reason"].startswith("weights streamed: of ")
    assert error(models.sample(fast, **run), wanted) < CLOSE
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


def test_graphs_give_way_to_weights(models, load, card, monkeypatch):
    """And no other is captured until there is room for both. There are no graphs on a CPU: these are numbers."""
    from anyshape.accel.comfy import dynamic
    from anyshape.accel.comfy.shortages import Unfit

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
    assert weights.ready(cpu, torch.float32, None, Unfit()) == "" and held.used_bytes == 0
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


def test_skip_blocks(models, load, card):
    """Both programs read the weights where they lie; where these do not fit, ComfyUI's own forward leaves them out."""
    from tools.driving import skipping
    from tools.oracles import counted

    run = SMALL_RUN | {"steps": 12}
    skip = skipping(compiled(load.patcher), depth="0")
    taped = models.sample(skip, **run)
    assert counted() == {"full": 4, "skipped": 8, "resets": {}} and not load.pages.pinned
    load.pages.give_away()
    models.sample(skip, **run)
    assert counted() == {"full": 4, "skipped": 8, "resets": {}}
    card.pages = load.pages.count // 2
    load.pages.give_away()
    out = models.sample(skip, **run)
    assert counted() == {"full": 4, "skipped": 8, "resets": {}} and not load.pages.pinned
    assert error(out, taped) < 1e-4


def test_what_comfyui_notes_of_streamed_weights_is_no_change(models, load, card, monkeypatch):
    """It does so at each layer of each step. A look that saw more than that would go through all the model's code."""
    from anyshape.accel.fingerprint import ToWatch
    from anyshape.accel.parts_seen import PartsSeen

    from tools.driving import skipping
    from tools.oracles import counted

    looks, counts = [calls_of(monkeypatch, kind, "__init__") for kind in (PartsSeen, ToWatch)], []
    skip = skipping(load.patcher, depth="0")
    for turn in range(3):
        card.pages = load.pages.count * (turn + 2) // 8  # other layers are streamed each time
        load()
        load.pages.give_away()
        models.sample(skip, **SMALL_RUN | {"steps": 12})
        assert counted() == {"full": 4, "skipped": 8, "resets": {}}
        counts.append([len(calls) for calls in looks])
    assert counts[0][0] == 1 and counts[1:] == [[1, counts[1][1]]] * 2, counts
