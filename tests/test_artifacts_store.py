"""The store of compiled artefacts: what comes out, what is refused: damaged, changed, of other machines or users."""

import hashlib
import json
import os

import pytest

from tools.artifact_driving import CONTENT, SECRET, kept_kernel, load, new_store, own_keeper, some_machine

pytestmark = pytest.mark.skipif(os.name != "posix", reason="rights of files are POSIX ones")

NO_KEY = '{"format": 2, "kind": "kernel", "name": "x", "key": [], "files": []}'


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


def test_an_error_that_nobody_thought_of_costs_nothing(store, entry, keeper, monkeypatch):
    from anyshape.accel.artifacts import keeper as module

    def place(store, entry):
        raise FileNotFoundError(2, "not there", str(store.folder / "x y"))

    monkeypatch.setattr(module, "place", place)
    placed, (reason,) = load(keeper, store)
    assert placed == [] and "FileNotFoundError: [Errno 2] not there: 'x y'" in reason
