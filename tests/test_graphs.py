"""Which graphs give way to which: the cache's bookkeeping, with bytes that are said instead of measured."""

from types import SimpleNamespace

import pytest
import torch

BUDGET = 100


@pytest.fixture
def cache(pack):
    """A cache whose recordings are the bytes that they take. What is dropped is free at once."""
    from anyshape.accel.graphs import GraphCache

    class Said(GraphCache):
        def _record_or_make_room(self, recording):
            return SimpleNamespace(bytes=recording, weights=0, replay=lambda inputs: inputs)

        def _drop(self, name):
            self.used_bytes -= self._entries.pop(name).bytes

    return Said(torch.device("cpu"))


def capture(cache, **sizes):
    """Captures graphs of these bytes; their reasons where they were refused."""
    from anyshape.accel.errors import CaptureFailed

    refused = {}
    for key, size in sizes.items():
        try:
            cache.capture(0, key, size, BUDGET)
        except CaptureFailed as error:
            refused[key] = str(error)
    return refused


def test_the_least_recently_used_give_way(cache) -> None:
    capture(cache, a=60, b=20)
    cache.replay(0, "a", 0, {})
    assert capture(cache, c=30) == {}
    assert cache.held().keys() == {"a", "c"}


def test_one_that_is_too_large_alone_is_refused_for_good(cache) -> None:
    assert "this size needs" in capture(cache, a=101)["a"]
    assert "this size needs" in capture(cache, a=10)["a"]


def test_pinned_graphs_stay_and_others_give_way(cache) -> None:
    capture(cache, old=70)
    with cache.pinning() as pins:
        assert capture(cache, a=60, b=20) == {} and not pins.full
        assert cache.held().keys() == {"a", "b"}
        assert "graph_budget_mb (0) is full" in capture(cache, c=30)["c"] and pins.full
        assert cache.held().keys() == {"a", "b"} and cache.used_bytes == 80


def test_what_is_replayed_is_pinned_too(cache) -> None:
    capture(cache, old=70)
    with cache.pinning() as pins:
        cache.replay(0, "old", 0, {})
        assert capture(cache, a=40) and pins.full
        assert cache.held().keys() == {"old"}


def test_a_graph_refused_for_pins_is_captured_later(cache) -> None:
    with cache.pinning():
        assert capture(cache, a=90, b=20)
    assert capture(cache, b=20) == {}
    assert cache.held().keys() == {"b"}


def test_pins_of_graphs_that_are_gone_take_no_room(cache) -> None:
    """Memory ran short and they were given back: then the next is too large, or it fits, by itself."""
    with cache.pinning() as pins:
        capture(cache, a=90)
        cache.drop_owner(0)
        assert "this size needs" in capture(cache, b=101)["b"] and not pins.full
        assert capture(cache, c=100) == {}
