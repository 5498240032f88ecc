"""What makes a tape right, through ComfyUI: compiled models against eager, sampled as a workflow samples them. CPU.

Sizes and seeds, a user who cancels, what cannot be recorded, faults. ``recordings`` counts: what must not be recorded
again is not.
"""

import pytest
import torch

from tools import architectures
from tools.driving import compiled, sample_tiny
from tools.oracles import reasons
from tools.patching import reading

pytestmark = pytest.mark.usefixtures("clean_stats")


def sample(patcher, name, height=8, width=8, seed=0, steps=2):
    return sample_tiny(patcher, name, seed=seed, height=height, width=width, steps=steps)


def states():
    from anyshape.accel import stats

    return {shape["state"] for model in stats.snapshot()["models"] for shape in model["shapes"]}


def fused(monkeypatch):
    """Kernels on the CPU, in Triton's interpreter."""
    from anyshape.accel import maker, tape_tier

    monkeypatch.setattr(tape_tier, "can_fuse", lambda device: True)
    monkeypatch.setattr(maker.KEEPER, "watch", lambda *_: None)


# A forward that calls no wrappers, frames, an Enum among the arguments, a forward that leaves it to its base class, and
# one that also begins with a copy of all options.
EXACT = ("Flux", "SD3", "WAN21_T2V", "CosmosT2V", "Anima", "LTXAV")


@pytest.mark.parametrize("name", [entry.name for entry in architectures.present() if entry.name in EXACT])
def test_exact_is_bit_equal_at_every_size_and_recorded_once(tiny, recordings, name) -> None:
    patcher = tiny(name)
    fast = compiled(patcher, mode="exact")
    for height, width, seed in ((8, 8, 0), (8, 12, 1), (8, 8, 2)):
        wanted = sample(patcher, name, height, width, seed)
        assert torch.equal(sample(fast, name, height, width, seed), wanted)
    assert len(recordings) == 2 and states() == {"tape"} and reasons() == []


def test_unet_in_exact_mode_is_recorded_once(tiny, models, fresh, recordings) -> None:
    """Its blocks copy every option, those too that differ in each sampling run."""
    from tools.driving import SMALL_RUN

    fast = compiled(fresh, mode="exact")
    for seed in range(3):
        wanted = models.sample(fresh, **SMALL_RUN | {"seed": seed, "steps": 2})
        assert torch.equal(models.sample(fast, **SMALL_RUN | {"seed": seed, "steps": 2}), wanted)
    assert len(recordings) == 1 and reasons() == []


def test_the_same_seed_queued_twice_is_the_same_picture(tiny, monkeypatch) -> None:
    patcher = tiny("Flux")
    for fuse in (False, True):
        if fuse:
            fused(monkeypatch)
        fast = compiled(tiny("Flux", fresh=True) if fuse else patcher)
        first, second = (sample(fast, "Flux", 4, 4) for _ in range(2))
        assert torch.equal(first, second) and reasons() == []


@pytest.mark.parametrize("fuse", [False, True])
def test_cancelling_while_a_size_is_prepared_leaves_nothing_half_made(tiny, recordings, monkeypatch, fuse) -> None:
    """Wherever it is broken off, the next run prepares the size as if nothing had been."""
    from anyshape.accel import preparing, stats
    from comfy.model_management import InterruptProcessingException

    if fuse:
        fused(monkeypatch)
    asked, at = [], [0]

    def ask() -> None:
        if preparing.snapshot():
            asked.append(True)
            if len(asked) == at[0]:
                raise InterruptProcessingException

    monkeypatch.setattr(preparing, "_ASK", [ask])
    patcher = tiny("Flux", fresh=True)
    wanted = sample(compiled(tiny("Flux", fresh=True)), "Flux", 4, 4)
    whole = len(asked)
    assert whole > 20
    fast = compiled(patcher)
    for number, place in enumerate((1, whole // 4, whole // 2), 1):
        asked.clear()
        at[0] = place
        with pytest.raises(InterruptProcessingException):
            sample(fast, "Flux", 4, 4)
        assert len(recordings) == number + 1 and preparing.snapshot() == {} and reasons() == []
        assert sum(len(model["shapes"]) for model in stats.snapshot()["models"]) == 1  # of the other model
    at[0] = 0
    assert torch.equal(sample(fast, "Flux", 4, 4), wanted) and states() == {"tape"} and reasons() == []
    assert len(recordings) == 5


# Refusals and faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda out: out * (1 + 0 * out.sum().item()), "test_tape_engine.py:"),
        (lambda out: out + 0 * torch.randn_like(out), "random"),
    ],
)
def test_what_cannot_be_repeated_runs_in_eager(tiny, recordings, change, word) -> None:
    patcher = tiny("SD3", fresh=True)
    model = patcher.model.diffusion_model
    model.forward = reading(model, lambda out, options: change(out))
    fast = compiled(patcher)
    torch.manual_seed(5)
    wanted = sample(patcher, "SD3")
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(sample(fast, "SD3"), wanted) and torch.equal(torch.get_rng_state(), state)
    assert len(recordings) == 1 and any(word in reason for reason in reasons()) and states() == {"eager"}


@pytest.mark.parametrize("place", ["recorded.record", "tape.aliasing.settle", "recorded.Guards"])
def test_a_fault_of_ours_costs_no_image(tiny, monkeypatch, place) -> None:
    """Of a model that calls no wrappers; other places are in ``test_faults``."""

    def broken(*_args, **_kwargs):
        raise RuntimeError("injected")

    patcher = tiny("SD3", fresh=True)
    wanted = sample(patcher, "SD3")
    monkeypatch.setattr(f"anyshape.accel.{place}", broken)
    assert torch.equal(sample(compiled(patcher), "SD3"), wanted)
    assert any("injected" in reason for reason in reasons()), reasons()


def test_a_fault_at_a_later_run_costs_no_image(tiny, monkeypatch) -> None:
    from anyshape.accel.tape.program import Program

    patcher = tiny("SD3", fresh=True)
    fast, wanted = compiled(patcher), sample(patcher, "SD3")
    assert torch.equal(sample(fast, "SD3"), wanted)

    def broken(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(Program, "run", broken)
    assert torch.equal(sample(fast, "SD3"), wanted) and any("injected" in reason for reason in reasons())


def test_a_wrong_kernel_is_named_and_left_out(tiny, monkeypatch) -> None:
    from anyshape.accel.tape import diagnose, kernels

    fused(monkeypatch)
    patcher = tiny("SD3", fresh=True)
    wanted = sample(patcher, "SD3", 4, 4, steps=2)
    call, found, bad = kernels.Launch.__call__, [], []

    def wrong(self, operands, outputs):
        call(self, operands, outputs)
        if not bad:
            bad.append(self.source.text)
        if self.source.text == bad[0]:
            outputs[0].add_(1.0)

    def told(*args):
        found.append((diagnosed(*args), args[1]))
        return found[-1][0]

    diagnosed = diagnose.wrong_kernels
    monkeypatch.setattr(kernels.Launch, "__call__", wrong)
    monkeypatch.setattr(diagnose, "wrong_kernels", told)
    fast = compiled(patcher)
    out = sample(fast, "SD3", 4, 4, steps=2)
    assert (out - wanted).norm() / wanted.norm() < 1e-4
    ((named, program),) = found
    assert named == frozenset(bad) and len({launch.source.text for launch in program.launches}) > 1
    from anyshape.accel.comfy.attach import engine_of

    takes = engine_of(fast)(patcher.model.diffusion_model)._tape._tapes._takes
    (left,) = [take.program for group in takes.values() for take in group]
    sources = {launch.source.text for launch in left.launches}
    assert sources and bad[0] not in sources
    assert any("wrong result" in reason for reason in reasons()) and states() == {"tape"}


@pytest.mark.parametrize("verify", [True, False])
def test_what_could_not_be_compared_is_not_used(tiny, recordings, verify) -> None:
    """The model itself overflows: a wrong program would look no different. Without ``verify`` nobody wants to know."""
    from anyshape.accel import maker

    patcher = tiny("SD3", fresh=True)
    bias = patcher.model.diffusion_model.final_layer.linear.bias
    with torch.inference_mode():
        bias.data[0] = float("inf")
    wanted = sample(patcher, "SD3", steps=2)
    assert not torch.isfinite(wanted).all()
    fast = compiled(patcher, verify=verify)
    for _ in range(2):
        out = sample(fast, "SD3", steps=2)
        assert torch.equal(out.nan_to_num(), wanted.nan_to_num()) and torch.equal(out.isnan(), wanted.isnan())
    assert len(recordings) == 1
    assert reasons() == ([maker.NOT_COMPARED] if verify else []) and states() == {"eager" if verify else "tape"}
