"""Words to avoid in what a person reads: texts, docs, docstrings, comments. Part of ``make lint``.

    python3 -m tools.words           # each place with what to write instead; the exit code is 1 if there are any

Each is English, and slows a reader down all the same. Standard library only.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.paths import ROOT

READ = (".md", ".py", ".js", ".css", ".json", ".toml", ".yml")
NOT_OURS = ("bench/results/", "demo/proof.json", "tools/words.py", "tests/test_words.py")
_COUNTED = (
    "once|twice|times|lines?|files?|bars?|columns?|seconds?|images?|warps?|words?|sentences?|cases?|prompts|steps|"
    "evaluations|predictions|kernels|one|forwards?|rows?|entry|milliseconds|ms"
)
_UNIT = (
    "run|sampling run|step|size|prompt|image|picture|batch|call|line|model|process|node|case|row|card|kernel|shape|"
    "idea|file|method|language|program|dtype"
)
_VERB = r"(?! (?:was|were|has|is|had|does|gets|needs|may|can|that))"
HAN = "\u4e00-\u9fff"


class Word(NamedTuple):
    """What is not to be written, and what instead."""

    pattern: re.Pattern[str]
    instead: str


def _word(pattern: str, instead: str) -> Word:
    return Word(re.compile(pattern, re.IGNORECASE), instead)


WORDS = (
    _word(r"\banew\b", "again, or from scratch"),
    _word(r"\btold from\b", "distinguished from, or known by"),
    _word(rf"\b(?:{_COUNTED}) an? (?:{_UNIT})\b{_VERB}", "per: once per run, images per prompt"),
    _word(r"\bone \w+ more at\b|\ba forward more\b", "one more ..."),
    _word(r"\bin so many\b", "one in N"),
    _word("录制", "捕获 (a CUDA graph), 记录 (a forward)"),
    _word(rf"[{HAN}][,;:!?](?:\s|[{HAN}]|$)", "full-width punctuation: ，；：！？"),
)


class Found(NamedTuple):
    """A place, the words there, and what to write."""

    place: str
    words: str
    instead: str


def found_in(text: str, name: str = "") -> Iterator[Found]:
    """Every place of ``text`` that has one of the words, those over the end of a line included."""
    for pattern, instead in WORDS:
        for match in pattern.finditer(text):
            yield Found(f"{name}:{text.count(chr(10), 0, match.start()) + 1}", match[0].strip(), instead)


def files() -> list[Path]:
    """What git tracks, or would, and a person reads."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode().split("\0")
    named = [name for name in said if name.endswith(READ) and not name.startswith(NOT_OURS)]
    return [ROOT / name for name in named if (ROOT / name).is_file()]


def main() -> int:
    """The exit code."""
    found = [
        one for path in files()
        for one in found_in(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]  # fmt: skip
    for place, words, instead in found:
        print(f"{place}: {words!r}: write {instead}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
