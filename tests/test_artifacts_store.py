"""The store of compiled artefacts: what it refuses, what it removes, and several processes on one folder."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from tools.driving import in_threads

pytestmark = pytest.mark.skipif(os.name != "posix", reason="rights of files are POSIX ones")

CONTENT = {"some_kernel.json": b"{}", "some_kernel.cubin": b"\x7fELF" + bytes(400)}
HASH = "ab" * 32
SECRET = b"s" * 64
NO_KEY = '{"format": 2, "kind": "kernel", "name": "x", "key": [], "files": []}'


@pytest.fixture
def here():
    from anyshape.accel.artifacts import compiled_for

    return compiled_for.describe(torch.device("cpu")) | {"arch": "sm_90", "triton": "3.6.0"}


@pytest.fixture
def store(tmp_path):
    from anyshape.accel.artifacts.store import Store

    return Store(tmp_path / "store", SECRET)


@pytest.fixture
def entry(store, here):
    """A kernel in the store."""
    from anyshape.accel.artifacts.keeper import keep

    assert keep(store, "kernel", HASH, here, CONTENT)
    return store.entry(store.ids()[0])


@pytest.fixture
def keeper(monkeypatch, here):
    """One of the test's own with counters of its own, on a machine like ``here``; no compiler's cache behind it."""
    from anyshape.accel import stats
    from anyshape.accel.artifacts import compiled_for, keeper

    monkeypatch.setattr(stats.STATS, "artifacts", stats.ArtifactStats())
    monkeypatch.setattr(compiled_for, "describe", lambda device: here)
    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_MB", "8")
    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_KEY", SECRET.decode())
    placed = []
    monkeypatch.setattr(keeper, "place", lambda store, entry: placed.append(store.read(entry)) or True)
    made = keeper.Keeper()
    made.placed = placed
    return made


def load(keeper, store):
    """(what reached the compilers' caches, why the rest did not)."""
    from anyshape.accel.stats import snapshot

    keeper.use(store.folder)
    keeper.watch(torch.device("cpu"), tuple)
    found = snapshot()["artifacts"]
    assert found["loaded"] == len(keeper.placed)
    return keeper.placed, [entry["reason"] for entry in found["rejected"]]


def test_what_was_put_in_comes_out(store, entry, keeper):
    assert store.read(entry) == CONTENT
    assert load(keeper, store) == ([CONTENT], [])
    assert oct(store.folder.stat().st_mode)[-3:] == "700"
    assert {oct(path.stat().st_mode)[-3:] for path in (store.folder / entry.id).iterdir()} == {"600"}


@pytest.mark.parametrize("field", ["pack", "sources", "torch", "triton", "cuda", "arch"])
def test_a_kernel_for_another_machine(store, entry, keeper, here, field):
    ours, here[field] = here[field], "another"
    placed, (reason,) = load(keeper, store)
    assert placed == [] and store.ids() == [entry.id]  # it may fit the next machine that shares the store
    assert ours in reason and "here it is another: it is compiled again" in reason


@pytest.mark.parametrize("field", ["python", "platform"])
def test_a_kernel_does_not_depend_on(store, entry, keeper, here, field):
    here[field] = "another"
    assert load(keeper, store) == ([CONTENT], [])


@pytest.mark.parametrize("field", ["python", "platform"])
def test_c_code_depends_on_python_and_the_system(here, field):
    from anyshape.accel.artifacts import compiled_for

    key = compiled_for.key_of("launcher", here)
    assert compiled_for.mismatch("launcher", key, here) == ""
    assert "another" in compiled_for.mismatch("launcher", key, here | {field: "another"})


def test_what_kernels_compute_is_known_by_their_source(tmp_path, monkeypatch):
    """Wherever the pack lies; what generates kernels counts too."""
    from anyshape.accel.artifacts import compiled_for

    monkeypatch.setattr(compiled_for, "_sources", compiled_for._sources.__wrapped__)  # it remembers
    folders = [tmp_path / place / "accel" for place in ("one", "two", "three")]
    for accel in folders:
        for file in ("kernels/norm.py", "tape/rules/first.py"):
            (accel / file).parent.mkdir(parents=True)
            (accel / file).write_text(file)
    (folders[2] / "tape" / "rules" / "first.py").write_text("another rule")
    found = []
    for accel in folders:
        monkeypatch.setattr(compiled_for, "PACK", accel.parent)
        found.append(compiled_for._sources())
    assert found[0] == found[1] != found[2]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("harm", [truncate, flip, lambda path: path.unlink()], ids=["truncated", "flipped", "gone"])
@pytest.mark.parametrize("file", ["some_kernel.cubin", "manifest.json"])
def test_damage(store, entry, keeper, harm, file):
    """It never reaches a compiler, and what is compiled in its place can be kept."""
    harm(store.folder / entry.id / file)
    placed, (reason,) = load(keeper, store)
    assert placed == [] and any(word in reason for word in ("damaged", "missing", "was not signed")), reason
    assert store.put(entry, CONTENT) and store.read(store.entry(entry.id)) == CONTENT


def edit(store, entry, secret=SECRET, **changes):
    """Its manifest with changes, signed again."""
    from dataclasses import replace

    fields = {name: value for name, value in changes.items() if name != "format"}
    text = json.loads(replace(entry, **fields).manifest(secret)) | changes
    (store.folder / entry.id / "manifest.json").write_text(json.dumps(text))


@pytest.mark.parametrize("secret", [b"", b"a guess"], ids=["no signature", "another secret"])
def test_what_this_install_did_not_sign(store, entry, keeper, secret):
    """Everything else is right: owner, rights, names, checksums. It stays until something compiled takes its place."""
    edit(store, entry, secret)
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "was not signed by this install" in reason and "--trust" in reason
    assert store.ids() == [entry.id]
    assert store.put(entry, CONTENT) and store.read(store.entry(entry.id)) == CONTENT


def test_a_signed_manifest_whose_file_was_changed(store, entry, keeper):
    """The signature holds for the files by their checksums."""
    (store.folder / entry.id / "some_kernel.cubin").write_bytes(b"\x7fELF another")
    manifest = store.folder / entry.id / "manifest.json"
    sums = json.loads(manifest.read_text())
    sums["files"]["some_kernel.cubin"] = hashlib.sha256(b"\x7fELF another").hexdigest()
    manifest.write_text(json.dumps(sums))
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "was not signed" in reason


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


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", ".hidden", "a/b", "a\\b", "", "manifest.json"])
def test_names_that_lead_elsewhere(store, entry, keeper, name):
    edit(store, entry, files=entry.files | {name: entry.files["some_kernel.json"]})
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "not one that this version of AnyShape writes" in reason


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000, '{"format": 2}', "\xff", NO_KEY])
def test_manifests_that_are_none(store, entry, keeper, text):
    (store.folder / entry.id / "manifest.json").write_text(text, "latin-1")
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "damaged" in reason


def test_an_entry_under_a_key_that_is_not_its_own(store, entry, keeper, here):
    here["arch"] = "sm_80"
    edit(store, entry, key=entry.key | {"arch": "sm_80"})  # machine code for another card, said to be for this one
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "belongs to another artefact" in reason


def test_a_newer_format_is_left_alone(store, entry, keeper):
    edit(store, entry, format=3)
    placed, (reason,) = load(keeper, store)
    assert placed == [] and store.ids() == [entry.id] and "not one that this version" in reason


@pytest.mark.parametrize("what", ["a file", "a folder", "an entry"])
def test_links(store, entry, keeper, tmp_path, what):
    own = store.folder / entry.id
    if what == "a file":
        (own / "some_kernel.cubin").rename(tmp_path / "elsewhere")
        (own / "some_kernel.cubin").symlink_to(tmp_path / "elsewhere")
    else:
        own.rename(tmp_path / "elsewhere")
        own.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "is a link" in reason


@pytest.mark.parametrize("extra", ["some_kernel.so", "x"])
def test_a_file_too_many(store, entry, keeper, extra):
    (store.folder / entry.id / extra).write_bytes(b"?")
    placed, (reason,) = load(keeper, store)
    assert placed == [] and f"{extra} is missing or not of this artefact" in reason


def test_other_peoples_files_in_the_folder(store, entry, keeper):
    (store.folder / "model.safetensors").write_bytes(b"?")
    (store.folder / "notes").mkdir()
    placed, reasons = load(keeper, store)
    assert placed == [CONTENT] and reasons == ["not an artefact of AnyShape"] * 2
    store.prune(0)
    assert sorted(store.ids()) == ["model.safetensors", "notes"]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(store, entry, keeper, mode):
    store.folder.chmod(mode)
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "may be written by others" in reason and "chmod" in reason


def test_a_file_that_others_may_write_to_is_refused(store, entry, keeper):
    (store.folder / entry.id / "some_kernel.cubin").chmod(0o666)
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "some_kernel.cubin may be written by others" in reason


def test_a_folder_of_another_user_is_refused(store, entry, keeper, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: store.folder.stat().st_uid + 1)
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "belongs to another user" in reason


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


def test_an_error_that_nobody_thought_of_costs_nothing(store, entry, keeper, monkeypatch):
    from anyshape.accel.artifacts import keeper as module

    def place(store, entry):
        raise FileNotFoundError(2, "not there", str(store.folder / "x y"))

    monkeypatch.setattr(module, "place", place)
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "FileNotFoundError: [Errno 2] not there: 'x y'" in reason


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
