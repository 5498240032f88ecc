"""The benchmarks of Skip Blocks on the demo model, tiny: what is counted, what is compared, and what it is worth."""

from itertools import combinations
from types import ModuleType

import pytest
import torch

SIZE = (72, 64)
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

    small = {"INTERVALS": (3,), "THRESHOLDS": (0.3,), "MAGNITUDES": (1e-9, 1e9), "SHARES": (0.5,)}
    for name, value in small.items():
        monkeypatch.setattr(skip_quality, name, value)
    return skip_quality


@pytest.mark.parametrize(("prompts", "architecture", "sampler"), [(2, "unet", "euler"), (1, "transformer", "dpmpp_2m")])
def test_the_table(runs, quality_bench, prompts, architecture, sampler):
    """The forwards of others are counted one by one; those of programs by their runs."""
    with torch.inference_mode():
        found = quality_bench.measured(runs.Demo(prompts, architecture), quality_bench.Case(sampler, STEPS, SIZE))
    rows: dict[str, list[dict]] = {}
    for row in found:
        rows.setdefault(row["method"], []).append(row)
        assert (row["model"], row["sampler"], row["steps"], row["width"]) == (architecture, sampler, STEPS, 72)
    (every,), (fewer,), (cache,) = rows["every step"], rows["fewer steps"], rows["EasyCache"]
    assert (every["full"], every["cost"], every["depth"]) == (10, 10, None) and "psnr" not in every
    assert (fewer["full"], fewer["skipped"], fewer["cost"]) == (5, 0, 5)
    (plain,), (taylor,), (ours,) = rows["DeepCache"], rows["TaylorSeer"], rows["Skip Blocks"]
    assert (ours["full"], ours["skipped"]) == (4, 6) and 4 < ours["cost"] < 6
    assert (plain["full"], plain["skipped"], plain["cost"]) == (4, 6, ours["cost"])
    assert (taylor["full"], taylor["skipped"]) == (6, 4), "steps 0, 1, 2 and 3, 6, 9"
    never, always = rows["MagCache"]
    assert (never["full"], never["psnr"]) == (10, runs.EQUAL) and (always["full"], always["skipped"]) == (3, 7)
    assert len({row["psnr"] for row in (plain, taylor, ours, always)}) == 4
    assert all(10 < row["psnr"] < 70 and 0.2 < row["ssim"] <= 1 for row in (plain, taylor, ours, always, fewer))
    assert cache["skipped"] == 0 and 0 < cache["cost"] <= 10 and all(row["seconds"] > 0 for row in found)


def test_an_ablation(runs, demo, monkeypatch):
    """Each setting reaches the run: without this, an ablation would compare a thing with itself."""
    from bench import skip_ablation

    monkeypatch.setattr(skip_ablation, "SIZE", SIZE)
    ways = skip_ablation.tries()
    assert len(ways) == len(set(ways)) and {way.axis for way in ways} == {"step", "sigma", "log_sigma"}
    few = skip_ablation.tries([], ["drift"], [], [1])
    assert [way.density for way in few] == [None, "drift"]
    with torch.inference_mode():
        varied = [skip_ablation.Try(damping=0.5), skip_ablation.Try(axis="log_sigma"), skip_ablation.Try(density=2.0)]
        rows = list(skip_ablation.measured(demo, [*varied, *few], [STEPS], [2]))
    said = [(row["method"], *(row.get(name) for name in ("axis", "damping", "density"))) for row in rows]
    assert said == [
        ("plain", None, None, None), ("ours", "sigma", 0.5, None), ("ours", "log_sigma", 1.0, None),
        ("ours", "sigma", 1.0, 2.0), ("ours", "sigma", 1.0, None), ("ours", "sigma", 1.0, "drift"),
    ]  # fmt: skip
    assert len({row["psnr"] for row in rows}) == 6
    assert len({row["cost"] for row in rows if row.get("density") != 2.0}) == 1


def test_full_steps_by_drift_are_the_best_of_all(runs):
    """Of every way to place them, each judged by the forecast itself."""
    from anyshape.accel.skip.forecast import History

    from bench import skip_drift

    generator = torch.Generator().manual_seed(0)
    features, sigmas = [torch.randn(5, generator=generator) for _ in range(8)], [1.0, 0.9, 0.7, 0.6, 0.4, 0.3, 0.2, 0.1]
    sigmas.append(0.0)

    def error(full):
        history, total = History(), 0.0
        for step, feature in enumerate(features):
            if step in full:
                history.add(sigmas[step], feature)
            else:
                total += (history.at(sigmas[step]) - feature).norm().item() * (sigmas[step] - sigmas[step + 1])
        return total

    for count in (1, 2, 3, 4, 8):
        best = min(({0, *others} for others in combinations(range(1, 8), count - 1)), key=error)
        assert skip_drift.best(features, sigmas, count) == best


@pytest.mark.parametrize("positions", [(14.6, 9.1, 3.2, 0.4), (0.0, 1.0, 5.0, 5.5), (2.0, -1.0, -1.5, -9.0)])
def test_a_parabola_is_exact_on_parabolas(runs, positions):
    made = curve(2, [(t, 2.0 * t * t - 3.0 * t + 1.0) for t in positions[:3]])
    assert made.at(positions[3]).item() == pytest.approx(2.0 * positions[3] ** 2 - 3.0 * positions[3] + 1.0, abs=1e-9)
    assert curve(2, [(4.0, 0.0), (2.0, 8.0)]).at(1.0).item() == 12.0, "of two features, the line"


def test_the_slope_is_damped(runs):
    assert curve(1, [(4.0, 0.0), (2.0, 8.0)], damping=0.5).at(1.0).item() == 10.0


def curve(order, points, **more):
    from bench.skip_baselines import Curve

    made = Curve(order, **more)
    for position, value in points:
        made.add(position, torch.tensor([value], dtype=torch.float64))
    return made


def test_a_density_holds_for_a_row_of_blocks_too(runs):
    from bench.skip_baselines import OfOrder

    for steps, interval in ((20, 3), (30, 4)):
        sigmas = [float(steps - step) for step in range(steps)]
        assert OfOrder(interval, density_of=1.0).full_steps(sigmas, 1e9, 0.0, row=True) >= {0, steps - 1}


def test_how_alike_pictures_are(runs):
    reference = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert runs.psnr(reference, reference) == [runs.EQUAL] * 2 and runs.ssim(reference, reference) == [1.0] * 2
    uneven = torch.stack([reference[0] + 0.1, reference[1] + 0.01])
    assert runs.psnr(uneven, reference) == pytest.approx([20.0, 40.0], abs=1e-2)
    assert max(runs.ssim(reference.flip(-1), reference)) < 0.5


def test_structural_similarity_is_scikit_images(runs):
    from skimage.metrics import structural_similarity

    generator = torch.Generator().manual_seed(1)
    a = torch.rand(2, 3, 24, 33, generator=generator)
    b = (a + 0.2 * torch.rand(2, 3, 24, 33, generator=generator)).clamp(0, 1)
    theirs = [structural_similarity(x.numpy(), y.numpy(), channel_axis=0, data_range=1.0) for x, y in zip(a, b)]  # noqa: B905
    assert runs.ssim(a, b) == pytest.approx(theirs, abs=1e-5)


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
