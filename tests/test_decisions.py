"""Patches that act in a range of noise levels: recorded, with their decisions as guards. On the CPU."""

import contextlib
import math

import numpy as np
import pytest
import torch

from tools import embed
from tools.driving import compiled
from tools.oracles import error, fallbacks
from tools.patching import CHANGED, assert_equal, run, takes_of, with_patch

embed.bare_pack()

from anyshape.accel.tape.decisions import Decisions, followed  # noqa: E402 - the package exists from the line above on
from anyshape.accel.tape.options import NotedOptions, Reads  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_stats")

SCALE = 1.4


def tried(what):
    """As code that falls back to something else, whatever the error."""
    try:
        return what()
    except Exception:  # noqa: BLE001 - as others have it
        return 5.0


DECIDED = {  # each as packs have it
    "IPAdapter": lambda o: 1.0 <= o["sigmas"].detach().cpu()[0].item() <= 8.0,
    "an element": lambda o: o["sigmas"][0].item() > 2.0,
    "the largest": lambda o: o["sigmas"].max().item() >= 2.0,
    "tensors": lambda o: o["sigmas"][0] > 2.0,
    "a share": lambda o: 0.2 <= 1 - o["sigmas"][0].item() / 14.6 < 0.9,
    "moved": lambda o: o["sigmas"].to("cpu", torch.float64)[0].item() < 3.0,
    "by name": lambda o: o.get("sigmas")[0].item() < 3.0 and "sigmas" in o,
    "equal": lambda o: o["sigmas"][0].item() == 0.0 or not o["sigmas"][0].item() < 3.0,
    "between": lambda o: min(max(o["sigmas"][0].item(), 1.0), 5.0) > 3.0,
}
USED = {  # the number itself, or more than a number can answer
    "scaled": lambda o: o["sigmas"][0].item() / 14.6,
    "a float": lambda o: float(o["sigmas"][0]) / 14.6,
    "an integer": lambda o: int(o["sigmas"][0].item()) / 14.0,
    "rounded": lambda o: 0.5 + round(o["sigmas"][0].item(), 1) / 30,
    "a logarithm": lambda o: 1 + math.log(o["sigmas"][0].item() + 1.0) / 10,
    "on the way": lambda o: torch.full((1,), o["sigmas"][0].item()).to(torch.float32) / 14.6,
    "moved": lambda o: o["sigmas"].cpu()[0] / 14.6,
    "a list": lambda o: o["sigmas"].tolist()[0] / 14.6,
    "text": lambda o: len(f"{o['sigmas'][0].item():.3f}") / 5,
    "looked up": lambda o: {0.0: 1.0}.get(o["sigmas"][0].item(), 1.2),
    "an option of torch's": lambda o: torch.ones(1).add(1.0, alpha=o["sigmas"][0].item() / 30),
    "in a list": lambda o: torch.stack([o["sigmas"].cpu()[0], torch.tensor(1.0)]).sum() / 14.6,
    "made of it": lambda o: torch.tensor(o["sigmas"].cpu()[0]) / 14.6,
    "of a copy": lambda o: torch.as_tensor(o["sigmas"].detach().cpu()[0].item()) / 14.6,
    "a power": lambda o: 0.5 + 1.1 ** o["sigmas"][0].item() / 10,
    "its bits": lambda o: 1.0 + o["sigmas"][0].item().is_integer() / 10 + o["sigmas"][0].item() / 30,
    "an array": lambda o: float(np.asarray([o["sigmas"][0].item()])[0]) / 14.6,
    "in what was tried": lambda o: tried(lambda: 1.1 ** o["sigmas"][0].item() / 4),
    "its bits, tried": lambda o: tried(lambda: 1.0 + o["sigmas"][0].item().is_integer()),
    "a whole number": lambda o: [1.0, 2.0, 3.0, 4.0][o["sigmas"].cpu().to(torch.int64)[0].item()],
    "its kind": lambda o: o["sigmas"][0].item() / 14.6 if isinstance(o["sigmas"][0].item(), float) else 100.0,
}


BY_RECORDER = ("in a list", "made of it")  # what a recorder refuses: a tensor on the CPU of unknown origin
KEEPING = {  # it also keeps what it has read
    "an attribute": lambda o, kept: kept.__setattr__("last", o["sigmas"][0].item()),
    "a list": lambda o, kept: kept.seen.append(o["sigmas"][0].item()),
    "a tensor": lambda o, kept: kept.__setattr__("last", o["sigmas"]),
}


def acting(patch):
    return lambda patcher: patcher.set_model_input_block_patch(patch)


def asked(sigmas, used=lambda: pytest.fail("a number was used")):
    """Decisions, and options of these noise levels as a patch gets them that is written down."""
    log = Decisions(used, contextlib.nullcontext, lambda new, tensor: None)
    noted = NotedOptions({"sigmas": torch.tensor(sigmas)}, Reads(lambda tensor: None))
    noted.strict, noted.decisions = True, log
    return log, noted


LEVELS = [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0], [2.0, 2.0], [2.5, 2.5], [3.0, 3.0], [5.0, 5.0], [8.0, 8.0], [14.6, 14.6]]


@pytest.mark.parametrize("decide", DECIDED.values(), ids=DECIDED)
def test_where_all_answers_are_the_same_so_is_the_decision(decide):
    """At every other noise level; and both decisions occur."""
    decisions = set()
    for recorded in LEVELS:
        log, options = asked(recorded)
        decision = bool(decide(options))
        assert decision == bool(decide({"sigmas": torch.tensor(recorded)})) and log.found
        decisions.add(decision)
        for other in LEVELS:
            answers = log.found["sigmas"].values()
            if all(followed(torch.tensor(other), path) == answer for path, answer in answers):
                assert bool(decide({"sigmas": torch.tensor(other)})) == decision
            else:
                assert other != recorded
    assert decisions == {True, False}


@pytest.mark.parametrize("name", [name for name in USED if name not in BY_RECORDER])
def test_every_use_of_a_number_is_seen(name):
    """It is refused where it is used, whatever the code makes of the error; or it is an error of the stand-in's."""
    seen = []
    _, options = asked([3.0, 3.0], lambda: seen.append(1))
    try:
        torch.ones(1) * USED[name](options)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        seen.append(1)
    assert seen


def test_whole_numbers_are_used():
    seen = []
    _, options = asked([3, 3], lambda: seen.append(1))
    assert (options["sigmas"][0].item(), seen) == (3, [1])


@pytest.mark.parametrize("name", ["IPAdapter", "tensors", "a share", "between"])
def test_decisions_are_guards(models, fresh, recordings, name):
    """Steps with other answers have other recordings, which later runs find again. Nothing is called at a replay."""

    def patch(h, options):
        return h * SCALE if DECIDED[name](options) else h

    eager, fast = with_patch(fresh, acting(patch)), with_patch(compiled(fresh), acting(patch))
    wanted = assert_equal(models, eager, fast, seed=0, steps=6)
    known = len(recordings)
    assert_equal(models, eager, fast, seed=1, steps=6)
    assert error(wanted, run(models, fresh, seed=0, steps=6)) > CHANGED
    assert error(wanted, run(models, with_patch(fresh, acting(lambda h, o: h * SCALE)), seed=0, steps=6)) > CHANGED
    takes = takes_of(fast)
    assert 2 <= known == len(recordings) == len(takes) <= 6
    assert not any(take.live for take in takes) and all(take.program for take in takes) and not fallbacks()


@pytest.mark.parametrize("name", [*BY_RECORDER, "scaled", "its bits", "its kind", "an option of torch's"])
def test_a_number_that_is_used_makes_a_patch_that_is_called(models, fresh, name):
    def patch(h, options):
        return h * USED[name](options)

    eager, fast = with_patch(fresh, acting(patch)), with_patch(compiled(fresh), acting(patch))
    for seed in range(2):
        assert_equal(models, eager, fast, seed=seed)
    assert all(take.live for take in takes_of(fast) if take.program is not None) and not fallbacks()


@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING)
def test_a_number_that_is_kept_is_a_number(models, fresh, keep):
    class Patch:
        def __init__(self):
            self.last, self.seen = None, []

        def __call__(self, h, options):
            low = options["sigmas"][0].item() < 2.0
            keep(options, self)
            return h * SCALE if low else h

    mine, theirs = Patch(), Patch()
    for seed in range(2):
        assert_equal(models, with_patch(fresh, acting(theirs)), with_patch(compiled(fresh), acting(mine)), seed=seed)
    assert list(map(type, [mine.last, *mine.seen])) == list(map(type, [theirs.last, *theirs.seen]))
    assert mine.seen == theirs.seen and (
        mine.last is None or torch.equal(*map(torch.as_tensor, (mine.last, theirs.last)))
    )


def test_errors_of_the_patch_itself_are_its_own(models, fresh):
    def patch(h, options):
        raise KeyError(f"of the patch, at {options['sigmas'][0].item():.0f}")

    with pytest.raises(KeyError, match="of the patch"):
        run(models, with_patch(compiled(fresh), acting(patch)))


def test_a_range_that_is_changed_is_another_recording(models, fresh, recordings):
    class Patch:
        start = 2.0

        def __call__(self, h, options):
            return h * SCALE if options["sigmas"][0].item() > self.start else h

    patch, plain = Patch(), Patch()
    eager, fast = with_patch(fresh, acting(plain)), with_patch(compiled(fresh), acting(patch))
    for patch.start in (2.0, 0.5, 100.0):
        plain.start = patch.start
        assert_equal(models, eager, fast)
    assert not any(take.live for take in takes_of(fast))


def test_other_steps_and_samplers_ask_again(models, fresh, recordings):
    """Answers, not numbers, are compared: 20 other noise levels need no other recording."""
    eager, fast = (
        with_patch(each, acting(lambda h, o: h * SCALE if o["sigmas"][0].item() > 2.0 else h))
        for each in (fresh, compiled(fresh))
    )
    assert_equal(models, eager, fast)
    known = len(recordings)
    for steps in (3, 7, 9):
        assert_equal(models, eager, fast, steps=steps)
    assert known == len(recordings) == 2
