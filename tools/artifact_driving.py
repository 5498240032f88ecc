"""What the tests of the store of compiled artefacts share: a kernel in a store, and a keeper of a test's own."""

from pathlib import Path
from typing import Any

import torch

CONTENT = {"some_kernel.json": b"{}", "some_kernel.cubin": b"\x7fELF" + bytes(400)}
HASH = "ab" * 32
SECRET = b"s" * 64


def some_machine() -> dict[str, str]:
    """What kernels depend on, as on a machine with a GPU."""
    from anyshape.accel.artifacts import compiled_for

    return compiled_for.describe(torch.device("cpu")) | {"arch": "sm_90", "triton": "3.6.0"}


def new_store(folder: Path) -> Any:
    """A store in this folder, with the tests' secret."""
    from anyshape.accel.artifacts.store import Store

    return Store(folder, SECRET)


def kept_kernel(store: Any, here: dict[str, str]) -> Any:
    """The entry of a kernel that was put in the store."""
    from anyshape.accel.artifacts.keeper import keep

    assert keep(store, "kernel", HASH, here, CONTENT)
    return store.entry(store.ids()[0])


def own_keeper(monkeypatch: Any, here: dict[str, str]) -> Any:
    """One of the test's own with counters of its own, on a machine like ``here``; no compiler's cache behind it.

    What it would have placed there is in ``placed``.
    """
    from anyshape.accel import stats
    from anyshape.accel.artifacts import compiled_for, keeper

    monkeypatch.setattr(stats.STATS, "artifacts", stats.ArtifactStats())
    monkeypatch.setattr(compiled_for, "describe", lambda device: here)
    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_MB", "8")
    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_KEY", SECRET.decode())
    placed: list[dict[str, bytes]] = []
    monkeypatch.setattr(keeper, "place", lambda store, entry: placed.append(store.read(entry)) or True)
    made = keeper.Keeper()
    made.placed = placed
    return made


def load(keeper: Any, store: Any) -> tuple[list[dict[str, bytes]], list[str]]:
    """(what reached the compilers' caches, why the rest did not)."""
    from anyshape.accel.stats import snapshot

    keeper.use(store.folder)
    keeper.watch(torch.device("cpu"), tuple)
    found = snapshot()["artifacts"]
    assert found["loaded"] == len(keeper.placed)
    return keeper.placed, [entry["reason"] for entry in found["rejected"]]
