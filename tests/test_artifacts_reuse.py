"""Regions through the store into empty caches of PyTorch: which change of the input's structure compiles what anew.

In processes of their own. The C++ that a graph on a CPU consists of is built by a compiler of its own and belongs to
one machine: it is not in the store, and the second process is handed it, which saves the test minutes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.paths import ROOT, project_env

CLOSE = 1e-4  # relative L2 in fp32; what is measured is 4e-6
GRAPHS = ("fxgraph", "aotautograd")  # folders of PyTorch's caches
# What a change must compile anew with a store that a UNet filled, in this order and in one process: (found, compiled).
REUSE = {
    "nothing": (3, 0),
    "another size": (0, 0),
    "another batch": (0, 0),
    "no negative prompt": (0, 0),
    "a longer prompt": (0, 0),
    "a LoRA": (0, 0),
    "a ControlNet": (0, 0),
    "a compiled ControlNet": (0, 0),  # it consists of the UNet's operations
    "a compiled VAE": (0, 1),  # it adds an operation of its own
}
ARTIFACT = ("inductor", "f" * 50, b"content")


@pytest.fixture
def obstacle():
    from anyshape.accel.artifacts import torch_cache

    return torch_cache.obstacle()


def process(base: Path, cache: Path, *changes: str) -> dict:
    """``tools.stored_regions`` with PyTorch's caches in ``cache``."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "ANYSHAPE_ARTIFACTS_MB": "64"}
    environment["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # else PyTorch tries out what the processor can, for ten seconds
    command = [sys.executable, "-m", "tools.stored_regions", str(base), *changes]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_every_change_reuses_what_does_not_depend_on_it(tmp_path, obstacle):
    if obstacle:
        pytest.skip(obstacle)
    shared = Path((os.environ | project_env())["TORCHINDUCTOR_CACHE_DIR"])
    first = process(tmp_path / "base", shared, "nothing")
    assert (first["saved"], first["loaded"], first["rejected"]) == (3, 0, [])
    assert first["dir"] == str(tmp_path / "base" / "models" / "anyshape")
    shutil.copytree(shared, tmp_path / "cache", ignore=shutil.ignore_patterns(*GRAPHS, "*.lock"))
    second = process(tmp_path / "base", tmp_path / "cache")
    assert {name: (c["hits"], c["misses"]) for name, c in second["changes"].items()} == REUSE
    assert max(change["error"] for change in second["changes"].values()) < CLOSE
    assert {shape["state"] for model in second["models"] for shape in model["shapes"]} == {"regions"}
    assert (second["loaded"], second["saved"], second["rejected"]) == (3, 1, [])


def test_what_another_pack_compiles_is_not_ours(obstacle):
    from anyshape.accel.artifacts import torch_cache
    from torch.compiler._cache import CacheArtifactManager

    if obstacle:
        pytest.skip(obstacle)
    CacheArtifactManager._ensure_cache_artifacts_registered()
    with CacheArtifactManager.with_fresh_cache():
        CacheArtifactManager.record_artifact("inductor", "theirs", b"1")
        before = torch_cache.recorded()
        CacheArtifactManager.record_artifact("inductor", "ours", b"2")
        CacheArtifactManager.record_artifact("pgo", "of Dynamo", b"3")
        assert torch_cache.recorded_since(before) == [("inductor", "ours", b"2")]


@pytest.mark.parametrize("cache", ["inductor", "aot_autograd", "autotune"])
def test_an_artefact_lands_where_pytorch_looks(tmp_path, monkeypatch, obstacle, cache):
    from anyshape.accel.artifacts import torch_cache

    if obstacle:
        pytest.skip(obstacle)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    artifact = torch_cache.Artifact(cache, "ab/cdef" if cache == "autotune" else "f" * 50, b"content")
    _, _, notes = torch_cache.pack([artifact])
    assert torch_cache.has(notes) is (cache == "autotune")  # a measurement alone is nothing to look for
    torch_cache.place([artifact])
    assert torch_cache.has(notes)
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [b"content"]


@pytest.mark.parametrize("cache", ["inductor", "aot_autograd", "autotune", "pgo"])
@pytest.mark.parametrize("key", ["../../x", "/etc/x", "a/../../x", "", "C:\\x"])
def test_keys_that_lead_elsewhere(tmp_path, monkeypatch, cache, key):
    from anyshape.accel.artifacts import torch_cache
    from anyshape.accel.errors import ArtifactError

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a" / "b" / "cache"))
    monkeypatch.setattr(torch_cache, "obstacle", str)
    artifact = torch_cache.Artifact(cache, key, b"x")
    for use in (lambda: torch_cache.place([artifact]), lambda: torch_cache.unpack(*torch_cache.pack([artifact])[1:])):
        with pytest.raises(ArtifactError, match="is no key of PyTorch's caches"):
            use()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "notes", [{}, {"artifacts": [["inductor"]]}, {"artifacts": [["inductor", "f", 1]]}, {"artifacts": 3}]
)
def test_lists_of_artefacts_that_are_none(notes):
    from anyshape.accel.artifacts import torch_cache
    from anyshape.accel.errors import Damaged

    with pytest.raises(Damaged):
        torch_cache.unpack({"0": b""}, notes)
    with pytest.raises(Damaged):
        torch_cache.unpack({}, {"artifacts": [["inductor", "f"]]})
    files = torch_cache.pack([torch_cache.Artifact(*ARTIFACT)])
    assert torch_cache.unpack(*files[1:]) == [ARTIFACT]


def test_a_torch_that_cannot(tmp_path, monkeypatch, pack):
    """As 2.6 and 2.7: regions compile as ever, and the stats say why none is kept."""
    from anyshape.accel import stats
    from anyshape.accel.artifacts import keeper
    from torch.compiler import _cache

    own = keeper.Keeper()
    monkeypatch.setattr(stats.STATS, "artifacts", stats.ArtifactStats())
    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_MB", "64")
    monkeypatch.delattr(_cache, "CacheArtifactFactory", raising=False)
    own.use([tmp_path / "store"])
    with own.recording(torch.device("cpu")):
        pass
    own.save_soon()
    own.wait()
    found = stats.snapshot()["artifacts"]
    assert found["saved"] == 0 and "does not hand out compiled regions" in found["rejected"][0]["reason"]
