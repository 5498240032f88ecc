"""Graphs whose capture fails, the garbage collector and several threads. On the CPU: only the capture is replaced."""

import contextlib
import dataclasses
import gc

import pytest
import torch

from tools import embed
from tools.driving import in_threads

embed.bare_pack()

from anyshape.accel import graphs, stats  # noqa: E402 - the package exists from the line above on
from anyshape.accel.capture import Recording, collector_off  # noqa: E402
from anyshape.accel.errors import CaptureFailed, NoRoom  # noqa: E402

from tools.captures import BUDGET, Capturer, capture, held, name, only_cache, recording  # noqa: E402


@pytest.fixture
def capturer():
    return Capturer()


@pytest.fixture
def cache(monkeypatch, capturer):
    return only_cache(monkeypatch, capturer)


# What fails -------------------------------------------------------------------------------------------------------

SHORT = torch.OutOfMemoryError("CUDA out of memory")


def test_a_capture_that_memory_failed_makes_room_and_is_tried_again(cache, capturer) -> None:
    capture(cache, a=10)
    capturer.errors = [SHORT]
    assert capture(cache, b=10) == {}
    assert held(cache) == {"b"}


def test_memory_is_short_also_where_another_error_follows(cache, capturer) -> None:
    follows = RuntimeError("operation failed due to a previous error during capture")
    follows.__context__ = SHORT
    capture(cache, a=10)
    capturer.errors = [follows]
    assert capture(cache, b=10) == {} and held(cache) == {"b"}


def test_a_capture_that_fails_for_another_reason_evicts_nothing_and_is_remembered(cache, capturer) -> None:
    capture(cache, a=10)
    capturer.errors = [RuntimeError("cuBLAS error: 13\nSearch for it"), RuntimeError("cuBLAS error: 13")] * 2
    for _ in range(3):
        refused = capture(cache, b=10)
        assert "cuBLAS error: 13)" in refused["b"] and "memory is short" not in refused["b"].lower()
    assert held(cache) == {"a"} and (capturer.captures, capturer.warmed) == (3, 2)  # once more, after a run
    capturer.errors.clear()
    assert capture(cache, c=10) == {}


def test_an_error_while_little_memory_is_free_is_no_reason_for_good(cache, capturer) -> None:
    """What fails when DynamicVRAM takes pages away within a capture does not speak of memory."""
    capturer.errors = [RuntimeError("operation failed due to a previous error during capture")] * 2
    least = graphs.LITTLE - graphs.MORE - 1
    for capturer.room, captures in ((least, 1), (least + graphs.MORE - 1, 1), (least + graphs.MORE, 2)):
        assert "Memory is short" in capture(cache, a=10)["a"]
        assert capturer.captures == captures  # one each: it had run just before
    capturer.room += graphs.MORE
    assert capture(cache, a=10) == {} and held(cache) == {"a"}


def test_what_minds_that_it_did_not_run_before_is_captured_after_a_run(cache, capturer) -> None:
    """And what follows runs first, too."""
    given = dataclasses.replace(recording(10), wanted=True, calls=frozenset({"linear"}))
    cache.capture(name("a", program=1), given, BUDGET)
    capturer.errors = [RuntimeError("operation not permitted when stream is capturing")]
    cache.capture(name("b", program=2), given, BUDGET)
    assert held(cache) == {"a", "b"} and (capturer.warmed, capturer.captures, capturer.replayed) == (2, 3, 1)
    cache.capture(name("c", program=3), given, BUDGET)
    assert (capturer.warmed, capturer.replayed) == (2, 2)


def test_where_a_capture_that_fails_is_the_last_all_run_first(cache, capturer) -> None:
    """As with torch's ``cudaMallocAsync``."""
    capturer.may_fail = False
    given = dataclasses.replace(recording(10), wanted=True, calls=frozenset({"linear"}))
    for number, key in enumerate("abc"):
        cache.capture(name(key, program=number), given, BUDGET)
    assert (capturer.warmed, capturer.replayed) == (3, 0)


def test_memory_that_pins_hold_is_no_reason_for_good(cache, capturer) -> None:
    with cache.pinning():
        capture(cache, a=10)
        capturer.errors = [SHORT, SHORT]
        with pytest.raises(NoRoom):
            cache.capture(name("b"), recording(10), BUDGET)
        assert held(cache) == {"a"}
    assert capture(cache, b=10) == {}


def test_a_shortage_is_said_without_torchs_account_of_memory(cache, capturer) -> None:
    text = "CUDA out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which"
    capturer.errors = [torch.OutOfMemoryError(text)] * 2
    said = capture(cache, a=10)["a"]
    assert "(CUDA out of memory. Tried to allocate 76.00 MiB)" in said and "Memory is short" in said


def test_no_capture_begins_where_one_broke_the_allocator(cache, capturer) -> None:
    capture(cache, a=10)
    capturer.broken = "no memory"
    assert "until ComfyUI is restarted" in capture(cache, b=10)["b"]
    assert held(cache) == {"a"} and capturer.captures == 1


# The collector ----------------------------------------------------------------------------------------------------


def test_no_garbage_is_collected_within_a_capture() -> None:
    with collector_off():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_engine_that_is_collected_within_a_capture_ends_no_graph(cache, capturer) -> None:
    from anyshape.accel.engine import Engine

    engine = Engine(stats.Stats().model("Engine", "model"))
    cache.capture(name("a", owner=id(engine)), recording(10), BUDGET)
    owners = [engine]

    def forward(inputs):
        owners.clear()
        assert capturer.live == 1  # noted, not dropped
        return torch.zeros(1)

    del engine
    cache.capture(name("b", owner=-1), Recording(forward, {}, 0, (), torch.zeros(1)), BUDGET)
    assert {key for _, key in cache.held()} == {"b"}


def test_several_threads(cache) -> None:
    """Captures, replays, drops and clears at once leave the account right."""
    x = {"x": torch.ones(5, dtype=torch.uint8)}

    def work(owner):
        for step in range(100):
            key = name(step % 7, owner)
            if cache.replay(key, step // 50, x) is None:
                with contextlib.suppress(CaptureFailed):
                    cache.capture(key, recording(5, weights=step // 50), BUDGET)
            if step % 30 == 0:
                graphs.abandon(owner)
            if step % 45 == 0:
                graphs.clear()

    in_threads(work, range(4))
    assert cache.used_bytes == 5 * len(cache) <= BUDGET
