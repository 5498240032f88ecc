"""Bundles: a store carried to another machine by the command line, and bundles that somebody tampered with."""

import json
import os
import stat
import subprocess
import sys
import zipfile

import pytest
import torch

from tools.artifact_driving import CONTENT, SECRET
from tools.paths import ROOT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="rights of files are POSIX ones")


@pytest.fixture
def command(capsys, monkeypatch):
    """The command line: (exit code, what it printed)."""
    from anyshape.accel.artifacts import __main__ as program

    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_KEY", SECRET.decode())

    def run(*arguments):
        code = program.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.fixture
def here():
    from anyshape.accel.artifacts import compiled_for

    return compiled_for.describe(torch.device("cpu"))


@pytest.fixture
def store(tmp_path, here):
    """Two kernels, of which one fits this machine."""
    from anyshape.accel.artifacts.keeper import keep
    from anyshape.accel.artifacts.store import Store

    made = Store(tmp_path / "store", SECRET)
    keep(made, "kernel", "a" * 64, here, CONTENT)
    keep(made, "kernel", "b" * 64, here | {"arch": "sm_80"}, CONTENT)
    return made


@pytest.fixture
def bundle(store, tmp_path, command):
    code, _ = command("export", tmp_path / "bundle.zip", "--dir", store.folder)
    assert code == 0
    return tmp_path / "bundle.zip"


def test_there_and_back(store, bundle, tmp_path, command, monkeypatch):
    """To an install with another secret: it signs what it was told to trust."""
    from anyshape.accel.artifacts.store import Store

    monkeypatch.setenv("ANYSHAPE_ARTIFACTS_KEY", "another")
    code, text = command("import", bundle, "--trust", "--dir", tmp_path / "other")
    assert (code, "2 artefacts verified, 1 fit this machine\n2 of them new" in text) == (0, True), text
    other = Store(tmp_path / "other", b"another")
    assert sorted(other.ids()) == sorted(store.ids())
    assert all(other.read(other.entry(name)) == CONTENT for name in other.ids())
    assert "0 of them new" in command("import", bundle, "--trust", "--dir", tmp_path / "other")[1]


def test_nothing_is_imported_without_trust(bundle, tmp_path, command):
    """It says what is in the bundle, and why it stops; even for one of this very install."""
    from anyshape.accel.artifacts.store import Store

    code, text = command("import", bundle, "--dir", tmp_path / "other")
    assert code == 1 and text.count("some_kernel") == 2 and text.count("fits this machine") == 1
    assert "2 artefacts verified, 1 fit this machine" in text and "import did not work: nothing was imported" in text
    assert "--trust" in text and Store(tmp_path / "other", SECRET).ids() == []


def test_an_address_of_another_kind(store, tmp_path, command):
    """Through fsspec: its file system in memory stands for an object store."""
    assert command("export", "memory://team/kernels.zip", "--dir", store.folder)[0] == 0
    code, text = command("import", "memory://team/kernels.zip", "--trust", "--dir", tmp_path / "other")
    assert code == 0 and "2 of them new" in text


def test_list_and_prune(store, command):
    (store.folder / "somebody.txt").write_text("x")
    code, text = command("list", "--dir", store.folder)
    assert code == 0 and text.count("some_kernel") == 2 and text.count("fits this machine") == 1
    assert "compiled for the architecture sm_80" in text and "somebody.txt  not usable" in text
    code, text = command("prune", "0", "--dir", store.folder)
    assert code == 0 and "2 artefacts removed" in text and store.ids() == ["somebody.txt"]


def test_a_damaged_entry_is_not_exported(store, tmp_path, command):
    (store.folder / store.ids()[0] / "some_kernel.cubin").write_bytes(b"")
    assert "1 artefacts" in command("export", tmp_path / "b.zip", "--dir", store.folder)[1]


def test_an_empty_store(tmp_path, command):
    code, text = command("export", tmp_path / "b.zip", "--dir", tmp_path / "empty")
    assert code == 1 and "nothing to export" in text and not (tmp_path / "b.zip").exists()


@pytest.mark.parametrize(
    "arguments", [["prune", "2GB"], ["import", "nowhere.zip"], ["import", "nope://x"], ["export", "/proc/x/y.zip"]]
)
def test_what_cannot_be_done_is_said(store, command, arguments):
    code, text = command(*arguments, "--dir", store.folder)
    assert code == 1 and f"{arguments[0]} did not work: " in text and "Traceback" not in text


def tamper(bundle, change, keep_sums=True):
    """The bundle with ``change(name, content)`` -> (name, content) for each file, its manifest made to fit."""
    import hashlib

    with zipfile.ZipFile(bundle) as old:
        files = dict(change(name, old.read(name)) for name in old.namelist() if name != "manifest.json")
        manifest = json.loads(old.read("manifest.json"))
    if keep_sums:
        manifest["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    with zipfile.ZipFile(bundle, "w") as new:
        for name, content in files.items():
            new.writestr(name, content)
        new.writestr("manifest.json", json.dumps(manifest))


def refused(command, bundle, folder):
    """Why the bundle is refused; nothing of it is in the store."""
    from anyshape.accel.artifacts.store import Store

    code, text = command("import", bundle, "--trust", "--dir", folder)
    assert code == 1 and Store(folder, SECRET).ids() == [] and len(list(folder.parent.iterdir())) == 3, text
    return text


def test_a_damaged_file(bundle, tmp_path, command):
    tamper(bundle, lambda name, content: (name, content + b"x" if name.endswith("cubin") else content), False)
    assert "/some_kernel.cubin is damaged: its checksum" in refused(command, bundle, tmp_path / "other")


def test_a_file_that_its_own_manifest_does_not_know(bundle, tmp_path, command):
    """Whoever tampered made the bundle's manifest fit, but not the entry's. It is the last: the first is not kept."""
    with zipfile.ZipFile(bundle) as file:
        last = [name for name in file.namelist() if name.endswith("cubin")][-1]
    tamper(bundle, lambda name, content: (name, content + b"x" if name == last else content))
    assert ": some_kernel.cubin is damaged: its checksum" in refused(command, bundle, tmp_path / "other")


def test_a_file_too_many(bundle, tmp_path, command):
    with zipfile.ZipFile(bundle, "a") as file:
        file.writestr("0" * 32 + "/x", b"x")
    assert "not those that its manifest lists" in refused(command, bundle, tmp_path / "other")


@pytest.mark.parametrize("prefix", ["../", "/", "../../", "x/../../", "C:\\", "..\\"])
def test_names_that_lead_elsewhere(bundle, tmp_path, command, prefix):
    tamper(bundle, lambda name, content: (prefix + name, content))
    assert "is not a name that a bundle may have" in refused(command, bundle, tmp_path / "other")


def test_a_link(bundle, tmp_path, command):
    with zipfile.ZipFile(bundle) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(bundle, "w") as file:
        for name, content in contents.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFLNK | 0o777 if name.endswith("cubin") else stat.S_IFREG | 0o600) << 16
            file.writestr(info, content)
    assert "is a link" in refused(command, bundle, tmp_path / "other")


@pytest.mark.parametrize("harm", ["truncated", "not a zip", "no manifest"])
def test_no_bundle(bundle, tmp_path, command, harm):
    if harm == "no manifest":
        with zipfile.ZipFile(bundle, "w") as file:
            file.writestr("readme.txt", b"hello")
    else:
        bundle.write_bytes(bundle.read_bytes()[:-200] if harm == "truncated" else b"hello")
    assert "not a bundle of AnyShape" in refused(command, bundle, tmp_path / "other")


NO_COMFYUI = """
import runpy, sys
sys.argv[0] = "python -m accel.artifacts"
try:
    runpy.run_module("accel.artifacts", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert ended.code == 0 and "comfy" not in sys.modules
"""


def test_from_the_packs_folder_without_comfyui(tmp_path):
    """As a user starts it, in a process of its own, with the store that ComfyUI would use."""
    environment = os.environ | {"ANYSHAPE_ARTIFACTS_DIR": str(tmp_path / "mine")}
    ended = subprocess.run(
        [sys.executable, "-c", NO_COMFYUI, "list"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0 and f"0.0 MB in {tmp_path / 'mine'}" in ended.stdout, ended.stderr
