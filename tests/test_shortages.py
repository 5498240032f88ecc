"""DynamicVRAM: memory that was too short, and what is not tried again and again because of it.

The page table is a stand-in, as in test_dynamic.py. Where weights do not fit, ComfyUI's own forward runs here.
"""

import pytest
import torch

from tools import pages
from tools.driving import SMALL_RUN, calls_of, compiled
from tools.oracles import FUSED, error, shapes

pytest_plugins = ("tools.page_fixtures",)
pytestmark = pytest.mark.usefixtures("clean_stats", "no_stream")

CLOSE = 1e-4  # relative L2 in fp32; the contract allows 1e-3


@pytest.fixture
def free(pack, monkeypatch):
    """[bytes that are free], of a card; a CPU's is another in each run."""
    from anyshape.accel.comfy import dynamic

    found = [4 << 30]
    monkeypatch.setattr(dynamic.mm, "get_free_memory", lambda device: found[0])
    return found


def test_two_calls_that_pushed_weights_out_are_enough(pack):
    """The first one did not ask how much was free, because all weights lay there already."""
    from anyshape.accel.comfy.shortages import MARGIN, Shortages
    from anyshape.accel.key import shape_key

    key, larger, smaller = (shape_key({"x": torch.empty(1, 4, side, 8)}) for side in (8, 9, 7))
    known, gib = Shortages(), 1 << 30
    assert known.expected(key) is None
    known.add(key, 0, "first")
    assert known.expected(key)(gib) == ""
    known.add(key, gib, "second")
    assert known.expected(key)(gib) == known.expected(larger)(gib + MARGIN) == "second"
    assert known.expected(key)(gib + MARGIN + 1) == "" and known.expected(smaller) is None


def test_a_size_that_pushes_weights_out_is_not_begun_again_and_again(models, load, free, recordings, monkeypatch):
    """Recording needs more memory than ComfyUI's own forward; it is begun once more where there is more of it."""
    from anyshape.accel.comfy import dynamic

    from tools.driving import skipping
    from tools.oracles import counted

    fast, wanted = compiled(load.patcher), models.sample(load.patcher, **SMALL_RUN)
    load.pages.short_at = load.layers[len(load.layers) // 2]

    def again(patcher, **changes):
        before = len(recordings)
        load()
        out = models.sample(patcher, **SMALL_RUN | changes)
        assert not load.pages.pinned
        return out, len(recordings) - before

    begun, filled = [], calls_of(monkeypatch, dynamic.MappedWeights, "_fill")
    for _ in range(4):
        filled.clear()
        out, count = again(fast)
        assert error(out, wanted) < CLOSE and shapes()[0]["state"] == "eager"
        begun.append(count)
    assert begun[0] and begun[2:] == [0, 0] and not filled, begun
    assert shapes()[0]["reason"].startswith("weights streamed: of ")
    out, count = again(skipping(fast, depth="0"), steps=12)
    assert count == 0 and counted() == {"full": 4, "skipped": 8, "resets": {}}  # its first step gives features
    assert again(fast, width=128)[1] == 0  # what is larger needs more memory
    load.pages.short_at = None
    assert again(fast)[1] == 0 and again(fast, width=32)[1] == 1
    free[0] = 5 << 30
    out, count = again(fast)
    assert count == 1 and error(out, wanted) < CLOSE and shapes()[0]["state"] == FUSED


def test_weights_are_filled_again_when_other_models_are_gone(pack):
    """What is free without them is the same then, but their pages may have been in the way."""
    from anyshape.accel.comfy.shortages import LITTLE, Unfit

    known, gib = Unfit(), 1 << 30
    for _ in range(2):
        assert not known.expects(6 * gib, 5 * gib)
        known.add(6 * gib, 5 * gib)
    assert known.expects(6 * gib, 5 * gib) and known.expects(6 * gib + LITTLE, 5 * gib + LITTLE)
    assert known.expects(5 * gib, 5 * gib) and not known.expects(6 * gib, 0)
    assert not known.expects(7 * gib, 6 * gib) and not known.expects(6 * gib, 4 * gib)
    known.clear()
    assert not known.expects(6 * gib, 5 * gib)


def test_weights_that_do_not_fit_are_not_filled_again_and_again(models, load, card, free, monkeypatch):
    """There is room for their pages, and no longer once some of them are filled; tried again where there is more."""
    from anyshape.accel.comfy import dynamic
    from anyshape.accel.comfy.shortages import LITTLE

    def taken(*args):
        if len(filled) == 2:
            card.pages = card.resident  # by what filling needs itself
        return fill(*args)

    fill, fast = dynamic.MappedWeights._fill, compiled(load.patcher)
    monkeypatch.setattr(dynamic.MappedWeights, "_fill", taken)
    filled = calls_of(monkeypatch, dynamic.MappedWeights, "_fill")
    monkeypatch.setattr(dynamic, "CHUNK", 1)
    wanted = models.sample(load.patcher, **SMALL_RUN)

    def fills():
        card.pages = pages.ENOUGH
        load()
        load.pages.give_away()
        filled.clear()
        assert error(models.sample(fast, **SMALL_RUN), wanted) < CLOSE and not load.pages.pinned
        return len(filled)

    missing = load.pages.count * pages.PAGE  # what is free changes with what is filled; for ``free`` it does not
    assert [fills() > 0 for _ in range(4)] == [True, True, False, False]
    assert shapes()[0]["state"] == "eager" and shapes()[0]["reason"].startswith("weights streamed: of ")
    free[0] += LITTLE + missing + 1
    assert [fills() > 0 for _ in range(3)] == [True, True, False]
    monkeypatch.setattr(dynamic.MappedWeights, "_fill", fill)
    free[0] += LITTLE + missing + 1
    fills()
    assert shapes()[0]["state"] == FUSED and not load.pages.pinned
