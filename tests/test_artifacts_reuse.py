"""What the store keeps of PyTorch's caches, and how it is put there."""

import pytest
import torch

CLOSE = 1e-4  # relative L2 in fp32; what is measured is 4e-6
GRAPHS = ("fxgraph", "aotautograd")  # folders of PyTorch's caches
ARTIFACT = ("inductor", "f" * 50, b"content")


@pytest.fixture
def obstacle():
    from anyshape.accel.artifacts import torch_cache

    return torch_cache.obstacle()


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
