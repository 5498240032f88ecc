"""Graphs in pieces, with calls of other packs' code in between. On the CPU: only torch's graph is replaced."""

import pytest
import torch

from tools import embed
from tools.adapters import counting, tripled
from tools.driving import SMALL_UNET, compiled
from tools.oracles import error, fallbacks, shapes
from tools.patching import CLOSE, assert_equal, run, with_patch

embed.bare_pack()

from anyshape.accel import graphs  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.pieces import Memory, Pieces, captured_here  # noqa: E402

from tools.captures import CpuGraph, as_on_a_gpu  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_stats")


def captured(run):
    """A graph of ``run`` and what that gave."""
    graph = Pieces(CpuGraph)
    with torch.inference_mode():
        graph.capture_begin()
        out = run()
        graph.capture_end()
    assert captured_here() is None
    return graph, out


def test_a_call_cuts_the_graph_and_runs_at_each_replay() -> None:
    x, between = torch.ones(3), []

    def run():
        y = x * 2
        got = torch.empty(3)
        place, read = Memory(got), Memory(y)
        captured_here().cut(lambda: (between.append(read.tensor().clone()), place.write(read.tensor() + 1)))
        return got * y

    graph, out = captured(run)
    assert len(graph) == 2 and not between
    for value in (1.0, 5.0):
        x.fill_(value)
        with torch.inference_mode():
            graph.replay()
        assert torch.equal(between[-1], torch.full((3,), 2 * value))
        assert torch.equal(out, torch.full((3,), (2 * value + 1) * 2 * value))
    assert len(between) == 2


def test_what_a_call_raises_ends_the_replay() -> None:
    x, out = torch.zeros(1), torch.zeros(1)

    def run():
        x.add_(1)
        captured_here().cut(lambda: 1 / 0)
        out.add_(1)

    graph, _ = captured(run)
    x.zero_(), out.zero_()
    with pytest.raises(ZeroDivisionError):
        graph.replay()
    assert (float(x), float(out)) == (1, 0)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_piece_whose_end_fails_is_not_ended_again(pieces) -> None:
    """Whoever breaks a capture off ends it, whatever failed in it. A second end would be an error for somebody else."""
    ends = []

    class Graph(CpuGraph):
        def capture_end(self) -> None:
            super().capture_end()
            ends.append(self)
            if len(ends) == pieces:
                raise RuntimeError("the driver refuses the capture")

    graph = Pieces(Graph)
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="refuses"):
        for _ in range(pieces):
            graph.cut(lambda: None)
    for _ in range(2):
        graph.capture_end()
    assert len(ends) == pieces and captured_here() is None


# Models whose patches are called -----------------------------------------------------------------------------------


@pytest.fixture
def capturer(monkeypatch):
    """A model's second call captures a graph, as on a GPU."""
    return as_on_a_gpu(monkeypatch)


def test_patches_run_between_the_pieces(models, fresh, capturer):
    """With other latents and other patches' numbers at each step, the picture is eager's."""
    called, expected = [], []
    eager, fast = with_patch(fresh, counting(expected)), with_patch(compiled(fresh), counting(called))
    for seed in range(3):
        assert_equal(models, eager, fast, seed=seed)
        assert called == expected
    (shape,) = shapes()
    assert shape["state"] == "graph" and shape["replays"] >= 8 and not fallbacks() and capturer.captures == 1
    assert "another node's patch is called" in shape["note"] and "counting" in shape["note"]
    for patched in (False, True, False):  # what is told is about the latest call
        assert_equal(models, *(eager, fast) if patched else (fresh, compiled(fresh)))
        assert bool(shapes()[-1]["note"]) == patched


def test_a_tensor_that_a_patch_gets_twice_is_one_tensor(models, fresh, capturer):
    """What it gives back is told by that."""
    called, expected = [], []
    eager, fast = with_patch(fresh, tripled(expected)), with_patch(compiled(fresh), tripled(called))
    for seed in range(2):
        assert_equal(models, eager, fast, seed=seed)
    assert called == expected and all(expected)
    assert shapes()[-1]["state"] == "graph" and shapes()[-1]["replays"] > 3 and not fallbacks()


def test_a_graphs_memory_is_not_a_patchs_to_write_or_keep(models, fresh, capturer):
    kept, copies = [], []

    def keep(q):
        kept.append(q)
        copies.append(q.clone())

    fast = with_patch(compiled(fresh), counting([], keep))
    for seed in range(2):
        run(models, fast, seed=seed)
    assert shapes()[-1]["replays"] > 3 and all(map(torch.equal, kept, copies))


def test_a_patch_that_changes_its_mind_in_mid_replay(models, fresh, capturer):
    """Its result has another form at one step: that forward is eager's, and no patch is called twice in it."""

    def odd(patcher):
        calls = []

        def patch(n, k, v, options):
            calls.append(1)
            form = list if len(calls) == 23 else tuple
            return form((n * (1 + len(calls) / 50), k, v))

        patcher.set_model_attn2_patch(patch)
        patcher.model_options["calls"] = calls

    eager, fast = with_patch(fresh, odd), with_patch(compiled(fresh), odd)
    for seed in range(2):
        assert_equal(models, eager, fast, seed=seed)
    assert len(fast.model_options["calls"]) == len(eager.model_options["calls"]) > 23
    assert capturer.captures == 1 and "several shapes or types" in shapes()[-1]["reason"]


def test_another_packs_attention_runs_between_the_pieces(models, fresh, capturer):
    """A wrapper of attention that counts its calls, as packs set it for a model."""

    def attention(patcher):
        calls = []

        def override(function, q, k, v, heads, *args, **kwargs):
            calls.append(1)
            return function(q, k, v * (1 + len(calls) / 100), heads, *args, **kwargs)

        patcher.model_options["transformer_options"]["optimized_attention_override"] = override

    eager, fast = with_patch(fresh, attention), with_patch(compiled(fresh), attention)
    for seed in range(3):
        assert_equal(models, eager, fast, seed=seed)
    (shape,) = shapes()
    assert shape["state"] == "graph" and shape["replays"] >= 8 and "attention is called" in shape["note"]


def test_a_model_that_a_patch_runs_has_no_graph_there(models, fresh, capturer):
    """Its graph would write over what the other's later pieces read. By itself it has one."""
    inner, expected, nested = compiled(models.unet("sd15", torch.float32, **SMALL_UNET)), [], []
    for seed in range(2):
        expected.append(run(models, inner, seed=seed))
    (by_itself,) = shapes()
    assert by_itself["state"] == "graph" and by_itself["replays"]

    def calling(patcher):
        def patch(h, options):
            if options["block"] == ("input", 1):
                nested.append(run(models, inner, seed=1))
            return h * float(options["sigmas"][0]) ** 0

        patcher.set_model_input_block_patch(patch)

    eager, fast = with_patch(fresh, calling), with_patch(compiled(fresh), calling)
    run(models, fast)
    before = shapes()
    assert_equal(models, eager, fast, seed=1)
    after = shapes()
    assert after[1]["replays"] == before[1]["replays"] + 4 and after[0]["state"] == "tape"
    assert "within another model's forward" in after[0]["reason"]
    assert all(error(each, expected[1]) < CLOSE for each in nested)


def test_graphs_that_go_in_mid_replay_go_after_it(models, fresh, capturer):
    def freeing(patcher):
        def patch(h, options):
            graphs.clear()
            return h * float(options["sigmas"][0]) ** 0

        patcher.set_model_input_block_patch(patch)

    eager, fast = with_patch(fresh, freeing), with_patch(compiled(fresh), freeing)
    for seed in range(2):
        assert_equal(models, eager, fast, seed=seed)
    assert capturer.captures > 2  # each time it is captured again
