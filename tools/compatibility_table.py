"""Writes the tables of models and of VAEs in docs/compatibility.md: what is recorded, and why the others are not.

    python -m tools.compatibility_table        # both ComfyUIs, some minutes; nothing of a COMFYUI_PATH

Each model of ``tools.architectures`` is recorded in its tiny configuration: see ``tools.architectures.taped``, and
``taped_vaes`` for VAEs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools import architectures
from tools.paths import OLDER_COMFYUI, ROOT, VENV_COMFYUI, comfyui_path, project_env

PAGE = ROOT / "docs" / "compatibility.md"
MODELS, VAES = "models", "VAEs"
HEAD = "| {} | ComfyUI | Recorded | Operations | Kernels |\n|---|---|---|---|---|\n"
STUDIES = {MODELS: "tools.architectures.taped", VAES: "tools.architectures.taped_vaes"}


def records(comfyui: Path, variants: int, names: Iterable[str] = (), kind: str = MODELS) -> list[dict[str, Any]]:
    """What the study of this kind finds of these models (without names: of all) in a process of its own."""
    command = [sys.executable, "-m", STUDIES[kind], "--no-run", f"--variants={variants}", *names]
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
    twins = {entry.name for entry in architectures.present(OLDER_COMFYUI) if architectures.is_twin(entry)}
    for each in found:
        also = before.get(each["name"])
        same = each["name"] in twins if also is None else reason(also) == reason(each)
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


def rows(page: str, kind: str = MODELS) -> list[str]:
    """The lines of a table in a page, without its head."""
    return page.split(_begin(kind))[1].split(_end(kind))[0].strip().splitlines()[2:]


def is_about_this() -> bool:
    """Whether this ComfyUI is one of the two that the page is about."""
    both = (VENV_COMFYUI, OLDER_COMFYUI)
    return all(each.is_dir() for each in both) and version(comfyui_path()) in map(version, both)


def outdated(found: Iterable[Mapping[str, Any]], names: Iterable[str], kind: str = MODELS) -> list[str]:
    """What the page says of this ComfyUI and is not so. names: all that it has, in order. found: of some of them."""
    this, versions = version(comfyui_path()), [version(VENV_COMFYUI), version(OLDER_COMFYUI)]
    said = [_cells(line) for line in rows(PAGE.read_text(encoding="utf-8"), kind)]
    wrong = [f"a row of {cells[1]}" for cells in said if cells[1] not in (*versions, ", ".join(versions))]
    ours = {cells[0]: cells for cells in said if this in cells[1].split(", ")}
    for each in found:
        row_of = ours.get(each["name"], ["", ""])
        figures = len(row_of) if row_of[1].startswith(this) else 3  # they are the first version's
        if row_of[2:figures] != _cells(row(each, this))[2:figures]:
            wrong.append(f"{each['name']}: {row_of[2:]}")
    here = [cells[0] for cells in said if this in cells[1].split(", ")]
    return wrong if here == list(names) else [*wrong, f"the names: {here}"]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def replaced(page: str, table: Iterable[str], kind: str = MODELS) -> str:
    """The page with these lines as one of its tables."""
    before, rest = page.split(_begin(kind))
    head = HEAD.format("Model" if kind == MODELS else "VAE")
    return f"{before}{_begin(kind)}\n{head}" + "\n".join(table) + f"\n{_end(kind)}{rest.split(_end(kind))[1]}"


def _begin(kind: str) -> str:
    return f"<!-- {kind}: made by tools/compatibility_table.py -->"


def _end(kind: str) -> str:
    return f"<!-- end of {kind} -->"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    again = [entry.name for entry in looked_at_again()]
    for kind, names in ((MODELS, again), (VAES, ())):
        table = lines(records(VENV_COMFYUI, 1, kind=kind), records(OLDER_COMFYUI, 1, names, kind))
        page = replaced(page, table, kind)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
