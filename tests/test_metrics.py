"""``/anyshape/metrics`` on the real server, read by a parser that takes nothing but Prometheus' text format."""

import re
from typing import NamedTuple

import pytest

from tools import embed
from tools.api_format import node, text_to_image
from tools.paths import ROOT

embed.bare_pack()

from anyshape.accel import reasons, stats  # noqa: E402 - the package exists from the line above on
from anyshape.accel.totals import Totals  # noqa: E402

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = rf'({NAME})="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)\}})? (-?[0-9.]+(?:e[-+]?\d+)?)")
FEW = {  # what each label may be; info has versions
    "kind": {"model", "vae", "controlnet"},
    "state": set(stats.STATES),
    "step": {"", "full", "skipped"},
    "reason": {*reasons.REASONS, "other"},
    "what": {"loaded", "saved", "rejected"},
}


SKIPPING = {"interval": 3, "depth": "auto", "start_percent": 0.0, "end_percent": 1.0, "forecast": "order1"}


class Metric(NamedTuple):
    """A metric's type, and its samples by their labels."""

    kind: str
    samples: dict[frozenset[tuple[str, str]], float]


def parsed(text: str) -> dict[str, Metric]:
    """name -> metric. Each has HELP, then TYPE, then its samples, all lines of it together."""
    found: dict[str, Metric] = {}
    helped = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ", 3)[2]
            assert re.fullmatch(NAME, helped) and helped not in found and len(line.split(" ", 3)[3]) > 5
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == helped and kind in ("counter", "gauge")
            found[name] = Metric(kind, {})
        else:
            match = SAMPLE.fullmatch(line)
            assert match and match[1] == helped, line
            labels = frozenset(re.findall(LABEL, match[2] or ""))
            assert labels not in found[helped].samples, line
            found[helped].samples[labels] = float(match[match.lastindex])
    return found


def scrape(server) -> dict[str, Metric]:
    answer = server.get("/anyshape/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(answer.text)


def total(found: dict[str, Metric], name: str, **labels: str) -> float:
    metric = found.get(f"anyshape_{name}", Metric("", {}))
    return sum(value for given, value in metric.samples.items() if labels.items() <= dict(given).items())


def flow(width: int) -> dict:
    """Text to image with Skip Blocks, at a size that no other test has."""
    made = text_to_image("1 2 3 6 7 8", (width, 56, 1), model=["9", 0], vae=["5", 0], steps=12)
    return made | {
        "4": node("AnyShapeCompileModel", model=["1", 0], mode="auto", graph_budget_mb=1024),
        "9": node("AnyShapeSkipBlocks", model=["4", 0], **SKIPPING),
        "5": node("AnyShapeCompileVAE", vae=["1", 1], enabled=True),
    }


def test_a_prompt_is_counted_and_nothing_falls_when_figures_are_cleared(server) -> None:
    before = scrape(server)
    server.run(flow(232))
    shapes = [s for model in server.get("/anyshape/stats").json()["models"] for s in model["shapes"]]
    now = scrape(server)
    grown = {name: total(now, name) - total(before, name) for name in ("prompts_total", "first_calls_total")}
    calls = {step: total(now, "calls_total", kind="model", step=step) for step in ("full", "skipped")}
    for step, counted in calls.items():
        here = sum(s["calls"] for s in shapes if (s["width"], s["step"]) == (232, step))
        assert here > 0 and counted - total(before, "calls_total", kind="model", step=step) == here
    assert grown == {"prompts_total": 1, "first_calls_total": sum(s["width"] == 232 for s in shapes)}
    assert total(now, "sizes") == len(shapes)
    assert total(now, "first_call_seconds_total") > total(before, "first_call_seconds_total")
    server.http.post(f"{server.url}/anyshape/clear").raise_for_status()
    cleared = scrape(server)
    assert "anyshape_sizes" not in cleared
    falling = {"anyshape_graph_evictions_total"}
    for name, metric in now.items():
        if metric.kind == "counter" and name not in falling:
            assert all(cleared[name].samples[labels] >= value for labels, value in metric.samples.items()), name


def test_names_types_and_labels(server) -> None:
    server.run(flow(240))
    found = scrape(server)
    (version,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    (about,) = found["anyshape_info"].samples
    assert dict(about)["version"] == version and dict(about).keys() == {"version", "comfyui", "torch", "device"}
    for name, metric in found.items():
        assert name.startswith("anyshape_") and name.endswith("_total") == (metric.kind == "counter"), name
        for labels in metric.samples:
            assert name == "anyshape_info" or all(value in FEW[label] for label, value in labels), labels


def test_the_same_under_api_and_what_is_wrong_is_said(server) -> None:
    assert parsed(server.get("/api/anyshape/metrics").text).keys() == scrape(server).keys()
    refused = server.http.get(f"{server.url}/anyshape/metrics", params={"x": "1"})
    assert refused.status_code == 400 and "'x'" in refused.json()["error"]
    assert server.http.post(f"{server.url}/anyshape/metrics").status_code in (404, 405)


def test_documented_are_those_that_there_are() -> None:
    """docs/scripts.md has a row for each; of the shared cache's all but the first are shortened there."""
    source = (ROOT / "nodes" / "metrics.py").read_text(encoding="utf-8")
    documented = (ROOT / "docs" / "scripts.md").read_text(encoding="utf-8")
    names = set(re.findall(r'_family\(\s*"(\w+)"', source)) | set(re.findall(r'"(\w+_total)"', source))
    assert len(names) > 12 and [name for name in names if f"`anyshape_{name}`" not in documented] == []


# What is counted --------------------------------------------------------------------------------------------------


def test_reasons_are_counted_by_their_keys() -> None:
    totals = Totals()
    low_vram = reasons.say("low_vram", away="1.0", all="6.6")
    for text in (low_vram, f"{low_vram}. It runs as without this node", "/home/me: no"):
        totals.fell_back(text)
    assert totals.fallbacks() == {"low_vram": 2, "other": 1}


def test_what_was_counted_outlives_its_model() -> None:
    own = stats.Stats()
    for number in range(3 * stats.MAX_MODELS):
        model = own.model("UNet", "model")
        own.totals.called(model.kind, "tape", "")
        own.fallback(model.name, f"reason {number}")
    own.clear()
    assert len(own.models()) == stats.MAX_MODELS
    assert own.totals.calls() == {("model", "tape", ""): 3 * stats.MAX_MODELS}
    assert own.totals.fallbacks() == {"other": 3 * stats.MAX_MODELS}


@pytest.mark.parametrize("value", ['a "card"', "back\\slash", "two\nlines"])
def test_labels_are_escaped(pack, value) -> None:
    from anyshape.nodes.metrics import exposition

    now = stats.Stats().snapshot() | {"device": value}
    (labels,) = parsed(exposition(now, Totals(), 0, {"version": "1"}))["anyshape_info"].samples
    read = dict(labels)["device"].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
    assert read == value


def test_what_is_shared_and_what_is_gained_are_told_where_known(pack) -> None:
    from anyshape.nodes.metrics import exposition

    now = stats.Stats().snapshot()
    plain = parsed(exposition(now, Totals(), 0, {}))
    assert not [name for name in plain if "shared" in name or "gain" in name or "saved_seconds" in name]
    shared = {"address": "kernels:6379", "hits": 3, "misses": 2, "stored": 1, "waited_seconds": 0.5}
    told = parsed(exposition(now | {"fleet": shared, "gain": {"factor": 1.5, "saved_seconds": -2.5}}, Totals(), 0, {}))
    figures = {name: sum(metric.samples.values()) for name, metric in told.items()}
    assert figures["anyshape_gain_factor"] == 1.5 and figures["anyshape_saved_seconds"] == -2.5
    assert figures["anyshape_shared_cache_hits_total"] == 3
    assert figures["anyshape_shared_cache_waited_seconds_total"] == 0.5
