"""Words that ``make lint`` finds: what slows a reader down, and what is right and must stay."""

import pytest

from tools import words
from tools.paths import ROOT


@pytest.mark.parametrize(
    "text",
    [
        "It is compiled anew.", "an error told from ours", "once a run", "two images a prompt",
        "one step in so many", "costs one forward more at a new size", "重新录制", "批量, 尺寸", "三个尺寸:\n",
    ],
)  # fmt: skip
def test_found(text) -> None:
    (found,) = words.found_in(text, "a.md")
    assert found.place == "a.md:1" and found.words and found.instead


@pytest.mark.parametrize(
    "text",
    [
        "once a size was compared", "however many lines a size has", "cannot be told apart", "once per run",
        "it is one of a kind", "记录一次", "批量，尺寸：", "K采样器 model, CLIP", "（`mode: off`）",
    ],
)  # fmt: skip
def test_left_alone(text) -> None:
    assert list(words.found_in(text)) == []


def test_the_line_is_named() -> None:
    assert [one.place for one in words.found_in("a\nb anew\n\nonce a call", "x.py")] == ["x.py:2", "x.py:4"]


def test_nothing_of_the_project_has_them() -> None:
    found = [one for path in words.files() for one in words.found_in(path.read_text(encoding="utf-8"), path.name)]
    assert found == []
    assert {ROOT / "README.md", ROOT / "locales/zh/main.json", ROOT / "nodes/warm_up.py"} <= set(words.files())
