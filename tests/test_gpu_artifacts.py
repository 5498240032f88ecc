"""Artefacts on disk on a real GPU: processes with empty compiler caches, and a store that the first one filled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.oracles import FUSED
from tools.paths import ROOT

pytestmark = pytest.mark.gpu

TOLERANCE = {"unet": 5e-3, "vae": 2.5e-2}  # as in test_gpu.py and test_gpu_vae.py


def start(folder: Path, base: Path) -> dict:
    """``tools.restarted`` in a process with its compilers' caches in ``folder``; its results are eager's.

    base: ComfyUI's base directory, whose models/anyshape is the store.
    """
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [sys.executable, "-m", "tools.restarted", str(base)]
    environment = os.environ | caches | {"ANYSHAPE_ARTIFACTS_MB": "256"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    print({name: value for name, value in found.items() if name != "models"})
    for name, tolerance in TOLERANCE.items():
        assert found.get(name, 0.0) < tolerance
    states = {shape["state"] for model in found["models"] for shape in model["shapes"]}
    assert states <= {"graph", FUSED}, found["fallbacks"]
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A base directory with a store that a process with empty caches filled, and what that said."""
    folder = tmp_path_factory.mktemp("artifacts")
    return folder / "base", start(folder / "caches", folder / "base")


@pytest.fixture
def base(filled, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(filled[0], tmp_path / "base"))


def store_of(base: Path) -> Path:
    return base / "models" / "anyshape"


def test_a_first_start_compiles_and_saves(filled):
    _, found = filled
    assert found["compiled"] > 10 and found["loaded"] == 0 and found["rejected"] == []
    assert found["saved"] > found["compiled"]  # and the code that starts them


def test_a_restart_compiles_nothing(base, tmp_path):
    """Empty caches of the compilers, the same store: no kernel, and nothing for the C compiler."""
    found = start(tmp_path / "caches", base)
    assert (found["compiled"], found["saved"], found["rejected"]) == (0, 0, [])
    assert found["loaded"] == len(list(store_of(base).iterdir())) and found["hits"] > 10


def test_filled_caches_need_no_store(base, tmp_path):
    start(tmp_path / "caches", base)
    found = start(tmp_path / "caches", base)
    assert (found["compiled"], found["loaded"], found["saved"], found["rejected"]) == (0, 0, 0, [])


def test_a_damaged_store(base, tmp_path):
    """Half of the machine code cut short: rejected, compiled anew, and right."""
    damaged = sorted(store_of(base).glob("*/*.cubin"))[::2] + sorted(store_of(base).glob("*/*.so"))[::2]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-100])
    found = start(tmp_path / "caches", base)
    assert len(found["rejected"]) == len(damaged) and found["compiled"] > 0 and found["loaded"] > 0
    assert found["saved"] == len(damaged)
