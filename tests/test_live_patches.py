"""Where patches are called in each forward, the faster one runs: our program or ComfyUI's forward; on the CPU."""

import time

import pytest

from tools.driving import compiled
from tools.oracles import fallbacks, shapes
from tools.patching import assert_equal, run, takes_of, with_patch

pytestmark = pytest.mark.usefixtures("clean_stats")

SLOW = 0.05  # seconds


def count(patcher, calls):
    """A patch that must be called: it counts."""
    patcher.set_model_input_block_patch(lambda h, options: calls.append(1) or h * (1 + len(calls) / 100))


@pytest.fixture
def fair(pack, monkeypatch):
    """Times are compared on a CPU, too."""
    from anyshape.accel import live_patches

    monkeypatch.setattr(live_patches, "_is_fair", lambda call: True)


def patched(fresh):
    """(eager, compiled): each with a count of its own."""
    return [with_patch(each, lambda p: count(p, [])) for each in (fresh, compiled(fresh))]


@pytest.mark.parametrize("slow", ["ours", "eager"])
def test_the_faster_one_runs(models, fresh, fair, monkeypatch, slow):
    from anyshape.accel.tape.program import Program

    eager, fast = patched(fresh)
    owner, name = (Program, "run") if slow == "ours" else (type(fresh.model.diffusion_model), "_forward")
    own = getattr(owner, name)

    def slowly(*args, **kwargs):
        time.sleep(SLOW)
        return own(*args, **kwargs)

    if slow == "ours":
        monkeypatch.setattr(owner, name, slowly)
    else:
        monkeypatch.setattr(fresh.model.diffusion_model, name, slowly.__get__(fresh.model.diffusion_model))
    for seed in range(3):
        assert_equal(models, eager, fast, seed=seed)
    (take,) = takes_of(fast)
    assert take.race.is_over and take.race.is_lost == (slow == "ours")
    (shape,) = shapes()
    assert shape["state"] == ("eager" if slow == "ours" else "tape")
    assert ("ComfyUI's own forward runs: it takes" in shape["reason"]) == (slow == "ours") == bool(fallbacks())


def test_without_the_patch_the_model_is_fast_again(models, fresh, fair, monkeypatch):
    from anyshape.accel.live_patches import Race

    monkeypatch.setattr(Race, "is_lost", property(lambda race: race.is_over))
    _, fast = patched(fresh)
    for seed in range(2):
        run(models, fast, seed=seed)
    assert shapes()[-1]["state"] == "eager"
    assert_equal(models, fresh, compiled(fresh))
    assert shapes()[-1]["state"] == "tape" and shapes()[-1]["reason"] == ""


def test_on_a_cpu_nothing_is_timed(models, fresh):
    """Both run the same operations there."""
    eager, fast = patched(fresh)
    for seed in range(2):
        assert_equal(models, eager, fast, seed=seed)
    assert takes_of(fast)[0].race.ours == []
