"""The benchmarks of Skip Blocks on the demo model, tiny: what is counted, what is compared, and what it is worth."""

from types import ModuleType

import pytest
import torch

SIZE, ODD = (64, 64), (72, 64)
STEPS = 10


@pytest.fixture(scope="module")
def runs(demo_pack: ModuleType, pack: ModuleType) -> ModuleType:
    """``bench.skip_runs``."""
    from bench import skip_runs

    return skip_runs


@pytest.fixture(scope="module")
def demo(runs: ModuleType) -> "Demo":  # noqa: F821
    with torch.inference_mode():
        return runs.Demo(2)


@pytest.fixture
def quality_bench(runs, monkeypatch) -> ModuleType:
    """``bench.skip_quality``, with a row or two a method."""
    from bench import skip_quality

    small = {
        "SIZE": SIZE,
        "ODD_SIZE": ODD,
        "INTERVALS": (3,),
        "FEW_INTERVALS": (3,),
        "THRESHOLDS": (0.3,),
        "FEWER": (0.5,),
    }
    for name, value in small.items():
        monkeypatch.setattr(skip_quality, name, value)
    return skip_quality


def test_the_table(quality_bench, demo):
    """The forwards of others are counted at the layers; those of programs, which call no layer, by their runs."""
    with torch.inference_mode():
        rows = [
            *list(quality_bench.measured(demo, quality_bench.ways(demo, STEPS), SIZE))[-1],
            *list(quality_bench.measured(demo, quality_bench.few_ways(demo, STEPS), ODD))[-1],
        ]
    found = {(row["method"], row["width"]): row for row in rows}
    every, fewer = found["every step", 64], found["fewer steps", 64]
    assert (every["full"], every["cost"], every["depth"]) == (10, 10, None) and "psnr" not in every
    assert (fewer["full"], fewer["skipped"], fewer["cost"]) == (5, 0, 5)
    for width in (64, 72):
        plain, ours = found["DeepCache", width], found["Skip Blocks", width]
        assert (ours["full"], ours["skipped"], ours["depth"]) == (4, 6, 0)
        assert (plain["full"], plain["skipped"], plain["cost"]) == (4, 6, ours["cost"]) and 4 < ours["cost"] < 6
        assert all(15 < one["psnr"] < 60 and 0.5 < one["ssim"] <= 1 for one in (plain, ours))
    assert found["Skip Blocks, depth 1", 64]["cost"] > found["Skip Blocks", 64]["cost"]
    cache = found["EasyCache", 64]
    assert cache["skipped"] == 0 and 0 < cache["cost"] <= 10 and all(row["seconds"] > 0 for row in rows)


def test_an_ablation(runs, demo, monkeypatch):
    from bench import skip_ablation

    monkeypatch.setattr(skip_ablation, "SIZE", SIZE)
    monkeypatch.setattr(skip_ablation, "STEPS", (STEPS,))
    monkeypatch.setattr(skip_ablation, "INTERVALS", (2,))
    ways = skip_ablation.tries()
    assert len(ways) == len(set(ways)) and {way.axis for way in ways} == {"step", "sigma", "log_sigma"}
    with torch.inference_mode():
        rows = list(skip_ablation.measured(demo, [skip_ablation.Try("sigma", share, 1.0) for share in (0.5, 1.0)]))
    assert [(row["method"], row.get("damping")) for row in rows] == [("plain", None), ("ours", 0.5), ("ours", 1.0)]
    assert len({row["psnr"] for row in rows}) == 3


def test_settings_reach_the_run(runs, demo):
    """Without this, an ablation would compare a thing with itself."""
    from anyshape.accel.skip.settings import SkipSettings

    with torch.inference_mode():
        base, *others = (
            demo.run(demo.skipping(SkipSettings(3, **changed)), STEPS, SIZE, slice(2)).pictures
            for changed in ({}, {"axis": "step"}, {"damping": 0.5}, {"density": 2.0})
        )
    assert not any(torch.equal(base, other) for other in others)
    with pytest.raises(ValueError, match="axis is 'time'; choose one of step, sigma, log_sigma"):
        SkipSettings(axis="time")


def test_how_alike_pictures_are(runs):
    reference = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert runs.psnr(reference, reference) == [runs.EQUAL] * 2 and runs.ssim(reference, reference) == [1.0] * 2
    uneven = torch.stack([reference[0] + 0.1, reference[1] + 0.01])
    assert runs.psnr(uneven, reference) == pytest.approx([20.0, 40.0], abs=1e-2)
    assert max(runs.ssim(reference.flip(-1), reference)) < 0.5


def test_a_tally(runs):
    """The mean of the pictures' decibels, not the decibels of their mean error; the mean of the batches' forwards."""
    reference = runs.Sampled(torch.full((2, 3, 16, 16), 0.5), 1.0, 10.0, 0.0)
    tally = runs.Tally()
    for error, full in ((0.1, 4.0), (0.01, 5.0)):
        tally.add(runs.Sampled(reference.pictures + error, 0.5, full, 10.0 - full), reference)
    assert tally.quality()["psnr"] == pytest.approx(30.0, abs=1e-2) and len(tally.ssim) == 4
    assert (tally.full, tally.skipped) == (4.5, 5.5)


def test_every_prompt_is_in_one_batch(runs, demo, monkeypatch):
    monkeypatch.setattr(runs, "BATCH", 16)
    monkeypatch.setattr(demo, "prompts", [str(index) for index in range(40)])
    parts = [demo.prompts[batch] for batch in demo.batches]
    assert [len(part) for part in parts] == [14, 13, 13] and sorted(sum(parts, [])) == sorted(demo.prompts)
