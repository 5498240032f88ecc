"""A case that needs a process to itself, because how ComfyUI works is settled when it is imported.

The process runs a module with the case's arguments, and prints what it found as one line of JSON, ``tell``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tools.paths import ROOT

MARK = "RESULT "  # the line begins with
LONGEST = 500  # seconds


def tell(found: dict[str, Any]) -> None:
    """In the process: what the case found."""
    print(MARK + json.dumps(found), flush=True)  # noqa: T201


def result_of(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``python -m module arguments`` tells. env: besides this process's own. Raises RuntimeError, with what it
    said, if it told nothing.
    """
    command = [sys.executable, "-m", module, *arguments]
    around = os.environ | dict(env or {})
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=LONGEST)  # noqa: S603
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(lines[-1].removeprefix(MARK))
