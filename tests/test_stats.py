"""The stats in plain torch: counters, their contract, the report and the chart. No ComfyUI here."""

import importlib.util
import json
import re

import pytest
import torch

from tools import embed
from tools.oracles import STATS_KEYS, expect
from tools.paths import ROOT

embed.bare_pack()

from anyshape.accel import stats  # noqa: E402 - the package exists from the line above on
from anyshape.accel.bounded import MAX_TEXT  # noqa: E402
from anyshape.accel.reasons import say  # noqa: E402
from anyshape.accel.times import CallTimes, begin  # noqa: E402


def node_module(name):
    """A module of nodes/ on its own: the package itself needs ComfyUI."""
    spec = importlib.util.spec_from_file_location(f"anyshape.nodes.lone_{name}", ROOT / "nodes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Counters ---------------------------------------------------------------------------------------------------------

TYPES = {
    **dict.fromkeys(["kernels", "recompiles", "width", "height", "batch", "frames", "prompt"], int),
    **dict.fromkeys(["factor", "saved_seconds"], type(None)),  # on a CPU nothing is gained
    "workflows": list,
    **dict.fromkeys(["calls", "replays", "bytes", "depth", "full", "skipped"], int),
    **dict.fromkeys(["name", "kind", "key", "state", "step", "reason", "note", "model", "entry", "workflow"], str),
    "eager_ms": float,
    "inexact": list,
    **dict.fromkeys(["compile_seconds", "first_call_seconds", "median_ms", "seconds", "share"], float),
    "resets": dict,
    "prompts": dict,
    "share": float,
}


@pytest.fixture
def counted(monkeypatch):
    """Counters of the test's own, with one model, one shape and one run with skipped blocks in them."""
    own = stats.Stats()
    monkeypatch.setattr(stats, "STATS", own)
    shape = own.model("UNet", "model").shape("k", 512, 768, 2)
    shape.calls, shape.state, shape.eager.once = 3, "tape", 21.25
    with shape.times.measure(begin(torch.device("cpu"))):
        pass
    own.fallback("UNet", "a reason")
    own.fallback("UNet", "a reason")
    run = own.skip_run("UNet", 3)
    for skipped, reason in ((False, ""), (True, ""), (False, "another reason")):
        run.begin_evaluation()
        run.count(skipped, reason)
    return own


def test_snapshot_keeps_the_contract(counted) -> None:
    now = stats.snapshot()
    (model,), (fallback,), (run,) = now["models"], now["fallbacks"], now["skip"]
    (shape,) = model["shapes"]
    found = {"": now, "model": model, "shape": shape, "graphs": now["graphs"], "fallback": fallback, "skip": run}
    for name, part in {**found, "artifacts": now["artifacts"]}.items():
        assert set(part) == STATS_KEYS[name], name
    assert now["version"] == 2 and isinstance(now["device"], str)
    for name, value in {**model, **shape, **run}.items():
        assert name == "shapes" or type(value) is TYPES[name], name
    assert fallback == {"where": "UNet", "reason": "a reason", "count": 2}
    assert (run["full"], run["skipped"], run["resets"]) == (2, 1, {"another reason": 1})


def test_what_was_never_measured_is_null(counted) -> None:
    counted.model("new", "model").shape("k", 8, 8, 1)
    (shape,) = stats.snapshot()["models"][-1]["shapes"]
    assert shape["eager_ms"] is None and shape["frames"] == 1 and shape["note"] == ""


def test_snapshot_is_json(counted) -> None:
    now = stats.snapshot()
    assert json.loads(json.dumps(now)) == now


def test_a_snapshot_does_not_change_afterwards(counted) -> None:
    now = json.dumps(stats.snapshot())
    kept = stats.snapshot()
    counted.model("another", "vae").shape("k", 8, 8, 1).calls = 9
    counted.graphs.used_bytes = 7
    counted.fallback("UNet", "a reason")
    assert json.dumps(kept) == now


def test_old_models_are_forgotten(counted) -> None:
    for index in range(stats.MAX_MODELS + 5):
        counted.model(f"model {index}", "model")
    names = [model["name"] for model in stats.snapshot()["models"]]
    assert len(names) == stats.MAX_MODELS and names[-1] == f"model {stats.MAX_MODELS + 4}" and "UNet" not in names


def test_old_shapes_are_forgotten(counted) -> None:
    model = counted.model("many", "model")
    for width in range(stats.MAX_SHAPES + 3):
        model.shape(f"{width}", width, 8, 1).calls += 1
    assert len(model.shapes) == stats.MAX_SHAPES and "2" not in model.shapes and "3" in model.shapes
    model.shape("3", 3, 8, 1).calls += 1
    assert model.shapes["3"].calls == 2


def test_models_of_one_name_are_told_apart(counted) -> None:
    """For as long as a session lasts: the first ones are long forgotten, the last ones still differ."""
    for _ in range(3 * stats.MAX_MODELS):
        counted.model("UNet", "model")
    names = [model["name"] for model in stats.snapshot()["models"]]
    assert len(set(names)) == len(names) and all(name.startswith("UNet") for name in names)


def test_clear_keeps_the_models(counted) -> None:
    counted.clear()
    now = stats.snapshot()
    assert now["fallbacks"] == [] and [model["shapes"] for model in now["models"]] == [[]]


def noted(message: str, state: str = "ready", node_id: str = "5") -> stats.NodeStats:
    return stats.NodeStats(node_id, "w", "AnyShapeWarmUp", state, message, list)


def test_texts_are_bounded_where_they_enter(counted) -> None:
    """Every open browser gets all of them twice a second while prompts run."""
    (model,), long = counted._models, "x" * 600_000
    model.shapes["k"].reason = model.shapes["k"].note = long
    counted.fallback("UNet", long)
    counted.skip_run("UNet", 0).resets[long] += 1
    counted.node(noted(long))
    now = stats.snapshot()
    assert len(json.dumps(now)) < 12_000
    (message,) = [node["message"] for node in now["nodes"]]
    assert message == f"{'x' * MAX_TEXT}... (599,000 more characters)"
    assert counted.fallback("UNet", long) == 2  # it is still counted as the same


def test_reasons_are_bounded_in_number(counted) -> None:
    for number in range(stats.MAX_FALLBACKS + 50):
        assert counted.fallback("UNet", f"reason {number}") == 1
    reasons = [step["reason"] for step in stats.snapshot()["fallbacks"]]
    assert len(reasons) == stats.MAX_FALLBACKS and reasons[-1] == f"reason {stats.MAX_FALLBACKS + 49}"


def test_clear_drops_what_nodes_said(counted) -> None:
    """But not why a node's model cannot be compiled: that is no count, and still so."""
    counted.node(noted("line 1: ..."))
    counted.node(noted("an AMD card", "eager", "6"))
    counted.clear()
    assert [(node["id"], node["message"]) for node in stats.snapshot()["nodes"]] == [("5", ""), ("6", "an AMD card")]


def test_expect_is_an_oracle(counted) -> None:
    with expect(fallbacks=1, calls=0):
        counted.fallback("here", "why")
    with pytest.raises(AssertionError, match=r"'fallbacks': 0.*'fallbacks': 1"), expect(fallbacks=0):
        counted.fallback("here", "why")
    with pytest.raises(AssertionError), expect(calls=1):
        pass
    with pytest.raises(AssertionError), expect(no_such_counter=0):
        pass
    (model,) = counted._models
    with expect(kernels=2, recompiles=1, replays=1, evictions=1):
        model.kernels, model.recompiles, counted.graphs.evictions = 2, 1, 1
        model.shapes["k"].replays += 1


def test_what_only_some_nodes_have_is_only_there(counted) -> None:
    plain, named = noted(""), noted("", node_id="6")
    named.file, named.sizes, named.instead = "sdxl", {"listed": 2, "ready": 1, "bad": 0}, lambda: "another node"
    for entry in (plain, named):
        counted.node(entry)
    without, having = stats.snapshot()["nodes"]
    assert having.keys() - without.keys() == {"file", "sizes", "instead"}


def test_the_report_names_the_models_file(counted) -> None:
    counted.node(
        stats.NodeStats("5", "w", "AnyShapeCompileModel", "ready", "", lambda: ["UNet"], file="sd_xl_base_1.0")
    )
    assert "UNet (model, sd_xl_base_1.0): 1 size" in node_module("report").report(stats.snapshot())


def test_equal_runs_with_skipped_blocks_are_one_line(counted) -> None:
    for seconds, full in ((1.25, 8), (0.85, 8), (1.0, 9)):
        run = counted.skip_run("UNet", 2)
        run.entry, run.full, run.skipped, run.seconds, run.bytes = "UNet #2", full, 12, seconds, 5 << 20
    lines = node_module("report").report(stats.snapshot()).splitlines()
    assert [line for line in lines if line.startswith("- UNet #2")] == [
        "- UNet #2, 2 times: 8 full and 12 skipped evaluations at depth 2 in 0.8 to 1.2 s, 5 MB of features",
        "- UNet #2: 9 full and 12 skipped evaluations at depth 2 in 1.0 s, 5 MB of features",
    ]
    (other,) = [line for line in lines if line.startswith("- UNet: ")]
    assert other == "- UNet: 2 full and 1 skipped evaluations at depth 3 in 0.0 s"  # that kept nothing


def test_what_is_said_of_models_names_their_files(counted) -> None:
    """Of those that are known; of a class what all of it have in common. A VAE may be from another file."""
    counted.model("VAE decoder", "vae").shape("d", 64, 64, 1)
    counted.skip_run("UNet", 3).entry = "UNet"
    counted.fallback("VAE decoder", "no card")
    for kind, file in (("WarmUp", "base"), ("CompileVAE", "ae")):
        names = ["UNet", "VAE decoder"] if kind == "WarmUp" else ["VAE decoder"]
        counted.node(stats.NodeStats(kind, "w", f"AnyShape{kind}", "ready", "", lambda names=names: names, file=file))
    report, chart = node_module("report").report, node_module("chart")
    text = report(stats.snapshot())
    assert "- base (UNet): 0 full" in text and "- base (UNet), 2 times: a reason" in text
    assert "- ae (VAE decoder), once: no card" in text
    counted.model("UNet", "model")
    assert "- UNet, 2 times: a reason" in report(stats.snapshot())
    drawn: list[str] = []
    chart._label = lambda name, _: drawn.append(name) or name
    chart.draw(stats.snapshot())
    assert set(drawn) == {"base (UNet)", "ae (VAE decoder)"}


def test_times_are_medians() -> None:
    times = CallTimes()
    assert times.median_ms() == 0.0
    times._done.extend([1.0, 100.0, 2.0])
    assert times.median_ms() == 2.0


# Reports ----------------------------------------------------------------------------------------------------------


def test_report_text(counted) -> None:
    counted.graphs.budget_bytes, counted.graphs.used_bytes, counted.graphs.evictions = 64 << 20, 32 << 20, 1
    text = node_module("report").report(stats.snapshot())
    for part in ("UNet (model): 1 size", "0 kernels, 0 recompiles", "512x768", "tape", "32 of 64 MB, 1 evicted"):
        assert part in text
    assert "- UNet, 2 times: a reason" in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_report_of_a_video(counted) -> None:
    """Its frames, what eager takes, why it has no graph although nothing is wrong, and what is less exact."""
    model = counted.model("Wan", "model")
    model.inexact = ["RMSNorm keeps its sum in float32: half of bf16's last bit"]
    shape = model.shape("v", 832, 480, 1, frames=33)
    shape.state, shape.eager.once, shape.note = "tape", 812.34, "the GPU is the limit at this size"
    lines = node_module("report").report(stats.snapshot()).splitlines()
    (video,) = [line for line in lines if "832x480x33" in line]
    assert "812.3" in video and video.endswith("the GPU is the limit at this size")
    assert "  less exact than eager: RMSNorm keeps its sum in float32: half of bf16's last bit" in lines
    assert node_module("chart")._label("Wan", shape.as_dict()) == "Wan  832x480x33  b1"
    shape.reason = "another node's patch"
    assert "another node's patch; the GPU is the limit" in node_module("report").report(stats.snapshot())


def test_report_of_nothing() -> None:
    assert "Nothing has run" in node_module("report").report(stats.Stats().snapshot())


def is_image(chart) -> bool:
    """ComfyUI's IMAGE: [B, H, W, 3] in 0..1."""
    in_range = 0 <= chart.min() and chart.max() <= 1
    return chart.ndim == 4 and chart.shape[0] == 1 and chart.shape[3] == 3 and chart.dtype == torch.float32 and in_range


def test_chart(counted) -> None:
    draw = node_module("chart").draw
    small, counted_model = draw(stats.snapshot()), counted.model("more", "vae")
    for state in stats.STATES:
        counted_model.shape(state, 8, 8, 1).state = state
    large = draw(stats.snapshot())
    assert is_image(small) and is_image(large) and large.shape[1] > small.shape[1] and small.std() > 0.05


def test_the_chart_says_how_sizes_run_as_the_browser_does(counted) -> None:
    chart, shape = node_module("chart"), {"state": "tape", "reason": "", "key": "k", "step": "skipped", "frames": 1}
    assert chart.speed(shape, "NVIDIA H200") == "fast" and chart.speed(shape, "cpu") == "as ComfyUI"
    assert chart.speed(shape | {"reason": "a patch"}, "NVIDIA H200") == "partly fast"
    assert chart.speed(shape | {"state": "eager"}, "NVIDIA H200") == "as ComfyUI"
    assert chart._label("UNet", shape | {"width": 8, "height": 8, "batch": 1}).endswith("8x8  b1  skipped")


def test_a_report_says_what_skipped_steps_are_compared_with(counted) -> None:
    now = stats.snapshot() | {"gain": {"factor": 3.0, "saved_seconds": 12.0, "full_steps": 1.5}}
    first, second, *_ = node_module("report").report(now).splitlines()
    assert first.endswith("3.00x, 12.0 s saved") and second.endswith("full steps alone: 1.50x")


def test_a_report_has_no_empty_tables_and_dashes_for_what_was_not_measured(counted) -> None:
    counted.model("VAE encoder", "vae")
    counted.model("VAE decoder", "vae").shape("d", 64, 64, 1)
    counted.fallback("VAE decoder", "no card")
    text = node_module("report").report(stats.snapshot())
    assert "VAE encoder" not in text and "- VAE decoder, once: no card" in text
    (line,) = [line for line in text.splitlines() if "64x64" in line]
    assert line.split() == ["64x64", "1", "as", "ComfyUI", "(eager)", "0", *["-"] * 5]


def test_a_report_has_the_words_of_users_and_the_technical_one_in_brackets(counted) -> None:
    shapes = counted.model("UNet", "model").shape
    for width, (state, reason) in enumerate(
        (("graph", ""), ("tape", say("no_graphs")), ("eager", say("no_graphs"))), 1
    ):
        shape = shapes(f"{width}", 8 * width, 8, 1)
        shape.state, shape.reason, shape.bytes = state, reason, 3 << 20
    text = node_module("report").report(stats.snapshot() | {"device": "NVIDIA H200"})
    rows = [line for line in text.splitlines() if re.match(r" +\d+x8 ", line)]
    for row, state in zip(rows, ("fast (graph)", "partly fast (tape)", "as ComfyUI (eager)"), strict=True):
        assert f" 1 {state} " in row and row.split(")")[1].split()[:6] == ["0", "-", "-", "-", "-", "3"]
    assert [row.endswith("  Raise graph_budget_mb: it is 0") for row in rows] == [False, True, True]
    assert text.count(say("no_graphs")) == 1 and "eager (" not in text
    assert "as ComfyUI (tape)" in node_module("report").report(stats.snapshot() | {"device": "cpu"})


@pytest.mark.parametrize(("longest", "scale"), [(37.7, "log"), (0.9, "linear"), (0.0, "linear")])
def test_one_long_first_call_does_not_flatten_the_others(longest, scale) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    (axes, other), seconds = figure.subplots(1, 2, sharey=True), (longest, 0.25, 0.3, 0.0)
    size = {"width": 8, "height": 8, "batch": 1, "frames": 1, "step": "", "median_ms": 500.0, "eager_ms": 900.0}
    shapes = [("UNet", size | {"first_call_seconds": one}) for one in seconds]
    bars, colours = node_module("chart")._bars, ["red"] * len(shapes)
    bars(axes, shapes, colours, "first_call_seconds", "first call, seconds")
    bars(other, shapes, colours, "median_ms", "now")
    figure.canvas.draw()
    widths = [bar.get_window_extent().width for bar in axes.patches]
    assert axes.get_xscale() == scale and (axes.get_xlabel() == "logarithmic") is (scale == "log")
    assert widths[1] > 0.05 * max(widths) and widths[3] <= 0.01 * max(widths)
    assert other.get_xscale() == "linear" and axes.yaxis_inverted()  # the first on top


def test_chart_of_nothing_says_so() -> None:
    chart = node_module("chart").draw(stats.Stats().snapshot())
    assert is_image(chart) and chart.min() < 0.5


def test_chart_of_many_sizes_stays_small(counted) -> None:
    for width in range(200):
        counted.model("UNet", "model").shape(f"{width}", width, 8, 1)
    assert node_module("chart").draw(stats.snapshot()).shape[1] < 2000
