"""Fixtures for every test. The pack is imported as `anyshape`, never from the repo folder on `sys.path`."""

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _pytest.runner import pytest_runtest_protocol as run_test

from tools import driving, embed
from tools.paths import OLDER_COMFYUI, ROOT, project_env

if TYPE_CHECKING:
    from tools.comfy_server import ComfyServer
    from tools.opened_pages import OpenedPages

# Before any test module is imported: caches stay in the project, and `import nodes` can only be ComfyUI's.
os.environ.update(project_env())
sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))  # this process has read it already
embed.hide_repo()
embed.bare_pack()

# No artefacts on disk between tests: those about them make stores of their own.
os.environ["ANYSHAPE_ARTIFACTS_MB"] = "0"

# Where there is no GPU, kernels run in Triton's interpreter. Triton reads this when it is first imported, by any test.
if not embed.has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# One thread for each test process: several run side by side, and small models gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


# glibc gives the memory of each larger tensor back at once, and the kernel clears every page of it that comes again: a
# third of the time of a video VAE. What is freed is kept, in this process and in those that tests start.
MALLOC = {"MALLOC_MMAP_MAX_": (-4, 0), "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1), "MALLOC_TOP_PAD_": (-2, 2**26)}
if sys.platform == "linux":
    for _name, (_option, _value) in MALLOC.items():
        os.environ.setdefault(_name, str(_value))
        getattr(ctypes.CDLL(None), "mallopt", max)(_option, _value)

# Looking through all that ComfyUI and torch have made takes a third of a second, and a test makes much garbage. What is
# there once the pack is loaded is never looked through again (``pack``).
gc.set_threshold(100000, 10, 50)

# Files that drive the server: all in one process, where it starts once.
SERVER = {
    "test_automatic_server", "test_automatic_users", "test_browser", "test_collapsed", "test_compare", "test_demo_run",
    "test_examples", "test_gain_page", "test_locales", "test_metrics", "test_nodes", "test_report", "test_schemas",
    "test_screen", "test_server", "test_settings", "test_web",
}  # fmt: skip
# What takes longest begins first, so that the processes end together; files that are not here come last.
LONGEST = (
    "server", "test_older_comfyui", "test_tape_families", "test_tape_vaes", "test_skip_packs", "test_soak",
    "test_controlnet_cpu", "test_workflows_nodes", "test_faults", "test_kernels", "test_demo_model", "test_fleet",
    "test_skip_cut", "test_skip_middle", "test_architectures", "test_skip_unrecorded", "test_tape_reuse_models",
    "test_skip_deep", "test_tape_pictures", "test_tape_unets", "test_package", "test_workflows_vae",
    "test_gain_measured", "test_vae_cpu", "test_artifacts_kernels", "test_workflows_weights",
    "test_tape_patches_comfyui", "test_unet_cpu", "test_skip_runs", "test_skip_bench", "test_control_lora",
    "test_workflows_batches", "test_model_state", "test_bench", "test_quantised", "test_controlnet_tape",
    "test_vae_shared", "test_unet_packs", "test_skip_unrecorded_stages", "test_tape_patches_called",
    "test_tape_fetched", "test_lazy", "test_warm_up", "test_tape_patches", "test_tape_pictures_layers",
)  # fmt: skip
# What needs a program of its own: the mark of a file's tests, to leave them out (`-m "not browser"`) or run them alone.
MARKS = {
    "test_fleet": "fleet", "test_fleet_client": "fleet", "test_browser": "browser", "test_collapsed": "browser",
    "test_gain_page": "browser", "test_compare": "browser", "test_screen": "browser", "test_settings": "browser",
    "test_package": "package", "test_soak": "soak",
}  # fmt: skip
PAGES: "list[OpenedPages]" = []  # once there are any


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For ``-n auto``: one process per core, two at most, and one for when the server's waits; none on a GPU."""
    return 0 if embed.has_cuda() else min(2, os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays in one process. pytest 9.2 has no node ids that xdist's own groups could be written into."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(Path(nodeid.split("::")[0]))

    config.option.loadscopereorder = False  # xdist begins with the files of most tests
    return Files(config, log)


def scope(path: Path) -> str:
    """The tests of one name run in one process."""
    return "server" if path.stem in SERVER else path.stem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    # Of those that drive the server, the ones in a browser come last: see ``pytest_runtest_setup``.
    in_a_browser = lambda item: MARKS.get(item.path.stem) == "browser"  # noqa: E731
    items.sort(key=lambda item: (places.get(scope(item.path), len(LONGEST)), in_a_browser(item)))
    for item in items:
        if "server" in item.fixturenames and item.path.stem not in SERVER:
            raise pytest.UsageError(f"{item.path.stem} drives the server: add it to SERVER in tests/conftest.py")
        if item.path.stem in MARKS:
            item.add_marker(MARKS[item.path.stem])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """As pytest does it, with all Python frames in one piece of memory: a tenth of a test's time."""
    from anyshape.accel.frames import together

    return together(lambda: run_test(item, nextitem))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if PAGES and not item.get_closest_marker("browser"):
        PAGES[0].close()  # whose event loop would be in the way
    if item.get_closest_marker("gpu") and not embed.has_cuda():
        pytest.skip("needs a CUDA device, and torch sees none on this machine")


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Where kernels are interpreted, they keep to their tensors and run faster."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tools import interpreter

        interpreter.watch()
        interpreter.hasten()


@pytest.fixture(scope="session")
def comfy() -> Path:
    """ComfyUI importable in this process; gives its folder."""
    return embed.use_comfyui()


@pytest.fixture(scope="session")
def pack(comfy: Path) -> ModuleType:
    """The pack, as the module `anyshape`."""
    loaded = embed.load_pack()
    if os.environ.get("TRITON_INTERPRET") == "1":
        from anyshape.accel.tape import kernels

        from tools import interpreter

        interpreter.widen(kernels)
    gc.collect()
    gc.freeze()
    return loaded


@pytest.fixture(scope="session")
def models(pack: ModuleType) -> ModuleType:
    """Models of ComfyUI's own classes with random weights."""
    from bench import models

    return models


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def unets(models: ModuleType) -> "dict[str, ModelPatcher]":  # noqa: F821  (ComfyUI's)
    """A small UNet of each kind, for the tests of one file."""
    return {name: models.unet(name, torch.float32, **config) for name, config in driving.DEEP_UNETS.items()}


@pytest.fixture(scope="module")
def small_unets(models: ModuleType) -> "dict[str, ModelPatcher]":  # noqa: F821
    """The same with one block per level."""
    return {name: models.unet(name, torch.float32, **config) for name, config in driving.SMALL_UNETS.items()}


@pytest.fixture(scope="module")
def patcher(models: ModuleType) -> "ModelPatcher":  # noqa: F821
    """The UNet that a file's tests share."""
    return models.unet("sd15", torch.float32, **driving.SMALL_UNET)


@pytest.fixture
def fresh(models: ModuleType) -> "ModelPatcher":  # noqa: F821
    """A UNet of the test's own: what is retired or hooked there harms no other test."""
    return models.unet("sd15", torch.float32, **driving.SMALL_UNET)


@pytest.fixture
def nothing_compiles(clean_stats: None, warm: Any) -> Iterator[None]:
    """The oracle around a test, once its ``warm`` models are: no kernel is compiled, and nothing steps down."""
    from tools.oracles import expect

    with expect(recompiles=0, kernels=0, fallbacks=0):
        yield


@pytest.fixture
def plain_kernels(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels by hand in plain torch: the interpreter takes half a second for each GroupNorm of a UNet.

    They run in the tests of kernels and of pictures, in one whole UNet (``test_tape_unets``) and in two VAEs.
    """
    from anyshape.accel.kernels import operations

    ops = operations.fused_ops(torch.device("cpu"))
    names = {"group_norm", "geglu_of_product", "geglu", "short_attention", "upsample2x", "grouped_linear"}
    monkeypatch.setattr(ops, "_failed", names)


@pytest.fixture
def clean_stats(pack: ModuleType) -> None:
    """The counters begin at zero."""
    from anyshape.accel import stats

    stats.STATS.clear()


@pytest.fixture
def no_graphs_left(pack: ModuleType) -> Iterator[None]:
    """After the test every graph is given back."""
    from anyshape.accel import graphs

    yield
    gc.collect()
    for cache in graphs._CACHES.values():
        cache.clear()


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Convolutions in float32 are that on a GPU too, not TF32."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.fixture
def in_older_comfyui() -> Callable[..., subprocess.CompletedProcess]:
    """Runs tests in a process of their own with the older of the two ComfyUIs: one process can have only one."""
    if "COMFYUI_PATH" in os.environ or not OLDER_COMFYUI.is_dir():  # as in the process that this fixture starts
        pytest.skip("needs both of the registry's ComfyUIs, and COMFYUI_PATH names one")

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, "COMFYUI_PATH": str(OLDER_COMFYUI)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


@pytest.fixture
def fusing(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but that programs run unfused; blocks run one by one where the whole cannot be recorded."""
    from tools.recording import plan_kernels

    plan_kernels(monkeypatch)


@pytest.fixture(scope="module")
def counting(pack: ModuleType) -> Iterator[None]:
    """``fusing`` for all tests of a file: what kernels its programs would need is counted as on a GPU."""
    from tools.recording import plan_kernels

    with pytest.MonkeyPatch.context() as patch:
        plan_kernels(patch)
        yield


@pytest.fixture
def recordings(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that were recorded as a whole."""
    from anyshape.accel.tapes import Tapes

    return driving.calls_of(monkeypatch, Tapes, "record", lambda self, key, *args: str(key))


@pytest.fixture
def block_programs(pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks that ran on a program of their own."""
    from anyshape.accel.block_tier import BlockTier

    return driving.calls_of(monkeypatch, BlockTier, "_replay", lambda self, take, path, *args: path)


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, pack: ModuleType) -> "Callable[..., ModelPatcher]":  # noqa: F821
    """A tiny model by name, with the file's BLOCKS; made once for a file, unless it is to be fresh."""
    from tools.architectures import patchers

    blocks, known = getattr(request.module, "BLOCKS", 0), {}

    def make(name: str, fresh: bool = False) -> "ModelPatcher":  # noqa: F821
        if fresh:
            return patchers.make(name, blocks=blocks)
        if name not in known:
            known[name] = patchers.make(name, blocks=blocks)
        return known[name]

    return make


@pytest.fixture(scope="session")
def demo_pack(comfy: Path) -> ModuleType:
    """The demo's node pack, as the module `anyshape_demo`."""
    return embed.load_demo()


@pytest.fixture(scope="session")
def server() -> "Iterator[ComfyServer]":
    """The real ComfyUI server, running with the pack, the demo's nodes and another pack's."""
    from tools.comfy_server import PACKS, ComfyServer

    with ComfyServer(packs=PACKS | {"other_pack": embed.ROOT / "tools" / "other_pack"}) as running:
        yield running


@pytest.fixture(scope="session")
def opened_pages() -> "Iterator[OpenedPages]":
    """The pages that files share."""
    from tools import browser, comfy_server
    from tools.opened_pages import OpenedPages

    if not browser.find():
        pytest.skip(browser.MISSING)
    if comfy_server.front_end() is None:
        pytest.skip("there is no front end to test: make setup")
    PAGES.append(OpenedPages())
    yield PAGES[0]
    PAGES[0].close()


@pytest.fixture(scope="module")
def browser(opened_pages: "OpenedPages") -> "Browser":  # noqa: F821  (playwright's, which few files need)
    """A Chromium without a window."""
    return opened_pages.browser()
