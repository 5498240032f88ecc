"""Writes the tables of models and of VAEs in docs/compatibility.md: what is recorded, and why the others are not.

    python -m tools.compatibility_table        # both ComfyUIs, some minutes

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

from tools.architectures import TABLE, autoencoders
from tools.paths import NEWER_COMFYUI, ROOT, comfyui_path, project_env

PAGE = ROOT / "docs" / "compatibility.md"
MODELS, VAES = "models", "VAEs"
HEAD = "| {} | ComfyUI | Recorded | Operations | Kernels |\n|---|---|---|---|---|\n"
STUDIES = {MODELS: "tools.architectures.taped", VAES: "tools.architectures.taped_vaes"}
VERSIONS = {"usual": "0.3.75, 0.30.0", "newer": "0.30.0"}


def records(comfyui: Path, variants: int, names: Iterable[str] = (), kind: str = MODELS) -> list[dict[str, Any]]:
    """What the study of this kind finds of these models (without names: of all) in a process of its own."""
    command = [sys.executable, "-m", STUDIES[kind], "--no-run", f"--variants={variants}", *names]
    environment = os.environ | project_env() | {"COMFYUI_PATH": str(comfyui), "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr[-4000:])
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def newer_names(known: Iterable[str], table: Iterable[str] = TABLE) -> list[str]:
    """The models of the table that are not ``known`` in the usual ComfyUI."""
    known = set(known)
    return [name for name in table if name not in known]


def row(found: Mapping[str, Any], version: str) -> str:
    """One line of the table."""
    if found["refusal"]:
        return f"| {found['name']} | {VERSIONS[version]} | no: {found['refusal'].rsplit(' (', 1)[0]} | | |"
    return f"| {found['name']} | {VERSIONS[version]} | yes | {found['operations']} | {found['kernels']} |"


def rows(page: str, kind: str = MODELS) -> list[str]:
    """The lines of a table in a page, without its head."""
    return page.split(_begin(kind))[1].split(_end(kind))[0].strip().splitlines()[2:]


def replaced(page: str, lines: Iterable[str], kind: str = MODELS) -> str:
    """The page with these lines as one of its tables."""
    before, rest = page.split(_begin(kind))
    head = HEAD.format("Model" if kind == MODELS else "VAE")
    return f"{before}{_begin(kind)}\n{head}" + "\n".join(lines) + f"\n{_end(kind)}{rest.split(_end(kind))[1]}"


def _begin(kind: str) -> str:
    return f"<!-- {kind}: made by tools/compatibility_table.py -->"


def _end(kind: str) -> str:
    return f"<!-- end of {kind} -->"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for kind, table in ((MODELS, TABLE), (VAES, autoencoders.TABLE)):
        usual = records(comfyui_path(), 1, kind=kind)
        names = newer_names(
            (each["name"].rpartition(", ")[0] if kind == VAES else each["name"] for each in usual), table
        )
        newer = records(NEWER_COMFYUI, 1, names, kind)
        page = replaced(page, [row(found, "usual") for found in usual] + [row(found, "newer") for found in newer], kind)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
