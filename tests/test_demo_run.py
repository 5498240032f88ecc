"""The demo's main job, on a few of its cases, through the real server."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

from tools import embed
from tools.oracles import FUSED, STATS_KEYS

embed.bare_demo()

from anyshape_demo import report, run, workflows  # noqa: E402 - the package exists from the line above on

STATES = {"graph", FUSED, "eager"}
ALLOWED = report.Difference(4, 0.5)
CASES = (replace(workflows.QUICK[0], width=144, height=144), *workflows.QUICK[1:])  # none as large as the demo's
PROMPT_KEYS = {"width", "height", "batch", "first_seconds", "seconds", "eager_seconds", "max_abs_diff", "rms_diff"}


@pytest.fixture(scope="module")
def few_steps() -> Iterator[None]:
    """A quarter of the demo's: what is drawn is seen, and the server takes half as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(workflows.SAMPLER, "steps", 2)
        yield


@pytest.fixture(scope="module")
def finished(server, few_steps, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder that the demo wrote, and what it found wrong."""
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()  # of other tests' models
    out = tmp_path_factory.mktemp("demo") / "out"
    allowed = run.ALLOWED_CUDA if embed.has_cuda() else run.ALLOWED_CPU
    return out, run.main_job(server, CASES, out, allowed)


@pytest.fixture(scope="module")
def written(finished) -> dict:
    return json.loads((finished[0] / "report.json").read_text())


def test_nothing_is_wrong(finished) -> None:
    assert finished[1] == []


def test_report_keeps_the_contract(written) -> None:
    assert set(written) >= STATS_KEYS[""] | {"prompts"}
    assert len(written["prompts"]) == len(CASES)
    for prompt in written["prompts"]:
        assert set(prompt) >= PROMPT_KEYS
        assert 0 < prompt["seconds"] and 0 < prompt["first_seconds"] and 0 < prompt["eager_seconds"]
        assert 0 <= prompt["max_abs_diff"] <= 1


def test_states_are_shown(written) -> None:
    for prompt in written["prompts"]:
        assert prompt["states"]["model"] in STATES
        assert ("vae" in prompt["states"]) == prompt["vae_compiled"]


def test_nothing_falls_back_to_eager(written) -> None:
    assert written["fallbacks"] == []
    assert not [prompt for prompt in written["prompts"] if "eager" in prompt["states"].values()]


def test_models_are_counted(written) -> None:
    assert {"model", "vae"} <= {model["kind"] for model in written["models"]}
    sizes = {(s["width"], s["height"]) for model in written["models"] for s in model["shapes"]}
    assert {(case.width, case.height) for case in CASES} <= sizes


def test_pictures_are_written(finished) -> None:
    out = finished[0]
    count = sum(4 * case.batch for case in CASES)  # two seeds, eager and compiled
    assert len(list((out / "pictures").glob("*.png"))) == count
    for name in ("contact_sheet.png", "shape_cache.png"):
        assert Image.open(out / name).width > 100


def test_pictures_are_pictures(finished) -> None:
    """A model that has learned something draws shapes: the colours vary, and two prompts give two pictures."""
    first, *_, other = [
        Image.open(path).convert("L") for path in sorted((finished[0] / "pictures").glob("*_eager_0.png"))
    ]
    for image in (first, other):
        low, high = image.getextrema()
        assert high - low > 60
    assert first.resize((32, 32)).tobytes() != other.resize((32, 32)).tobytes()


def row(batch: int = 1, **measured: object) -> report.Row:
    return report.Row(workflows.Case(64, 64, batch, True, "x"), **measured)


def test_the_cases_cover_what_they_must() -> None:
    cases = workflows.CASES
    assert len({(case.width, case.height) for case in cases}) >= 8
    assert {case.batch for case in cases} == {1, 2, 4} and {case.vae for case in cases} == {True, False}
    assert any(case.width // 8 % 2 for case in cases) and any(case.height // 8 % 2 for case in cases)


def test_a_large_difference_is_wrong() -> None:
    assert report.problems([row(difference=report.Difference(4, 0.5))], ALLOWED) == []
    assert "5/255" in report.problems([row(difference=report.Difference(5, 0.1))], ALLOWED)[0]
    assert "rms 0.60" in report.problems([row(difference=report.Difference(4, 0.6))], ALLOWED)[0]


def test_the_difference_is_that_of_the_worst_picture() -> None:
    grey, other = Image.new("RGB", (2, 1), (100, 100, 100)), Image.new("RGB", (2, 1), (100, 100, 100))
    other.putpixel((0, 0), (106, 100, 100))
    assert report.difference([grey, grey], [grey, other]) == report.Difference(6, 6**0.5)


def test_a_recompile_is_wrong() -> None:
    assert "recompiles" in report.problems([row(recompiles=1)], ALLOWED)[0]


def test_only_the_first_batch_of_each_kind_may_compile() -> None:
    assert report.problems([row(1, compiled=9), row(4, compiled=9), row(2), row(1)], ALLOWED) == []
    assert "compiled 1 kernels" in report.problems([row(4), row(1), row(2, compiled=1)], ALLOWED)[0]


def test_states_are_those_of_the_shapes_that_ran() -> None:
    def stats(calls: int) -> dict:
        shapes = [{"key": "a", "calls": 3, "state": "eager"}, {"key": "b", "calls": calls, "state": FUSED}]
        return {"models": [{"kind": "model", "shapes": shapes}]}

    assert run.states(stats(1), stats(2)) == {"model": FUSED}


def test_the_table_lines_up() -> None:
    rows = [row(), row(batch=4, difference=report.Difference(200, 9.0), seconds=2.0, eager_seconds=3.0)]
    lines = report.table(rows, gpu=True).splitlines()
    assert len(lines) == 4 and "1.50x" in lines[3]
    assert lines[0].index("ComfyUI s") == lines[2].index("nan", lines[0].index("ComfyUI s"))


def test_on_a_cpu_no_time_is_shown() -> None:
    """There the same operations run either way: what times differ by says nothing of AnyShape."""
    text = report.table([row(seconds=2.0, eager_seconds=3.0, states={"model": FUSED})], gpu=False)
    assert report.AS_COMFYUI in text and " s " not in text and FUSED not in text


def skipping(flow: workflows.Workflow) -> workflows.Workflow:
    """The workflow with Skip Blocks before its sampler."""
    settings = {"interval": 3, "depth": "auto", "start_percent": 0.0, "end_percent": 1.0, "forecast": "order1"}
    inputs = flow["sampler"]["inputs"]
    node = {"class_type": "AnyShapeSkipBlocks", "inputs": {"model": inputs["model"], **settings}}
    sampler = {"class_type": "KSampler", "inputs": inputs | {"model": ["skip", 0]}}
    return flow | {"skip": node, "sampler": sampler}


@pytest.fixture(scope="module")
def whole(server) -> Image.Image:
    """ComfyUI's own picture of ``drawing``."""
    (image,) = server.run(drawing(compiled=False))["outputs"]["save"]["images"]
    return server.view(image).convert("RGB")


def drawing(compiled: bool) -> workflows.Workflow:
    """At a latent with odd sides, with steps enough to skip some."""
    flow = workflows.picture(replace(workflows.CASES[1], batch=1), seed=11, compiled=compiled)
    flow["sampler"]["inputs"]["steps"] = 10
    return flow


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_skip_blocks_on_the_trained_model(server, whole, compiled) -> None:
    """Nearly the picture without it, the run's line in the log, its counts in the stats."""
    (image,) = server.run(skipping(drawing(compiled)))["outputs"]["save"]["images"]
    rms = ImageStat.Stat(ImageChops.difference(server.view(image).convert("RGB"), whole)).rms
    assert 0 < max(rms) < 16  # of 255
    latest = server.get("/anyshape/stats").json()["skip"][-1]
    assert (latest["full"], latest["skipped"], latest["resets"]) == (4, 6, {})
    assert "4 full and 6 skipped evaluations" in server.log()
