"""Real kernels through the store into an empty Triton cache, in processes of their own; no GPU is needed to compile."""

import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.paths import ROOT

triton = pytest.importorskip("triton")
SOURCE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"launch", answer, METH_NOARGS, 0}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", 0, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


class Process:
    """``tools.stored_kernels``, with secrets in ``config``."""

    def __init__(self, config, seed):
        environment = os.environ | {"XDG_CONFIG_HOME": str(config), "ANYSHAPE_ARTIFACTS_MB": "64"}
        del environment["TRITON_INTERPRET"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.stored_kernels"], cwd=ROOT, env=environment | {"PYTHONHASHSEED": seed},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def order(self, cache, store, **more):
        self.process.stdin.write(json.dumps({"cache": str(cache), "store": str(store)} | more) + "\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def __call__(self, *order, **more):
        self.order(*order, **more)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0


pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ or sys.platform in ("darwin", "win32"),
    reason="for machines without a GPU, and Linux's places",
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """(a store that two processes filled at once, what they said, a process that never compiled anything)."""
    folder = tmp_path_factory.mktemp("artifacts")
    one, two, later = (Process(folder / "config", seed) for seed in "123")
    one.order(folder / "one", folder / "store")
    two.order(folder / "two", folder / "store")
    answers = [one.answer(), two.answer()]
    one.end(), two.end()
    yield folder / "store", answers, later
    later.end()


@pytest.fixture
def store(filled, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(filled[0], tmp_path / "store"))


@pytest.fixture
def later(filled):
    return filled[2]


def test_two_processes_at_once_save_everything_once(filled):
    """Four kernels, of which two are generated; with a secret that both made at once."""
    store, (one, two), _ = filled
    assert one["saved"] + two["saved"] == 4 == len(list(store.iterdir()))
    assert (one["compiled"], two["compiled"]) == (4, 4)
    assert [one["rejected"], two["rejected"], one["dir"]] == [[], [], "store"]
    assert {path.suffix for path in store.glob("*/*")} == {".cubin", ".json"}


def test_nothing_is_compiled_with_a_store_and_an_empty_cache(store, tmp_path, later):
    """Nor after a restart: the places in the lists of files that Triton keeps are those of the new cache."""
    found = later(tmp_path / "cache", store)
    assert (found["compiled"], found["hits"]) == (0, 4)
    assert (found["loaded"], found["saved"], found["rejected"]) == (4, 0, [])
    shutil.rmtree(store)
    found = later(tmp_path / "cache", store)
    assert (found["compiled"], found["hits"], found["loaded"], found["saved"]) == (0, 4, 0, 4)


def test_another_card(store, tmp_path, later):
    found = later(tmp_path / "cache", store, capability=80)
    assert (found["compiled"], found["loaded"], found["saved"]) == (4, 0, 4)
    reasons = {entry["reason"] for entry in found["rejected"]}
    assert reasons == {"compiled for the architecture sm_90, here it is sm_80: it is compiled again"}
    assert len(list(store.iterdir())) == 8


def test_a_damaged_store_is_compiled_again_and_mended(store, tmp_path, later):
    cubin, listed = next(store.glob("*/geglu_kernel.cubin")), next(store.glob("*/upsample_kernel.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    (listed.parent / "manifest.json").write_text("{")
    found = later(tmp_path / "cache", store)
    assert (found["compiled"], found["loaded"], found["saved"]) == (2, 2, 2)
    assert len(found["rejected"]) == 2
    found = later(tmp_path / "another", store)
    assert (found["compiled"], found["loaded"], found["rejected"]) == (0, 4, [])


def test_a_store_of_another_install(store, tmp_path, later):
    """The same folder, another secret: nothing of it is used, and what is compiled takes its place."""
    found = later(tmp_path / "cache", store, key="another")
    assert (found["compiled"], found["loaded"], found["saved"]) == (4, 0, 4)
    assert {"was not signed by this install" in entry["reason"] for entry in found["rejected"]} == {True}
    assert len(found["rejected"]) == len(list(store.iterdir())) == 4


def test_the_code_that_starts_a_kernel(tmp_path, monkeypatch):
    """Triton builds it with the C compiler, in a folder of its own: found from the function, put back, and loadable."""
    from anyshape.accel.artifacts import triton_cache
    from triton.runtime.build import compile_module_from_src

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "one"))
    module = compile_module_from_src(SOURCE, "__triton_launcher")

    def wrapped(*args):  # as Triton does for a kernel with descriptors
        return launcher(*args)

    launcher = module.launch
    monkeypatch.setattr(triton_cache, "_driver_module", str)
    for launch, name in ((launcher, "_run"), (wrapped, "_run"), (launcher, "run")):  # Triton's name for it has changed
        kernel = SimpleNamespace(
            metadata_group={}, hash="0" * 64, metadata=SimpleNamespace(target=SimpleNamespace(arch=90)),
            **{name: SimpleNamespace(launch=launch)},
        )  # fmt: skip
        own, found = triton_cache.found(kernel)
        assert (own.kind, own.arch, found.kind, found.arch) == ("kernel", "sm_90", "launcher", "")
    (name,) = found.files
    contents = {name: found.files[name].read_bytes()}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "two"))
    assert not triton_cache.has("launcher", found.hash, contents)
    triton_cache.place("launcher", found.hash, contents)
    assert triton_cache.has("launcher", found.hash, contents)
    folder = base64.b32encode(bytes.fromhex(found.hash)).decode().rstrip("=")
    spec = importlib.util.spec_from_file_location("__triton_launcher", tmp_path / "two" / folder / name)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.launch() == 42


def test_launchers_are_told_apart(tmp_path, monkeypatch):
    """All are modules of one name, so loading one again has Python change another's ``__file__``."""
    from anyshape.accel.artifacts import triton_cache
    from triton.runtime.build import compile_module_from_src

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = [SOURCE.replace("42", str(answer)) for answer in (1, 2)]
    one, two, _ = (compile_module_from_src(sources[index], "__triton_launcher").launch for index in (0, 1, 0))
    assert (one(), two()) == (1, 2)
    places = [Path(triton_cache._module_of(launch)) for launch in (one, two)]
    assert places[0] != places[1] and all(place.is_file() for place in places)
    assert all(triton_cache._key_of(place) for place in places)


@pytest.mark.parametrize("key", ["../../../x", "zz" * 32, "ab", ""])
def test_a_name_that_is_no_hash(key):
    from anyshape.accel.artifacts import triton_cache
    from anyshape.accel.errors import Damaged

    with pytest.raises(Damaged):
        triton_cache.has("kernel", key, ["k.json"])
    with pytest.raises(Damaged):
        triton_cache.has("kernel", "ab" * 32, ["k.cubin"])
