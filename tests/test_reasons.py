"""Reasons: each stands in one place, has a short form that helps, is found in a text, and is Chinese too."""

import json
import re
from types import ModuleType

import pytest

from tools.paths import ROOT

LONGEST = 60  # characters of a short form, with short names in it
SOURCES = [path for folder in ("accel", "nodes") for path in (ROOT / folder).rglob("*.py")]
CHINESE = json.loads((ROOT / "locales" / "zh" / "main.json").read_text(encoding="utf-8"))["anyshape"]["reasons"]
# The field's own words, which nobody must know who only wants to act.
JARGON = re.compile(r"\b(eager|tape|tiers?|dispatcher|forward|capability|allocator|C\+\+|activations)\b")


@pytest.fixture(scope="module")
def reasons(pack: ModuleType) -> ModuleType:
    from anyshape.accel import reasons

    return reasons


def names(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", text))


def filled(reason: object) -> tuple[str, dict[str, str]]:
    values = {name: f"<{name}>" for name in names(reason.long)}
    return reason(**values), values


def test_each_is_found_in_its_own_text_and_within_a_longer_one(reasons) -> None:
    for key, reason in reasons.REASONS.items():
        text, values = filled(reason)
        for given in (text, f"this model runs as without this node: {text}"):
            (found,) = reasons.found_in(given)
            assert found.reason.key == key and found.values.keys() == values.keys(), given
        assert reasons.found_in(text)[0].values == values


def test_several_in_one_text_are_found_in_its_order(reasons) -> None:
    text = "; ".join([reasons.say("draws") + " (comfy/ldm/x.py:12)", reasons.say("no_graphs")])
    first, second = reasons.found_in(text)
    assert (first.reason.key, first.values, second.reason.key) == ("draws", {"place": "comfy/ldm/x.py:12"}, "no_graphs")
    assert reasons.short(text) == "the model draws random numbers; Raise graph_budget_mb: it is 0"
    assert reasons.found_in("something else") == () and reasons.short("something else") == "something else"


def test_a_text_may_say_more_than_its_reasons(reasons) -> None:
    plain, moved = reasons.say("draws"), reasons.say("low_vram", away="1.0", all="6.6")
    for text in (plain, f"{plain} (comfy/ldm/x.py:12)", f"{plain}; {moved}", f"{moved}. It runs as without this node"):
        assert reasons.says_all(text), text
    for text in (f"512x512: {plain}", f"{plain}, at 512x512", "something else"):
        assert not reasons.says_all(text), text


def test_low_vram_says_how_much_lies_in_main_memory(pack: ModuleType, reasons) -> None:
    import torch
    from anyshape.accel import tapes, weights
    from anyshape.accel.tape.record import Recorder, record
    from torch import nn

    model = nn.Sequential(nn.Linear(1 << 14, 1 << 14, device="meta"), nn.Linear(4, 1 << 14))
    found = reasons.found_in(weights.low_vram(model, torch.device("cpu")))
    assert [(one.reason.key, one.values) for one in found] == [("low_vram", {"away": "1.0", "all": "1.0"})]
    assert weights.low_vram(model[1], torch.device("cpu")) == ""
    x = torch.randn(2, 4)
    with torch.inference_mode():
        _, tape = record(lambda: model[1](x), Recorder([x], model[1], x.device))
    assert tapes.obstacle(tape) == ""
    tape.device = torch.device("meta")  # as if the weights were elsewhere
    assert reasons.found_in(tapes.obstacle(tape))[0].reason.key == "weights_elsewhere"  # of one block
    assert reasons.found_in(tapes.obstacle(tape, model[1]))[0].reason.key == "low_vram"


def test_short_forms_are_short_and_plain(reasons) -> None:
    for reason in reasons.REASONS.values():
        assert names(reason.short) <= names(reason.long), reason
        assert len(reason.short) <= LONGEST and not JARGON.search(re.sub(r"{\w+}", "", reason.short)), reason


def test_chinese_has_every_one(reasons) -> None:
    assert CHINESE.keys() == reasons.REASONS.keys()
    for key, reason in reasons.REASONS.items():
        for form, english in (("short", reason.short), ("long", reason.long)):
            text = CHINESE[key][form]
            assert names(text) <= names(english) and re.search(r"[\u4e00-\u9fff]", text), (key, form)
            assert not re.search(r"[\u4e00-\u9fff）][,:;(]|[,:;][\u4e00-\u9fff]", text), f"half-width: {text}"


def test_each_is_used_and_none_is_written_elsewhere(reasons) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in SOURCES if path.parent.name != "reasons"}
    everything = "\n".join(sources.values())
    used = set(re.findall(r"""\bsay\(\s*["'](\w+)["']""", everything))
    assert used == reasons.REASONS.keys()
    for reason in reasons.REASONS.values():
        longest = max(re.split(r"\{\w+\}", reason.long), key=len)
        assert len(longest) < 30 or longest not in everything, f"{reason.key} is written twice"


def test_stats_have_them(pack: ModuleType, reasons) -> None:
    from anyshape.accel.stats import STATS

    text = reasons.say("budget_small", need=90, budget=64, wanted=154)
    more = f"Warm Up stopped at 512x512: {text}"
    for each in (text, more, "nothing that is known"):
        STATS.fallback("a model", each)
    told = STATS.snapshot()["reasons"]  # those of tests before this one too
    found = {one["text"]: one["said"] for one in told}
    assert {one["text"]: one["all"] for one in told if one["text"] in (text, more)} == {text: True, more: False}
    assert (
        found[more]
        == found[text]
        == [
            {
                "key": "budget_small",
                "short": "Raise graph_budget_mb to 154",
                "values": {"need": "90", "budget": "64", "wanted": "154"},
            }
        ]
    )
    assert "nothing that is known" not in found
