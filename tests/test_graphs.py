"""What graphs cost, which give way to which, and whose they are. On the CPU: only the capture itself is replaced."""

import dataclasses
import gc

import pytest
import torch

from tools import embed
from tools.driving import in_threads

embed.bare_pack()

from anyshape.accel import engine, graphs  # noqa: E402 - the package exists from the line above on
from anyshape.accel.capture import Recording  # noqa: E402
from anyshape.accel.graphs import Name  # noqa: E402
from anyshape.accel.key import shape_key  # noqa: E402
from anyshape.accel.stats import STATS  # noqa: E402

from tools.captures import BUDGET, Capturer, capture, held, name, only_cache, recording  # noqa: E402


@pytest.fixture
def capturer():
    return Capturer()


@pytest.fixture
def cache(monkeypatch, capturer):
    return only_cache(monkeypatch, capturer)


# The run before a capture -----------------------------------------------------------------------------------------


def test_the_run_before_a_capture_gives_the_first_result(cache, capturer) -> None:
    """It runs whether or not the program has run before, and its result outlives the graph's next replay."""
    capture(cache, a=10)
    given = recording(20, output=4, scale=7)
    cache.capture(name("b"), dataclasses.replace(given, wanted=True, is_long=True), BUDGET)
    assert capturer.warmed == 2  # "a" and "b" are of one program, which had run
    first = cache.result(name("b"))
    assert torch.equal(first, torch.full((4,), 7, dtype=torch.uint8))
    cache._entries[name("b")].output.zero_()  # as the next replay may
    assert int(first.sum()) == 28


WHOLE = torch.arange(24.0).view(2, 3, 4)
LAID = {
    "a view with gaps": WHOLE[:, :2],
    "the same rows several times": WHOLE[:, :1].expand(2, 3, 4),
    "the same numbers several times": WHOLE[..., :1].contiguous().expand(2, 3, 4),
    "turned around": WHOLE.transpose(0, 2),
}


@pytest.mark.parametrize("what", LAID)
def test_inputs_lie_as_those_that_the_program_was_made_for(cache, what) -> None:
    """A kernel reads them by their strides, at the first call and at later ones."""
    x = LAID[what]
    given = dataclasses.replace(
        recording(), inputs={"x": x}, output=torch.zeros(x.shape), wanted=True,
        forward=lambda inputs: inputs["x"].as_strided(x.shape, x.stride()) * 2,
    )  # fmt: skip
    cache.capture(name("a"), given, 10 * BUDGET)
    assert torch.equal(cache.result(name("a")), x * 2)
    static = cache._entries[name("a")].inputs["x"]
    cache.replay(name("a"), given.weights, {"x": x + 1})
    assert static.stride() == x.stride() and torch.equal(static, x + 1)


def test_workspaces_are_made_by_a_product_of_a_dtype_that_the_model_has(cache, capturer) -> None:
    """In a new process, another one's kernels would be loaded for it."""
    given = recording(8)
    dtypes = {"step": torch.int64, "packed": torch.float8_e4m3fn, "x": torch.bfloat16, "y": torch.float32}
    inputs = {what: torch.zeros(4, dtype=dtype) for what, dtype in dtypes.items()}
    cache.capture(name("a"), dataclasses.replace(given, inputs=inputs), BUDGET)
    assert capturer.dtypes == {torch.bfloat16} and capturer.warmed == capturer.captures == 1


def test_what_was_called_before_is_captured_before_it_runs(cache, capturer) -> None:
    """The first result of its graph is then that of a replay."""
    calls = {"a": {"linear"}, "b": {"linear", "conv2d"}, "c": {"conv2d"}, "d": set()}
    for number, (key, called) in enumerate(calls.items()):
        given = dataclasses.replace(recording(output=4, scale=number), wanted=True, calls=frozenset(called))
        cache.capture(name(key, program=number), given, BUDGET)
        assert torch.equal(cache.result(name(key, program=number)), torch.full((4,), number, dtype=torch.uint8))
    assert capturer.warmed == 3 and capturer.replayed == 1
    cache.capture(name("e", program=5), dataclasses.replace(recording(), calls=frozenset({"linear"})), BUDGET)
    assert capturer.warmed == 3 and capturer.replayed == 1  # its result is not asked for


def test_a_long_run_comes_before_its_capture(cache, capturer) -> None:
    """The host captures it while the GPU runs it, though all that it calls was called before."""
    given = dataclasses.replace(recording(output=4, scale=3), wanted=True, calls=frozenset({"linear"}))
    cache.capture(name("a", program=1), given, BUDGET)
    cache.capture(name("b", program=2), dataclasses.replace(given, is_long=True), BUDGET)
    assert capturer.warmed == 2 and capturer.replayed == 0
    assert torch.equal(cache.result(name("b", program=2)), torch.full((4,), 3, dtype=torch.uint8))


def test_what_another_thread_called_runs_before_it_is_captured(cache, capturer) -> None:
    """Libraries have handles and workspaces of each thread."""
    given = dataclasses.replace(recording(), wanted=True, calls=frozenset({"linear"}))
    for number in (1, 2):  # the second thread may well have the number of the first
        in_threads(lambda key: cache.capture(name(key, program=key), given, BUDGET), [number])
    cache.capture(name("b", program=3), given, BUDGET)
    assert capturer.warmed == 3 and capturer.replayed == 0


def test_a_first_run_may_cost_others_the_memory_that_a_library_keeps(cache, capturer) -> None:
    """A library of which nothing is known may free what it has for the captures' stream. Later runs need no more."""

    def made(key: str, program: int, *calls: str) -> None:
        cache.capture(name(key, program=program), dataclasses.replace(recording(1), calls=frozenset(calls)), BUDGET)

    made("known", 1, "linear")
    made("a", 2)
    made("b", 3)
    assert held(cache) == {"known", "b"} and capturer.live == 2
    with cache.pinning() as pins:
        made("a", 2)
        assert held(cache) == {"known", "a", "b"} and not pins.lost
        made("c", 4)
        assert held(cache) == {"known", "c"} and pins.lost


def test_a_graph_whose_program_was_wrong_is_dropped_alone(cache, capturer) -> None:
    capture(cache, a=10, b=20)
    cache.drop(name("b"))
    cache.drop(name("c"))  # which never was
    assert held(cache) == {"a"} and capturer.live == 1


# Which give way ---------------------------------------------------------------------------------------------------


def test_the_least_recently_used_give_way(cache) -> None:
    capture(cache, a=60, b=20)
    cache.replay(name("a"), 0, {"x": torch.ones(60, dtype=torch.uint8)})
    assert capture(cache, c=30) == {}
    assert held(cache) == {"a", "c"}


def test_one_that_is_too_large_alone_is_refused_for_good(cache) -> None:
    assert "this size needs" in capture(cache, a=101)["a"]
    assert "this size needs" in capture(cache, a=10)["a"]
    assert capture(cache, budget=BUDGET + 1, a=10) == {}  # another budget, another answer


def test_memory_that_another_program_takes_meanwhile_costs_no_graph(cache, capturer) -> None:
    """What the driver keeps for a graph is measured by the device's free memory, and once more if it is too much."""
    capture(cache, a=40)
    taken = iter([BUDGET, 0])
    capturer.capture = lambda *given, own=capturer.capture, **more: (own(*given, **more)[0], next(taken))
    assert capture(cache, b=50) == {}
    assert held(cache) == {"a", "b"} and cache.used_bytes == 90 and capturer.live == 2


def test_pinned_graphs_stay_and_others_give_way(cache) -> None:
    capture(cache, old=70)
    with cache.pinning() as pins:
        assert capture(cache, a=60, b=20) == {} and not pins.full
        assert held(cache) == {"a", "b"}
        assert "graph_budget_mb (0) is full" in capture(cache, c=30)["c"] and pins.full
        assert held(cache) == {"a", "b"} and cache.used_bytes == 80


def test_what_is_replayed_is_pinned_too(cache) -> None:
    capture(cache, old=70)
    with cache.pinning() as pins:
        cache.replay(name("old"), 0, {"x": torch.ones(70, dtype=torch.uint8)})
        assert capture(cache, a=40) and pins.full
        assert held(cache) == {"old"}


def test_a_graph_refused_for_pins_is_captured_later_and_not_at_every_step(cache, capturer) -> None:
    with cache.pinning():
        assert capture(cache, a=90, b=20)
        tried = capturer.captures
        assert "is full" in capture(cache, b=20)["b"] and capturer.captures == tried
    assert capture(cache, b=20) == {}
    assert held(cache) == {"b"}


def test_pins_of_graphs_that_are_gone_take_no_room(cache) -> None:
    """Memory ran short and they were given back: then the next is too large, or it fits, by itself."""
    with cache.pinning() as pins:
        capture(cache, a=90)
        cache.drop_owner(0)
        assert "this size needs" in capture(cache, b=101)["b"] and not pins.full
        assert capture(cache, c=100) == {}


# What counts ------------------------------------------------------------------------------------------------------


def test_inputs_outputs_constants_the_driver_and_the_pool_count(cache, capturer) -> None:
    capturer.needs, capturer.driver = 40, 3
    table = torch.zeros(5, dtype=torch.float32)
    took = cache.capture(name("a"), recording(10, 7, constants=(table, None, table)), BUDGET)
    assert took == cache.used_bytes == 10 + 7 + 20 + 3 + 40
    assert cache.capture(name("b"), recording(10, 7), BUDGET) == 20  # the pool is there
    assert cache.used_bytes == 100 == graphs.STATS.graphs.used_bytes


def test_a_drop_frees_what_the_graph_added_and_the_pool_goes_with_the_last(cache, capturer) -> None:
    capturer.needs = 50
    capture(cache, a=10, b=20)
    cache.replay(name("a"), 1, {})  # of weights that have moved
    assert cache.used_bytes == 20 + 50
    cache.replay(name("b"), 1, {})
    assert cache.used_bytes == 0 == capturer.live


def test_twelve_shapes_with_large_inputs_stay_within_the_budget(cache, capturer) -> None:
    """Bytes are counted by another hand: every tensor that a cached graph holds, and the pool."""
    mib, given = graphs.MIB, []
    for index in range(12):
        capturer.needs = (20 + index) * mib
        cache.capture(name(index), recording(54 * mib // 2, 54 * mib // 2), 200 * mib)
        tensors = [t for e in cache._entries.values() for t in (*e.inputs.values(), e.output)]
        given.append(sum(t.nbytes for t in tensors) + capturer.pool_bytes)
    assert max(given) <= 200 * mib and given[-1] == cache.used_bytes
    assert len(cache) == 3


def test_a_pool_that_is_too_large_for_a_small_graph_begins_again(cache, capturer) -> None:
    capturer.needs = 80
    capture(cache, a=10)
    capturer.needs = 30
    assert capture(cache, b=40) == {}
    assert held(cache) == {"b"} and cache.used_bytes == 70


# Whose they are ---------------------------------------------------------------------------------------------------


def test_a_graph_is_of_one_program(cache) -> None:
    cache.capture(name("a", program=1), recording(4, 4, scale=2), BUDGET)
    assert cache.replay(name("a", program=2), 0, {"x": torch.ones(4)}) is None
    cache.capture(name("a", program=2), recording(4, 4, scale=3), BUDGET)
    for program, scale in ((1, 2), (2, 3)):
        out = cache.replay(name("a", program=program), 0, {"x": torch.ones(4, dtype=torch.uint8)})
        assert out.tolist() == [scale] * 4


def test_held_names_the_model(cache) -> None:
    cache.capture(name("a", owner=1), recording(4, label="UNet"), BUDGET)
    cache.capture(name("a", owner=2), recording(6, label="ControlNet"), BUDGET)
    cache.capture(name("a", owner=2, program=2), recording(8, label="ControlNet"), BUDGET)
    assert cache.held() == {("UNet", "a"): 4, ("ControlNet", "a"): 14}


def test_a_program_runs_once_on_the_captures_stream_before_it_is_captured(cache, capturer) -> None:
    given, warmed = dataclasses.replace(recording(1), is_long=True), []
    for which in (name("a"), name("b"), name("a", program=2), name("a", owner=1)):
        cache.capture(which, given, BUDGET)
        warmed.append(capturer.warmed)
    assert warmed == [1, 1, 2, 3]
    cache.drop_owner(0)
    cache.capture(name("a"), given, BUDGET)
    assert capturer.warmed == 4


def test_an_owner_that_is_gone_is_dropped_by_the_next_call(cache, capturer) -> None:
    """The collector may run at any place, so the end of an engine frees nothing itself."""
    capture(cache, a=10)
    cache.capture(name("b", owner=1), recording(5), BUDGET)
    graphs.abandon(0)
    assert capturer.live == 2
    cache.replay(name("b", owner=1), 0, {"x": torch.ones(5, dtype=torch.uint8)})
    assert capturer.live == 1 and cache.used_bytes == 5


def test_the_end_of_an_engine_says_so_where_python_ends_too(cache, monkeypatch) -> None:
    """Then its module may have been emptied."""
    made = engine.Engine(STATS.model("Gone", "model"))
    owner = id(made)
    monkeypatch.setattr(engine, "graphs", None)
    del made
    gc.collect()
    assert owner in cache._abandoned


def test_caches_may_be_made_while_others_are_dropped(cache, monkeypatch) -> None:
    def makes_another(owner):
        graphs.cache(torch.device("meta"))

    monkeypatch.setattr(cache, "drop_owner", makes_another)
    graphs.drop_owner(0)
    assert len(graphs._CACHES) == 2


# The key ----------------------------------------------------------------------------------------------------------


def test_a_real_key_names_a_graph(cache) -> None:
    x = {"x": torch.ones(1, 4, 8, 8)}
    key = Name(0, shape_key(x), 1)
    cache.capture(key, Recording(lambda inputs: inputs["x"] * 2, x, 0, (), x["x"] * 2), 1 << 20)
    assert torch.equal(cache.replay(key, 0, {"x": x["x"] * 3}), x["x"] * 6)


@pytest.mark.parametrize("has_budget", [True, False])
def test_only_who_has_a_budget_is_told_to_raise_it(has_budget: bool) -> None:
    """Skip Blocks alone makes no graphs, and has no input that would change it."""
    from types import SimpleNamespace

    from anyshape.accel.call import Settings
    from anyshape.accel.reasons import say
    from anyshape.accel.stats import ModelStats
    from anyshape.accel.take_graphs import TakeGraphs

    stats = ModelStats("SDXL", "model")
    shape = stats.shape("a", 512, 512, 1)
    settings = Settings(graph_budget_mb=0, has_budget=has_budget)
    take = SimpleNamespace(graph=True, note="", program=SimpleNamespace(fetches=0))
    call = SimpleNamespace(taped=SimpleNamespace(stream=None))
    TakeGraphs(stats, 0).settle(call, settings, shape, take, {}, torch.zeros(1))
    assert (shape.state, shape.reason) == ("tape", say("no_graphs") if has_budget else "")
