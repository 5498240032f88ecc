"""The store of compiled artefacts: where it lies, how large it grows, what several processes keep in it, its report."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from tools.artifact_driving import CONTENT, SECRET, kept_kernel, load, new_store, own_keeper, some_machine
from tools.driving import in_threads

pytestmark = pytest.mark.skipif(os.name != "posix", reason="rights of files are POSIX ones")


@pytest.fixture
def here():
    return some_machine()


@pytest.fixture
def store(tmp_path):
    return new_store(tmp_path / "store")


@pytest.fixture
def entry(store, here):
    """A kernel in the store."""
    return kept_kernel(store, here)


@pytest.fixture
def keeper(monkeypatch, here):
    return own_keeper(monkeypatch, here)


def test_the_secret(tmp_path, monkeypatch):
    """Made once, for this user alone; one that others may read is refused, and so is half of one."""
    from anyshape.accel.artifacts import places
    from anyshape.accel.errors import ArtifactError

    monkeypatch.delenv("ANYSHAPE_ARTIFACTS_KEY", raising=False)
    monkeypatch.setattr(places, "_secret_file", lambda: tmp_path / "config" / "secret")
    made = places.secret()
    assert len(made) == 64 and made == places.secret()
    (path,) = (tmp_path / "config").iterdir()
    assert oct(path.stat().st_mode)[-3:] == "600"
    path.chmod(0o640)
    with pytest.raises(ArtifactError, match="may be read by others"):
        places.secret()
    path.chmod(0o600)
    path.write_bytes(made[:10])
    with pytest.raises(ArtifactError, match="cut short"):
        places.secret()


@pytest.mark.skipif(sys.platform == "darwin", reason="another rule there")
def test_the_store_lies_in_the_users_cache(monkeypatch, tmp_path):
    from anyshape.accel.artifacts import places

    for name in ("ANYSHAPE_ARTIFACTS_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places.store() == tmp_path / ".cache" / "anyshape" / "kernels"
    assert places._secret_file() == tmp_path / ".config" / "anyshape" / "secret"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # by the rule no place at all
    assert places.store() == tmp_path / ".cache" / "anyshape" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert places.store() == tmp_path / "xdg" / "anyshape" / "kernels"
    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_DIR", str(tmp_path / "named"))
    assert places.store() == tmp_path / "named"


def test_no_model_folder_of_comfyui_is_the_store(pack):
    """Downloaders and upload nodes write into every folder that ``folder_paths`` knows."""
    import folder_paths
    from anyshape.accel.artifacts import places

    known = [Path(path).resolve() for paths, _ in folder_paths.folder_names_and_paths.values() for path in paths]
    known += [Path(folder_paths.get_user_directory()), Path(folder_paths.get_input_directory())]
    store = places.store().resolve()
    assert len(known) > 10 and "anyshape" not in folder_paths.folder_names_and_paths
    assert not any(store.is_relative_to(path.resolve()) for path in known)


def test_a_folder_that_cannot_be_made(tmp_path, keeper):
    """The reason names it, without the way to it: a browser elsewhere may read this."""
    from anyshape.accel.stats import snapshot

    (tmp_path / "file").write_bytes(b"")
    keeper.use(tmp_path / "file" / "anyshape")
    found = snapshot()["artifacts"]
    assert found["dir"] == "" and found["rejected"][0]["file"] == "anyshape" and str(tmp_path) not in json.dumps(found)


@pytest.mark.parametrize("text, reasons", [("0", 0), ("2 GB", 1), ("-1", 1)])
def test_no_store(tmp_path, keeper, monkeypatch, text, reasons):
    from anyshape.accel.stats import snapshot

    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_MB", text)
    keeper.use(tmp_path / "store")
    keeper.watch(torch.device("cpu"), tuple)
    keeper.save_soon()
    found = snapshot()["artifacts"]
    assert found["dir"] == "" and len(found["rejected"]) == reasons and not (tmp_path / "store").exists()
    assert all("ANYSHAPE_ARTIFACTS_MB" in entry["reason"] for entry in found["rejected"])


def fill(store, here, count, size=1000):
    """Artefacts of ``size`` bytes, used a second after one another, the first longest ago."""
    from anyshape.accel.artifacts.keeper import keep

    for index in range(count):
        before = set(store.ids())
        keep(store, "kernel", f"{index:064x}", here, {"k.json": bytes(size)})
        (new,) = set(store.ids()) - before
        os.utime(store.folder / new / "manifest.json", (time.time(), time.time() - 1000 + index))
    return store.ids()


def test_the_least_recently_used_go(store, here):
    from anyshape.accel.artifacts.store import size_of

    ids = fill(store, here, 4)
    assert store.touch(store.entry(ids[0]))
    limit = sum(size_of(store.folder / name) for name in (ids[0], ids[3]))
    assert store.prune(limit) == 2
    assert store.ids() == [ids[3], ids[0]]
    assert store.prune(limit) == 0


def test_saving_keeps_to_the_limit(store, here, keeper, monkeypatch):
    """One more than there is room for: the oldest goes."""
    first = fill(store, here, 3, size=300_000)[0]
    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_MB", "1")
    keeper.use(store.folder)
    keeper.keep_measured("name", torch.device("cpu"), "#" * 300_000)
    assert len(store.ids()) == 3 and first not in store.ids()


def test_what_a_killed_process_left(store, here):
    fill(store, here, 1)
    old, new = store.folder / ".tmp-1-a", store.folder / ".tmp-2-b"
    for path in (old, new):
        path.mkdir()
        (path / "x").write_bytes(b"x")
    os.utime(old, (0, 0))
    assert store.prune(1 << 20) == 0 and not old.exists() and new.exists()
    assert len(store.ids()) == 1


def test_many_writers_at_once(tmp_path, here):
    """Of the same entries: each is written once, whole, and nothing unfinished stays."""
    from anyshape.accel.artifacts.keeper import keep
    from anyshape.accel.artifacts.store import Store

    new = []

    def work(store):
        for index in range(12):
            new.append(keep(store, "kernel", f"{index:064x}", here, CONTENT))
            store.read(store.entry(store.ids()[-1]))

    in_threads(work, [Store(tmp_path / "store", SECRET) for _ in range(6)])
    store = Store(tmp_path / "store", SECRET)
    assert sum(new) == 12 == len(list(store.folder.iterdir()))
    assert all(store.read(store.entry(name)) == CONTENT for name in store.ids())


def test_the_report_says_where_and_why(store, entry, keeper, here, pack):
    from anyshape.accel.stats import snapshot
    from anyshape.nodes.report import report

    here["arch"] = "sm_80"
    load(keeper, store)
    text = report(snapshot())
    assert "on disk, in the folder store: 0 loaded, 0 saved" in text and str(store.folder.parent) not in text
    assert "not used, 1 times: compiled for the architecture sm_90, here it is sm_80" in text


def test_what_was_measured(store, keeper, here):
    """The first of two processes decides for both, and for this card's kind and torch alone."""
    from anyshape.accel.artifacts.keeper import Keeper

    device = torch.device("cpu")
    assert keeper.measured("x", device) is None and keeper.keep_measured("x", device, "0") == "0"  # no store yet
    for each in (keeper, other := Keeper()):
        each.use(store.folder)
        assert each.measured("x", device) is None
    assert keeper.keep_measured("x", device, "1") == "1" == other.keep_measured("x", device, "2")
    assert (other.measured("x", device), other.measured("y", device)) == ("1", None)
    here["arch"] = "sm_80"
    assert other.measured("x", device) is None


def test_collections_that_grow(store, keeper, monkeypatch):
    """Each is asked again at every save; one that fails harms no other."""
    keeper.use(store.folder)
    asked, device = [], torch.device("cpu")
    kernels = lambda: asked.append("one") or ()  # noqa: E731

    def fails():
        raise ZeroDivisionError("x")

    for watched in (fails, kernels, kernels):
        keeper.watch(device, watched)
    for _ in range(2):
        keeper.save_soon()
        keeper.wait()
    assert asked == ["one", "one"]


@pytest.mark.parametrize(
    "text, shown",
    [
        ("[Errno 13] Permission denied: '/home/u/my files/x.py'", "[Errno 13] Permission denied: 'x.py'"),
        (r"no such file: 'C:\\Users\\bob smith\\x.py'", "no such file: 'x.py'"),
        ("cannot import name x (/usr/lib/y.py:12)", "cannot import name x (y.py:12)"),
        ("https://a.b/c/d, fp16/bf16 and/or 1/2/3", "https://a.b/c/d, fp16/bf16 and/or 1/2/3"),
    ],
)
def test_reasons_show_no_folders(text, shown):
    """``GET /anyshape/stats`` answers every client of a server that listens outside."""
    from anyshape.accel.attempt import named

    assert named(ValueError(text)) == f"ValueError: {shown}"
