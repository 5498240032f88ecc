"""Kernels on disk on a real GPU: processes with empty caches, and a store that the first one filled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.paths import ROOT

pytestmark = pytest.mark.gpu

TOLERANCE = {"unet": 5e-3, "tape": 2.5e-2, "vae": 2.5e-2}  # as in test_gpu.py and test_gpu_vae.py


def start(caches: Path, store: Path) -> dict:
    """``tools.restarted`` in a process with Triton's cache in ``caches`` and no C compiler; its results are eager's."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(caches), "ANYSHAPE_ARTIFACTS_DIR": str(store)}
    environment |= {"ANYSHAPE_ARTIFACTS_MB": "256", "CC": "/no/compiler"}
    command = [sys.executable, "-m", "tools.restarted"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    print({name: value for name, value in found.items() if name != "models"})
    for name, tolerance in TOLERANCE.items():
        assert found[name] < tolerance
    states = {shape["state"] for model in found["models"] for shape in model["shapes"]}
    assert states and "eager" not in states, found["fallbacks"]
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store that a process with an empty cache filled, and what that said."""
    folder = tmp_path_factory.mktemp("artifacts")
    return folder / "store", start(folder / "cache", folder / "store")


@pytest.fixture
def store(filled, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(filled[0], tmp_path / "store"))


def test_a_first_start_compiles_and_saves(filled):
    _, found = filled
    assert found["compiled"] > 10 and found["loaded"] == 0 and found["rejected"] == []
    assert found["saved"] > found["compiled"]  # and what was measured


def test_a_restart_compiles_nothing(store, tmp_path):
    """An empty cache, the same store."""
    found = start(tmp_path / "cache", store)
    assert (found["compiled"], found["saved"], found["rejected"]) == (0, 0, [])
    assert found["loaded"] == len(list(store.iterdir())) and found["hits"] > 10


def test_filled_caches_need_no_store(store, tmp_path):
    """But for what was measured, which is nowhere else."""
    start(tmp_path / "cache", store)
    found = start(tmp_path / "cache", store)
    measured = len(list(store.glob("*/times.json")))
    assert (found["compiled"], found["loaded"], found["saved"], found["rejected"]) == (0, measured, 0, [])


def test_a_damaged_store(store, tmp_path):
    """Half of the machine code cut short: rejected, compiled again, and right."""
    damaged = sorted(store.glob("*/*.cubin"))[::2]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-100])
    found = start(tmp_path / "cache", store)
    assert len(found["rejected"]) == len(damaged) and found["compiled"] > 0 and found["loaded"] > 0
    assert found["saved"] == len(damaged)
