"""What the README and the docs say of the speed is what bench/results says, and the plots are drawn from it."""

import json
import re
from typing import Any

import pytest
from PIL import Image

from bench import figures, frontier, plot, race, skip_tables, tables
from tools.paths import ROOT

RESULTS = sorted(figures.RESULTS.glob("*.json"))
MIXED = [path for path in RESULTS if path.stem.startswith("mixed-")]
READMES = ["README.md", "README.zh-CN.md"]
QUOTED = [
    *(f"{model}-forward" for model in tables.SIX),
    "sd15-forward",
    "wan-forward",
    "vae",
    "controlnet",
    "skip-sdxl",
    "mixed-sdxl",
]  # what the READMEs quote


def by_name(path: Any) -> str:
    return getattr(path, "stem", str(path))


def table_of(readme: str) -> list[list[str]]:
    """The cells of the README's performance table, without its head."""
    block = (ROOT / readme).read_text().partition(tables.BEGIN)[2].partition(tables.END)[0]
    rows = [line.strip("|").split("|") for line in block.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def agree(text: str, value: float) -> bool:
    """Whether ``text`` is ``value``, rounded to the digits that it has."""
    digits = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5 * 10**-digits + 1e-9


# Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RESULTS, ids=by_name)
def test_conditions_are_recorded(path):
    result = figures.load(path)
    assert all(result[name] for name in figures.CONDITIONS)
    assert all(result["versions"][name] for name in ("torch", "triton", "python", "comfyui"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["command"].startswith("python -m bench.")


def test_the_quoted_results_come_from_one_machine():
    found = [figures.load(figures.RESULTS / f"{name}.json") for name in QUOTED]
    for name in ("machine", "versions", "allocator"):
        assert all(result[name] == found[0][name] for result in found)


@pytest.mark.parametrize("path", MIXED, ids=by_name)
def test_an_unfinished_run_says_how_far_it_came(path):
    result = figures.load(path)
    prompts = result["runs"]["eager"]["cold"]["prompts"]
    for _, _, run in figures.runs(result):
        sizes = [(p["width"], p["height"], p["images"]) for p in run["prompts"]]
        assert sizes == [(p["width"], p["height"], p["images"]) for p in prompts][: len(sizes)]
        assert run["finished"] == (len(sizes) == len(prompts) and run["exit_code"] == 0)
        assert run["limit_seconds"] > 0 and run["seconds"] == pytest.approx(figures.total(run), abs=1e-3)


# Tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", tables.BLOCKS, ids=by_name)
def test_the_text_is_what_the_results_say(path):
    text = path.read_text()
    assert text == tables.rewritten(text, tables.BLOCKS[path]()), "run: make figures"


@pytest.mark.parametrize("readme", READMES)
def test_every_figure_of_the_table(readme):
    """Read back cell by cell, with no help from what wrote them: one image as it is sampled, at both sizes."""
    names = {name: model for model, name in figures.MODELS.items()}
    rows = table_of(readme)
    assert len(rows) == 6 and len({row[0] for row in rows}) == 6
    for model, *cells in rows:
        result = figures.load(figures.forward_path(names[model]))
        most = max(row["rows"] for row in result["rows"] if row["images"] == 1)
        for side, cell, faster in ((1024, *cells[:2]), (512, *cells[2:])):
            (row,) = [
                r for r in result["rows"] if (r["width"], r["height"], r["images"], r["rows"]) == (side, side, 1, most)
            ]
            assert_pair(cell, row)
            assert faster.endswith("x") and agree(faster[:-1], row["eager_ms"] / row["compiled_ms"])


def assert_pair(cell: str, row: dict[str, Any]) -> None:
    eager, compiled = cell.split(" → ")
    assert agree(eager, row["eager_ms"]) and agree(compiled, row["compiled_ms"])


@pytest.mark.parametrize("readme", READMES)
def test_the_headline_is_measured(readme):
    """The factors of the first screen are those of SDXL's table, and of its day and version."""
    head = (ROOT / readme).read_text().partition(tables.BEGIN)[0]
    result = figures.load(figures.forward_path("sdxl"))
    (sdxl,) = [row for row in table_of(readme) if row[0] == "SDXL"]
    assert re.findall(r"\d+\.\d+x", head) == [sdxl[2], sdxl[4]]
    assert f"{result['date']}" in head and f"ComfyUI {result['versions']['comfyui']}" in head


@pytest.mark.parametrize("readme", READMES)
def test_the_readme_is_short_and_its_links_lead_somewhere(readme):
    text = (ROOT / readme).read_text()
    assert len(text.splitlines()) <= 120
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_markers_are_needed():
    assert tables.rewritten(f"a {tables.BEGIN} old {tables.END} b", "new").split() == (
        f"a {tables.BEGIN} new {tables.END} b".split()
    )
    with pytest.raises(ValueError, match="begin"):
        tables.rewritten("no markers", "new")


def test_an_empty_cell_stays():
    assert tables.table(["a", "b"], [["", "1"]]) == "| a | b |\n|---|---|\n| | 1 |"


def test_digits():
    assert [tables.three(value) for value in (6.3, 42.54, 99.97, 137.6)] == ["6.30", "42.5", "100", "138"]
    assert [tables.two(value) for value in (-0.004, -0.016, 4.125)] == ["0.00", "-0.02", "4.12"]


def test_equal_cost():
    points = [
        skip_tables.Point(10.0, 30.0, 0.8),
        skip_tables.Point(14.0, 40.0, 0.9),
        skip_tables.Point(14.0, 40.0, 0.9),
    ]
    found = [skip_tables.at_cost(points, cost) for cost in (10.0, 11.0, 14.0)]
    assert [(each.cost, each.psnr) for each in found] == [(10.0, 30.0), (11.0, 32.5), (14.0, 40.0)]
    assert [each.ssim for each in found] == pytest.approx([0.8, 0.825, 0.9])
    assert skip_tables.at_cost(points, 9.9) is None and skip_tables.at_cost(points, 14.1) is None
    assert skip_tables.at_cost(points[:1], 10.0) == points[0]
    ours = skip_tables.Point(10.0, 42.0, 0.9)
    assert [skip_tables.beyond(other, ours) for other in (ours, points[1], None)] == [
        "42.0, 0.9000",
        "40.0 (+2.0), 0.9000",
        "",
    ]
    assert skip_tables.beyond(points[1], None) == "40.0, 0.9000"


def test_the_comparison_at_half_the_cost():
    def row(method: str, cost: float, psnr: float, **case: Any) -> dict[str, Any]:
        case = {"model": "unet", "sampler": "euler", "steps": 20, "width": 64, "height": 72} | case
        return case | {"method": method, "setting": 2, "cost": cost, "seconds": cost / 10, "psnr": psnr, "ssim": 0.5}

    whole = row("every step", 20.0, skip_tables.EQUAL)
    rows = [
        {name: value for name, value in whole.items() if name != "psnr"},
        row("Skip Blocks", 12.0, 50.0),
        row("Skip Blocks", 8.0, 40.0),
        row("DeepCache", 12.0, 44.0),
        row("DeepCache", 10.0, 42.0),
        row("EasyCache", 20.0, skip_tables.EQUAL),  # skipped nothing: no point of a line
        row("EasyCache", 8.0, 30.0),
    ]
    line = ["unet", "euler", "20", "64x72", "45.0, 0.5000", "", "42.0 (+3.0), 0.5000", "", "", ""]
    assert [skip_tables.half(rows, by) for by in (skip_tables.COST, skip_tables.SECONDS)] == [line, line]
    others = [row("every step", 20.0, 0.0, model="transformer"), row("every step", 30.0, 0.0, steps=30)]
    assert [len(case) for case in skip_tables.cases([*rows, *others])] == [7, 1, 1]
    assert skip_tables.first_cases([*rows, *others]) == [rows, others[:1]]


def test_skip_blocks_is_worth_it_on_a_transformer():
    """At half the work of every step, on trained weights: above reuse, fewer steps and EasyCache."""
    (case,) = [c for c in skip_tables.first_cases(figures.load(skip_tables.QUALITY)["rows"]) if c[0]["model"] != "unet"]
    ours, *others = (
        skip_tables.at_cost(skip_tables.line(case, method), case[0]["steps"] / 2)
        for method in (skip_tables.OURS, skip_tables.PLAIN, skip_tables.FEWER, skip_tables.CACHE)
    )
    assert all(ours.psnr - other.psnr >= least for other, least in zip(others, (3, 1, 3), strict=True) if other)
    assert others[0] and others[1]


# Plots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MIXED, ids=by_name)
def test_the_plot_is_drawn_from_the_result(path):
    picture = plot.IMAGES / f"{path.stem}.png"
    with Image.open(picture) as opened:
        assert opened.text[plot.SOURCE] == plot.digest(path), "run: make figures"
        assert "transparency" not in opened.info  # it must be readable on a dark page
    assert f"(images/{picture.name})" in (ROOT / "docs" / "performance.md").read_text()


def test_the_race_is_drawn_from_the_result():
    drawn = race.PATH.read_text(encoding="utf-8")
    assert drawn == race.draw(figures.load(race.RESULT), plot.digest(race.RESULT)), "run: make figures"
    for readme in READMES:
        assert f"(docs/images/{race.PATH.name})" in (ROOT / readme).read_text()


def test_the_race_is_run_as_it_was_measured():
    """A lane is full when its steps are done, at half speed; eager's beside ours."""
    result = figures.load(race.RESULT)
    lanes = race.lanes(result)
    assert [lane.label for lane in lanes[::2]] == list(race.SIZES) and len(race.SIZES) == 4
    whole = 2 * max(lane.seconds for lane in lanes) + race.REST
    moved = re.findall(
        r'attributeName="width" values="0;560;560" keyTimes="0;([\d.]+);1" dur="([\d.]+)s"', race.PATH.read_text()
    )
    for lane, (done, seconds) in zip(lanes, moved, strict=True):
        assert float(seconds) == pytest.approx(whole, abs=0.01)
        assert float(done) * whole == pytest.approx(2 * lane.seconds, abs=0.01)


def test_the_frontier_is_drawn_from_the_result():
    with Image.open(frontier.PATH) as opened:
        assert opened.text[plot.SOURCE] == plot.digest(skip_tables.QUALITY), "run: make figures"
        assert "transparency" not in opened.info
    assert f"(images/{frontier.PATH.name})" in (ROOT / "docs" / "performance.md").read_text()


def test_every_method_is_in_the_frontier():
    for rows in skip_tables.cases(figures.load(skip_tables.QUALITY)["rows"]):
        assert {row["method"] for row in rows} == {*frontier.STYLES, "every step"}
    assert {*skip_tables.VERSUS} == {*frontier.STYLES}


def test_runs_that_did_not_finish_are_told_apart():
    done = [{"seconds": 2.0}, {"seconds": 1.0}]
    run = {"finished": False, "exit_code": None, "limit_seconds": 85.0, "prompts": done}
    stopped, failed = (plot.lines({"runs": {"core": {"cold": run | {"exit_code": code}}}})[0] for code in (None, 1))
    assert stopped.seconds == [0.0, 2.0, 3.0]
    assert plot.fate(stopped, 12) == "not finished, 2 of 12 prompts in 85 s"
    assert plot.fate(failed, 12) == "failed after 2 of 12 prompts"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_presets_tooltip_says_what_was_measured(language) -> None:
    """balanced on models of full size, safe and fast by their work on the demo's models."""
    nodes = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    tooltip = nodes["AnyShapeSkipBlocks"]["inputs"]["preset"]["tooltip"].replace("（", " (").replace("）", ")")
    for model, name in (("sd15", "SD1.5"), ("sdxl", "SDXL"), ("flux", "Flux"), ("wan", "Wan 2.1")):
        found = figures.load(figures.RESULTS / f"skip-{model}.json")
        assert (found["interval"], found["steps"]) == (3, 30)
        assert f"{found['rows'][0]['compiled_speedup']:.1f}x ({name})" in tooltip
    cases = skip_tables.first_cases(figures.load(skip_tables.QUALITY)["rows"])
    for interval in (2, 4):
        work = [
            row["cost"]
            for case in cases
            for row in case
            if (row["method"], row["setting"]) == ("Skip Blocks", interval)
        ]
        assert len(work) == 2 and {case[0]["steps"] for case in cases} == {30}
        low, high = sorted(f"{30 / cost:.1f}x" for cost in work)
        assert re.search(f"{low} (to|至) {high}", tooltip)
