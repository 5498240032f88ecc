"""Tables, paragraphs and sections in Markdown, for what is written from bench/results."""

import textwrap
from collections.abc import Iterable
from typing import Any

WIDTH = 125  # characters a line of English prose


def size(row: dict[str, Any]) -> str:
    """Image pixels, and the frames of a video."""
    frames = row.get("frames", 1)
    return f"{row['width']}x{row['height']}" + (f"x{frames}" if frames > 1 else "")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = ["".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def said(words: dict[str, Any], sentences: list[str], wrap: bool) -> str:
    """A paragraph; Chinese stays on one line, where a line break would show as a space."""
    text = words["sentences"].join(filter(None, sentences))
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) if wrap else text


def conditions(result: dict[str, Any]) -> dict[str, str]:
    """What a reader must know of the machine."""
    gpu = result["machine"].split(",")[0]
    return {"gpu": gpu, "allocator": result["allocator"], **result["versions"]}


def headed(title: str, result: dict[str, Any], *parts: str) -> str:
    """A section: its title, what was run and when, and ``parts``."""
    on = "{gpu}, torch {torch}, Triton {triton}, ComfyUI {comfyui}".format(**conditions(result))
    return "\n\n".join([f"### {title}", f"`{result['command']}`, {result['date']}, {on}.", *filter(None, parts)])
