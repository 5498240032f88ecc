"""A partly loaded model on a real GPU, as ComfyUI without DynamicVRAM has it: never wrong, never slower.

Each case is a process of its own (``tools.low_vram_cases``), on the older ComfyUI where that is installed.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tools.paths import OLDER_COMFYUI, ROOT

pytestmark = pytest.mark.gpu

CLOSE = 2e-2  # relative L2 of one result in bfloat16
GIB = 1 << 30


def case(**options: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.low_vram_cases", json.dumps(options)]
    bed = {"COMFYUI_PATH": str(OLDER_COMFYUI)} if OLDER_COMFYUI.is_dir() else {}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | bed, capture_output=True, text=True, timeout=500)  # noqa: S603
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    print(lines[-1])
    return json.loads(lines[-1][len("RESULT ") :])


@pytest.mark.parametrize("whole", [True, False], ids=["whole blocks", "ComfyUI's choice"])
@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_partly_loaded_model(share: float, streams: int, whole: bool):
    """Blocks that are on the card run on programs."""
    found = case(share=share, streams=streams, whole=whole)
    assert found["message"] == "" and found["ahead"] == bool(streams)
    assert 0 < found["loaded"] < found["size"] and abs(found["loaded"] / found["size"] - share) < 0.15
    assert max(found["errors"]) < CLOSE
    assert (found["programs"] > 0 or not whole) and "graph" not in found["states"]
    assert any("low VRAM" in said for said in found["reasons"] + found["notes"]), found
    assert found["s"] <= 1.02 * found["eager_s"]
