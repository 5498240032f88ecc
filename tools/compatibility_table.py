"""Writes the table of models in docs/compatibility.md: what is recorded, and why the others are not.

    python -m tools.compatibility_table        # both ComfyUIs, a minute

Each model of ``tools.architectures`` is recorded in its tiny configuration: see ``tools.architectures.taped``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.architectures import TABLE
from tools.paths import NEWER_COMFYUI, ROOT, comfyui_path, project_env

PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- models: made by tools/compatibility_table.py -->", "<!-- end of models -->"
HEAD = "| Model | ComfyUI | Recorded | Operations | Kernels |\n|---|---|---|---|---|\n"
VERSIONS = {"usual": "0.3.75, 0.30.0", "newer": "0.30.0"}


def records(comfyui: Path, variants: int, names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """What ``tools.architectures.taped`` finds of these models (without names: of all) in a process of its own."""
    command = [sys.executable, "-m", "tools.architectures.taped", "--no-run", f"--variants={variants}", *names]
    environment = os.environ | project_env() | {"COMFYUI_PATH": str(comfyui), "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr[-4000:])
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def newer_names(known: Iterable[str]) -> list[str]:
    """The models of the table that are not ``known`` in the usual ComfyUI."""
    known = set(known)
    return [name for name in TABLE if name not in known]


def row(found: Mapping[str, Any], version: str) -> str:
    """One line of the table."""
    if found["refusal"]:
        return f"| {found['name']} | {VERSIONS[version]} | no: {found['refusal'].rsplit(' (', 1)[0]} | | |"
    return f"| {found['name']} | {VERSIONS[version]} | yes | {found['operations']} | {found['kernels']} |"


def rows(page: str) -> list[str]:
    """The lines of the table in a page, without its head."""
    return page.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]


def replaced(page: str, lines: Iterable[str]) -> str:
    """The page with these lines as its table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{HEAD}" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}"


def main() -> None:
    usual = records(comfyui_path(), 1)
    newer = records(NEWER_COMFYUI, 1, newer_names(each["name"] for each in usual))
    lines = [row(found, "usual") for found in usual] + [row(found, "newer") for found in newer]
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
