"""Writes the table of models in docs/compatibility.md: what is recorded, and why the others are not.

    python -m tools.compatibility_table        # both ComfyUIs, a minute; nothing of a COMFYUI_PATH

Each model of ``tools.architectures`` is recorded in its tiny configuration: see ``tools.architectures.taped``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools import architectures
from tools.paths import OLDER_COMFYUI, ROOT, VENV_COMFYUI, project_env

PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- models: made by tools/compatibility_table.py -->", "<!-- end of models -->"
HEAD = "| Model | ComfyUI | Recorded | Operations | Kernels |\n|---|---|---|---|---|\n"


def records(comfyui: Path, variants: int, names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """What ``tools.architectures.taped`` finds of these models (without names: of all) in a process of its own."""
    command = [sys.executable, "-m", "tools.architectures.taped", "--no-run", f"--variants={variants}", *names]
    environment = os.environ | project_env() | {"COMFYUI_PATH": str(comfyui), "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr[-4000:])
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def looked_at_again() -> list[architectures.Architecture]:
    """One of each kind of model that the older ComfyUI has: those that are built like another are as that one there."""
    return [entry for entry in architectures.present(OLDER_COMFYUI) if not architectures.is_twin(entry)]


def lines(found: Iterable[Mapping[str, Any]], older: Iterable[Mapping[str, Any]]) -> list[str]:
    """The table: figures are those of the usual ComfyUI; the older one's where it comes to another result."""
    main, second = version(VENV_COMFYUI), version(OLDER_COMFYUI)
    before, result = {each["name"]: each for each in older}, []
    there = {entry.name for entry in architectures.present(OLDER_COMFYUI)}
    for each in found:
        also = before.get(each["name"])
        same = each["name"] in there and (also is None or reason(also) == reason(each))
        result.append(row(each, f"{main}, {second}" if same else main))
        if also is not None and not same:
            result.append(row(also, second))
    return result


def version(comfyui: Path) -> str:
    """As people write it."""
    return ".".join(map(str, architectures.version(comfyui)))


def reason(found: Mapping[str, Any]) -> str:
    """Why it is not recorded, without the place in ComfyUI's code; "" if it is."""
    return found["refusal"].rsplit(" (", 1)[0]


def row(found: Mapping[str, Any], versions: str) -> str:
    """One line of the table."""
    if found["refusal"]:
        return f"| {found['name']} | {versions} | no: {reason(found)} | | |"
    return f"| {found['name']} | {versions} | yes | {found['operations']} | {found['kernels']} |"


def rows(page: str) -> list[str]:
    """The lines of the table in a page, without its head."""
    return page.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]


def replaced(page: str, table: Iterable[str]) -> str:
    """The page with these lines as its table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{HEAD}" + "\n".join(table) + f"\n{END}{rest.split(END)[1]}"


def main() -> None:
    again = [entry.name for entry in looked_at_again()]
    table = lines(records(VENV_COMFYUI, 1), records(OLDER_COMFYUI, 1, again))
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
