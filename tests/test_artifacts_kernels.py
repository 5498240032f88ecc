"""Real kernels through the store into an empty Triton cache, in processes of their own; no GPU is needed to compile."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.paths import ROOT

triton = pytest.importorskip("triton")


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


@pytest.mark.parametrize("key", ["../../../x", "zz" * 32, "ab", ""])
def test_a_name_that_is_no_hash(key):
    from anyshape.accel.artifacts import triton_cache
    from anyshape.accel.errors import Damaged

    with pytest.raises(Damaged):
        triton_cache.has(key, ["k.json"])
    with pytest.raises(Damaged):
        triton_cache.has("ab" * 32, ["k.cubin"])
