"""How much faster than ComfyUI: what is counted and what is said of it, prompts in a line, and what is being prepared.

Plain torch; ``test_compare`` has the same in the real server and the real page.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tools import embed

embed.bare_pack()

from anyshape.accel import gain, preparing, stats  # noqa: E402 - the package exists from the line above on
from anyshape.accel.times import _THREAD, CallTimes, Eager, rehearsal  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def on_a_gpu(monkeypatch) -> None:
    """As far as the factor is concerned."""
    monkeypatch.setattr(gain, "can_gain", lambda: True)


def called(times: CallTimes, milliseconds: float, fast: bool = True) -> None:
    """A call that took so long; the clock itself is tested in test_clock.py."""
    with times._lock:
        times._add(milliseconds, fast, not getattr(_THREAD, "rehearsing", False))


def counted(eager: float | None = 30.0, ours: tuple[float, ...] = (20.0, 20.0), first: float = 0.1, state="graph"):
    """The stats with one size of one model in them."""
    own = stats.Stats()
    shape = own.model("UNet", "model").shape("k", 512, 768, 2)
    shape.calls, shape.state, shape.eager.once = 1 + len(ours), state, eager
    shape.times.first(first, state != "eager")
    for milliseconds in ours:
        called(shape.times, milliseconds, state != "eager")
    return own


def of_shape(own: stats.Stats) -> tuple[float | None, float | None]:
    (shape,) = own.snapshot()["models"][0]["shapes"]
    return shape["factor"], shape["saved_seconds"]


# The gain ---------------------------------------------------------------------------------------------------------


def test_the_factor_is_of_medians_and_saved_is_of_all_calls(on_a_gpu) -> None:
    own = counted(30.0, (20.0, 20.0, 50.0), first=0.1)
    assert of_shape(own) == (1.5, pytest.approx((4 * 30 - 100 - 90) / 1e3))
    assert own.snapshot()["gain"] == {"factor": 1.5, "saved_seconds": -0.07}


@pytest.mark.parametrize(
    "own",
    [counted(None), counted(ours=()), counted(state="eager")],
    ids=["eager was not measured", "only the first call", "as ComfyUI"],
)
def test_what_was_not_measured_is_not_claimed(on_a_gpu, own) -> None:
    assert of_shape(own) == (None, None) and own.snapshot()["gain"] == {}


def test_on_a_cpu_nothing_is_gained() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert of_shape(counted()) == (None, None)


def test_calls_in_eager_neither_save_nor_cost(on_a_gpu) -> None:
    """Nor do they stay in the median, once the size runs fast."""
    own = counted(30.0, (30.0, 29.0), first=0.03, state="eager")
    (shape,) = own._models[0].shapes.values()
    shape.state = "tape"
    called(shape.times, 15.0)
    assert of_shape(own) == (2.0, 0.015)


def test_what_is_made_ahead_only_costs(on_a_gpu) -> None:
    times = CallTimes()
    with rehearsal():
        times.first(2.0, True)
        called(times, 20.0)
    assert times.saved_seconds(30.0) == pytest.approx(-2.02)
    called(times, 20.0)
    assert times.saved_seconds(30.0) == pytest.approx(-2.01)


def test_the_total_weighs_sizes_by_their_calls(on_a_gpu) -> None:
    own = counted(30.0, (20.0,) * 3, first=0.02)
    other = own.model("VAE", "vae").shape("v", 64, 64, 1)
    other.calls, other.state, other.eager.once = 2, "tape", 5.0
    called(other.times, 10.0)
    unknown = own.model("UNet", "model").shape("u", 8, 8, 1)
    unknown.calls, unknown.state = 9, "graph"
    called(unknown.times, 1000.0)
    assert own.snapshot()["gain"] == {"factor": round(130 / 100, 3), "saved_seconds": 0.04}  # 40 - 5 ms


def test_steps_of_skip_blocks_stand_beside_one_forward_of_comfyuis() -> None:
    """On every device: less work is less work."""
    own = stats.Stats()
    model = own.model("UNet", "model")
    for step, calls, took in (("full", 3, 20.0), ("skipped", 6, 5.0)):
        shape = model.shape(f"k step={step}", 512, 768, 2, step=step, own="k")
        shape.calls, shape.state = calls, "tape"
        for _ in range(calls):
            called(shape.times, took)
    model.eager_at("k").note(30.0)
    entries = own.snapshot()["models"][0]["shapes"]
    assert [(s["step"], s["eager_ms"], s["factor"]) for s in entries] == [("full", 30.0, 1.5), ("skipped", 30.0, 6.0)]
    assert own.snapshot()["gain"] == {"factor": 3.0, "saved_seconds": 0.18, "full_steps": 1.5}
    full = own.model("Flux", "model").shape("f step=full", 8, 8, 1, step="full", own="f")
    full.calls, full.state, full.eager.once = 1, "tape", 10.0
    called(full.times, 10.0)
    assert gain.total([full.as_dict()]) == {"factor": 1.0, "saved_seconds": 0.0}  # nothing was skipped


def test_eager_warmed_up_says_more_than_one_forward() -> None:
    eager = Eager()
    assert eager.ms is None
    eager.once = 7.0
    for seconds in (0.2, 0.01, 0.01):
        with eager.measure(CPU):
            time.sleep(seconds)
    assert 10 <= eager.ms < 100  # the first only warms up
    fresh = Eager()
    with fresh.measure(CPU):
        pass
    assert fresh.ms is None


def test_eagers_time_survives_what_is_cleared() -> None:
    """It is found again when the size runs again, and there is a bound on how many are kept."""
    own = counted(21.0)
    own.clear()
    model = own._models[0]
    assert model.shape("k", 512, 768, 2).eager.once == 21.0
    for number in range(2 * stats.MAX_SHAPES):
        model.eager_at(str(number))
    assert len(model.eager) == stats.MAX_SHAPES


def test_the_gain_in_words() -> None:
    assert [gain.times(factor) for factor in (1.44, 1.04, 0.96, 2.0)] == ["1.4x", "1.04x", "0.96x", "2.0x"]
    assert [gain.duration(seconds) for seconds in (0.25, 12.3, 600.0, 9000.0)] == ["0.2 s", "12 s", "10 min", "2.5 h"]


# Prompts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompted() -> tuple[stats.Stats, list[str]]:
    """Counters, and the prompt that runs, by its id."""
    own, running = stats.Stats(), [""]
    own.prompts.follow(lambda: running[0], lambda found: f"workflow of {found}")
    return own, running


def test_prompts_are_numbered_as_they_run(prompted) -> None:
    own, running = prompted
    shape, found = own.model("UNet", "model").shape("k", 8, 8, 1), []
    for running[0] in ("a", "a", "b", "", "b", "c"):
        own.prompts.called(shape)
        found.append(shape.prompt)
    assert found == [1, 1, 2, 0, 2, 3]
    assert shape.workflows == ["workflow of a", "workflow of b", "workflow of c"]
    assert shape.as_dict()["prompts"] == {"workflow of a": 1, "workflow of b": 2, "workflow of c": 3}


def test_each_workflow_has_a_latest_prompt_and_so_have_scripts() -> None:
    own, running = stats.Stats(), [""]
    own.prompts.follow(lambda: running[0], {"a": "v", "b": "", "c": "v", "d": "w"}.get)
    shape = own.model("UNet", "model").shape("k", 8, 8, 1)
    for running[0] in "abcd":
        own.prompts.called(shape)
    assert shape.prompts == {"": 2, "v": 3, "w": 4} and shape.workflows == ["v", "w"] and shape.prompt == 4


def test_a_run_with_skipped_blocks_knows_its_prompt(prompted) -> None:
    own, running = prompted
    outside = own.skip_run("UNet", 2).as_dict()
    assert (outside["prompt"], outside["workflow"], outside["entry"]) == (0, "", "")
    running[0] = "a"
    inside = own.skip_run("UNet", 2).as_dict()
    assert (inside["prompt"], inside["workflow"]) == (1, "workflow of a")


def test_a_prompt_knows_its_calls_and_what_it_compiled(prompted) -> None:
    own, running = prompted
    model = own.model("UNet", "model")
    small, large = model.shape("s", 8, 8, 1), model.shape("l", 16, 16, 1)
    model.kernels = 5
    running[0] = "a"
    for shape in (small, small, large):
        own.prompts.called(shape)
    model.kernels = 12
    running[0] = "b"
    own.prompts.called(small)
    model.kernels = 13
    assert own.prompts.pending() == ["a", "b"]
    first, second = own.prompts.end("a"), own.prompts.end("b")
    assert [(s["width"], s["calls"]) for s in first.sizes()] == [(8, 2), (16, 1)]
    assert (first.kernels, second.kernels) == (7, 1)
    assert own.prompts.end("a") is None and own.prompts.pending() == []


def test_prompts_and_workflows_are_bounded(prompted) -> None:
    own, running = prompted
    shape = own.model("UNet", "model").shape("k", 8, 8, 1)
    for number in range(50):
        running[0] = str(number)
        own.prompts.called(shape)
    assert len(own.prompts.pending()) == 8 and shape.prompt == 50
    assert shape.workflows[-1] == "workflow of 49" and len(shape.workflows) == stats.MAX_WORKFLOWS
    for number in range(1000):
        own.prompts.called(own.model("UNet", "model").shape(f"k{number}", 8, 8, 1))
    assert len(own.prompts.end("49").sizes()) == 256


# Preparing --------------------------------------------------------------------------------------------------------


def test_what_is_being_prepared_has_a_clock() -> None:
    assert preparing.snapshot() == {}
    with preparing.preparing("UNet", "64x64"):
        time.sleep(0.15)
        with preparing.preparing("UNet", "a part of it"):
            now = preparing.snapshot()
        assert preparing.snapshot()["number"] == now["number"]
    assert (now["model"], now["size"]) == ("UNet", "64x64") and 0.1 <= now["seconds"] < 5
    assert preparing.snapshot() == {} == stats.Stats().snapshot()["preparing"]
    with pytest.raises(ValueError), preparing.preparing("UNet", "64x64"):
        raise ValueError
    assert preparing.snapshot() == {}


class Cancelled(Exception):
    """What ComfyUI raises where the user has cancelled."""


@pytest.fixture
def cancelled(monkeypatch) -> threading.Event:
    """Set by the user."""
    asked = threading.Event()

    def ask() -> None:
        if asked.is_set():
            raise Cancelled

    monkeypatch.setattr(preparing, "_ASK", [ask])
    return asked


def test_cancelling_leaves_threads_that_compile(cancelled) -> None:
    """Nobody waits for what has begun, and what has not is dropped."""
    ran: list[int] = []

    def compile_slowly(number: int) -> None:
        ran.append(number)
        time.sleep(4)

    threading.Timer(0.5, cancelled.set).start()
    started = time.monotonic()
    with pytest.raises(Cancelled), preparing.workers(2, lambda: None) as pool:
        preparing.finished([pool.submit(compile_slowly, number) for number in range(6)])
    assert time.monotonic() - started < 2 and ran == [0, 1]


def test_without_cancelling_all_are_done(cancelled) -> None:
    with preparing.workers(3, lambda: None) as pool:
        futures = [pool.submit(time.sleep, 0.05) for _ in range(6)]
        preparing.finished(futures)
        assert all(future.done() for future in futures)


def test_kernels_that_fail_still_say_so(cancelled) -> None:
    """As ``compile_all`` asks: all are waited for, then the first failure is raised."""
    with pytest.raises(ZeroDivisionError), preparing.workers(2, lambda: None) as pool:
        assert isinstance(pool, ThreadPoolExecutor)
        futures = [pool.submit(lambda: 1 / 0), pool.submit(time.sleep, 0.05)]
        preparing.finished(futures)
        for future in futures:
            future.result()
