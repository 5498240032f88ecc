"""Our regions in PyTorch's caches: what a compilation recorded there, and how it is put there.

PyTorch records every entry of its caches that a process makes or finds, for ``torch.compiler.save_cache_artifacts``,
which gives those of the whole process, other packs' among them. What a region's compilation added to that record is
ours. An entry is bytes under a key that names the graph, the versions and the GPU; PyTorch unpickles them when that
graph is compiled.
"""

import os
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch

from ..errors import ArtifactError, Damaged, Unavailable

CACHES = ("inductor", "aot_autograd", "autotune")  # not those of Dynamo, whose entries are not keyed by the graph


class Artifact(NamedTuple):
    """An entry of one of PyTorch's caches."""

    cache: str  # of CACHES
    key: str
    content: bytes


def obstacle() -> str:
    """Why this torch cannot do it; "" if it can."""
    try:
        manager, factory = _api()
    except ImportError:
        manager = factory = None
    used = ("_seen_artifacts", "populate_caches", "_ensure_cache_artifacts_registered")
    if all(hasattr(manager, name) for name in used) and hasattr(factory, "create"):
        return ""
    return (
        f"torch {torch.__version__} does not hand out compiled regions one by one (2.8 to 2.15 do): they stay in its "
        "own cache on this machine only"
    )


def _api() -> tuple[Any, Any]:
    from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

    return CacheArtifactManager, CacheArtifactFactory


def recorded() -> frozenset[Any]:
    """What this process has made or found in PyTorch's caches so far. Raises ``Unavailable``."""
    if reason := obstacle():
        raise Unavailable(reason)
    return frozenset(_api()[0]._seen_artifacts)


def recorded_since(before: frozenset[Any]) -> list[Artifact]:
    """What has come to that since."""
    new = [artifact for artifact in list(_api()[0]._seen_artifacts) if artifact not in before]
    return [Artifact(a.type(), a.key, a.content) for a in new if a.type() in CACHES]


def has(notes: dict[str, Any]) -> bool:
    """Whether PyTorch would find this entry of the store. Raises ``ArtifactError``."""
    if reason := obstacle():
        raise Unavailable(reason)
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache

    owners = {"inductor": FxGraphCache, "aot_autograd": AOTAutogradCache}
    folders = [owners[cache]._get_tmp_dir_for_key(key) for cache, key in _keys(notes) if cache in owners]
    return all(os.path.isdir(folder) and os.listdir(folder) for folder in folders)


def place(artifacts: Iterable[Artifact]) -> None:
    """Puts them into PyTorch's caches. Raises ``ArtifactError``."""
    if reason := obstacle():
        raise Unavailable(reason)
    manager, factory = _api()
    manager._ensure_cache_artifacts_registered()
    for cache, key, content in artifacts:
        _check(cache, key)
        manager.populate_caches({cache: [factory.create(cache, key, content)]})


def _check(cache: str, key: str) -> None:
    """A key becomes part of a path."""
    parts = PurePosixPath(key).parts
    if cache not in CACHES or not parts or parts[0].startswith("/") or ".." in parts or "\\" in key or ":" in key:
        raise ArtifactError(f"{cache} {key} is no key of PyTorch's caches")


def pack(artifacts: list[Artifact]) -> tuple[str, dict[str, bytes], dict[str, Any]]:
    """(name, files, notes) of an entry of the store."""
    files = {str(index): artifact.content for index, artifact in enumerate(artifacts)}
    notes = {"artifacts": [[artifact.cache, artifact.key] for artifact in artifacts]}
    return " ".join(sorted(f"{artifact.cache}/{artifact.key}" for artifact in artifacts)), files, notes


def unpack(contents: dict[str, bytes], notes: dict[str, Any]) -> list[Artifact]:
    """The artefacts of an entry. Raises ``ArtifactError``."""
    keys = _keys(notes)
    if contents.keys() != set(map(str, range(len(keys)))):
        raise Damaged("its list of artefacts is damaged")
    return [Artifact(cache, key, contents[str(index)]) for index, (cache, key) in enumerate(keys)]


def _keys(notes: dict[str, Any]) -> list[tuple[str, str]]:
    try:
        keys = [(str(cache), str(key)) for cache, key in notes["artifacts"]]
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged("its list of artefacts is damaged") from error
    for cache, key in keys:
        _check(cache, key)
    return keys
