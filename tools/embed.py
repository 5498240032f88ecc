"""Puts ComfyUI and the pack into one Python process, without the pack's folder ever being on `sys.path`.

The pack has a package `nodes` and ComfyUI has a module `nodes`: were the pack's folder on `sys.path`, ComfyUI would
import the wrong one. So the folder is taken off, and the pack is registered as the package `anyshape` instead, as
ComfyUI itself does under a longer name. Typical use:

    from tools import embed

    embed.use_comfyui()            # now `import comfy.sample` and `import nodes` are ComfyUI's
    pack = embed.load_pack()       # now `anyshape.accel` and `anyshape.nodes` are the pack's

`embed.bare_pack()` gives `anyshape.accel` alone, with no ComfyUI needed: the pack's `__init__.py` is not run.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.paths import CACHE, ROOT, comfyui_path, project_env

__all__ = ["bare_demo", "bare_pack", "comfyui_path", "has_cuda", "hide_repo", "load_demo", "load_pack", "use_comfyui"]

# Packages of the repo that stay importable by their plain name after the repo folder has left sys.path.
DEV_PACKAGES = ("tools", "bench")

# What a ComfyUI base directory must hold before anything lists it.
BASE_FOLDERS = ("custom_nodes", "input", "output", "temp", "user", "models")


def has_cuda() -> bool:
    """Whether torch sees a CUDA device. Imports torch (seconds the first time)."""
    import torch

    return torch.cuda.is_available()


def hide_repo() -> None:
    """Take the repo folder off `sys.path`, keeping `tools` and `bench` importable."""
    for name in DEV_PACKAGES:
        if name not in sys.modules and (ROOT / name / "__init__.py").is_file():
            importlib.import_module(name)
    sys.path[:] = [entry for entry in sys.path if not _is_repo(entry)]


def _is_repo(entry: str) -> bool:
    return Path(entry or os.getcwd()).resolve() == ROOT


def make_base(folder: Path) -> Path:
    """A ComfyUI base directory: `folder` with the subfolders that ComfyUI expects to find."""
    for name in BASE_FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def use_comfyui(extra: dict[str, Any] | None = None) -> Path:
    """Make ComfyUI importable in this process and return its folder.

    extra: more of ComfyUI's command line arguments by their Python names, such as `{"force_fp32": True}`.

    Must be called before anything imports `comfy.model_management`, which reads the arguments when it is imported.
    """
    path = comfyui_path()
    hide_repo()
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    _set_arguments({"cpu": not has_cuda(), **_defaults(), **(extra or {})})
    # nodes.py puts ComfyUI's comfy/ folder on sys.path, where a bare `utils` is comfy/utils.py: the package goes first.
    importlib.import_module("utils.extra_config")
    return path


def _defaults() -> dict[str, Any]:
    return {
        # ComfyUI's own CPU attention breaks compiled graphs; torch's does not.
        "use_pytorch_cross_attention": True,
        "base_directory": str(make_base(CACHE / "base")),
        "database_url": "sqlite:///:memory:",
    }


def _set_arguments(wanted: dict[str, Any]) -> None:
    """Set ComfyUI's arguments; once its model management is loaded they may only be asked for again as they are."""
    os.environ.update(project_env())
    args = importlib.import_module("comfy.cli_args").args
    for name, value in wanted.items():
        if not hasattr(args, name):
            raise ValueError(f"ComfyUI has no argument {name!r}. See comfy/cli_args.py for the names it has.")
        if getattr(args, name) != value and "comfy.model_management" in sys.modules:
            raise RuntimeError(
                f"ComfyUI is already loaded in this process with {name}={getattr(args, name)!r}, too late to make it "
                f"{value!r}. Call embed.use_comfyui() before anything imports comfy.model_management."
            )
        setattr(args, name, value)


def bare_pack() -> ModuleType:
    """The package `anyshape` without running the pack's `__init__.py`: `anyshape.accel` needs no ComfyUI."""
    return _package("anyshape", ROOT)


def load_pack(store: bool = True) -> ModuleType:
    """The whole pack as the package `anyshape`, its `__init__.py` run. Call `use_comfyui` first.

    store: False for what measures compilers, which an earlier run's artefacts on disk would help.
    """
    if not store:
        os.environ["ANYSHAPE_ARTIFACTS_MB"] = "0"
    return _run_init(bare_pack())


def bare_demo() -> ModuleType:
    """The package `anyshape_demo` (the folder demo/) without running its `__init__.py`."""
    return _package("anyshape_demo", ROOT / "demo")


def load_demo() -> ModuleType:
    """The demo's node pack as the package `anyshape_demo`, its `__init__.py` run. Call `use_comfyui` first."""
    return _run_init(bare_demo())


def as_comfyuis(name: str) -> ModuleType:
    """The module ``tools.name``, as one of ComfyUI's: what it defines is no other pack's code."""
    full = f"comfy.ldm.{name}"
    spec = importlib.util.spec_from_file_location(full, ROOT / "tools" / f"{name}.py")
    sys.modules[full] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _package(name: str, folder: Path) -> ModuleType:
    """Register `folder` as the package `name`; its `__init__.py` is not run yet."""
    if name not in sys.modules:
        hide_repo()
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return sys.modules[name]


def _run_init(module: ModuleType) -> ModuleType:
    if "comfy.cli_args" not in sys.modules:
        raise RuntimeError(f"Call embed.use_comfyui() before loading {module.__name__!r}: its nodes import ComfyUI.")
    if not getattr(module, "__anyshape_loaded__", False):
        module.__spec__.loader.exec_module(module)
        module.__anyshape_loaded__ = True
    return module
