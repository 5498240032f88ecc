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


def start(cache, store, capability=90, root=ROOT):
    """A process of ``tools.stored_kernels`` with Triton's cache in ``cache``."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "ANYSHAPE_ARTIFACTS_MB": "64"}
    del environment["TRITON_INTERPRET"]
    return subprocess.Popen(
        [sys.executable, "-m", "tools.stored_kernels", str(store), str(capability)], cwd=root, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def outcome(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


pytestmark = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="for machines without a GPU")


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store that two processes filled at once, and what they said."""
    folder = tmp_path_factory.mktemp("artifacts")
    both = [start(folder / name, folder / "store") for name in ("one", "two")]
    return folder / "store", [outcome(process) for process in both]


@pytest.fixture
def store(filled, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(filled[0], tmp_path / "store"))


def test_two_processes_at_once_save_each_kernel_once(filled):
    store, (one, two) = filled
    assert one["saved"] + two["saved"] == 3 == len(list(store.iterdir()))
    assert [one["rejected"], two["rejected"]] == [[], []]


def test_nothing_is_compiled_with_a_store_and_an_empty_cache(store, tmp_path):
    """Nor after a restart: the places in the lists of files that Triton keeps are those of the new cache."""
    found = outcome(start(tmp_path / "cache", store))
    assert (found["compiled"], found["hits"], found["loaded"], found["saved"]) == (0, 3, 3, 0)
    shutil.rmtree(store)
    found = outcome(start(tmp_path / "cache", store))
    assert (found["compiled"], found["hits"], found["loaded"], found["saved"]) == (0, 3, 0, 3)


def test_another_place_of_the_pack_is_no_other_source(store, tmp_path):
    """A machine on which ComfyUI lies elsewhere; what the kernels compute is the same."""
    for folder in ("accel", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / "pack" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("__init__.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / "pack")
    found = outcome(start(tmp_path / "cache", store, root=tmp_path / "pack"))
    assert (found["compiled"], found["loaded"]) == (0, 3)
    source = tmp_path / "pack" / "accel" / "kernels" / "pointwise.py"
    source.write_text("# an update of the pack\n" + source.read_text())
    found = outcome(start(tmp_path / "empty", store, root=tmp_path / "pack"))
    assert (found["compiled"], found["loaded"], len(found["rejected"])) == (3, 0, 3)
    assert "compiled for AnyShape's source" in found["rejected"][0]["reason"]


def test_another_card(store, tmp_path):
    found = outcome(start(tmp_path / "cache", store, capability=80))
    assert (found["compiled"], found["loaded"], found["saved"]) == (3, 0, 3)
    reasons = {entry["reason"] for entry in found["rejected"]}
    assert reasons == {"compiled for the architecture sm_90, here it is sm_80: it will be compiled anew"}
    assert len(list(store.iterdir())) == 6


def test_a_damaged_store_is_compiled_anew_and_mended(store, tmp_path):
    cubin, manifest = next(store.glob("*/geglu_kernel.cubin")), next(store.glob("*/bias_add_kernel.ttir"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    (manifest.parent / "manifest.json").write_text("{")
    found = outcome(start(tmp_path / "cache", store))
    assert (found["compiled"], found["loaded"], found["saved"], len(found["rejected"])) == (2, 1, 2, 2)
    found = outcome(start(tmp_path / "another", store))
    assert (found["compiled"], found["loaded"], found["rejected"]) == (0, 3, [])


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
