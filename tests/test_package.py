"""What the registry gives to users: packed by comfy-cli, looked into, installed into a fresh ComfyUI and run there."""

import ast
import json
import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from PIL import Image

from tools import comfy_cli, demo_pack, embed
from tools.comfy_server import ComfyServer
from tools.paths import ROOT, comfyui_path

embed.bare_demo()

from anyshape_demo import report, run, workflows  # noqa: E402 - the package exists from the line above on

if not comfy_cli.ready() and not os.environ.get("CI"):
    pytest.skip(comfy_cli.MISSING, allow_module_level=True)
if not (ROOT / ".git").exists():
    pytest.skip("comfy-cli packs what git tracks, and this is no git checkout", allow_module_level=True)

# All that may lie at the top of the archive; whatever else the repository gains is either added here or left out there.
TOP = {
    "__init__.py", "accel", "nodes", "fleet", "web", "locales", "example_workflows", "docs", "README.md",
    "README.zh-CN.md", "CHANGELOG.md", "LICENSE", "requirements.txt", "pyproject.toml",
}  # fmt: skip
# Of these folders users need everything.
WHOLE = ("accel", "nodes", "fleet", "web", "locales", "example_workflows")
FILES = [name for name in TOP if "." in name] + ["LICENSE"]

HELP = PurePosixPath("web/docs")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
CASE = workflows.Case(136, 120, 2, True, "rocket")  # a latent of 17 x 15
SEED = 7


@pytest.fixture(scope="module")
def archive() -> Path:
    """The one that `make package` has just made, where it has."""
    if made := comfy_cli.current():
        return made
    comfy_cli.validate()
    return comfy_cli.pack()


@pytest.fixture(scope="module")
def texts(archive: Path) -> dict[str, bytes]:
    """What each file of it has; opened once, as looking a name up in it reads the whole list."""
    with zipfile.ZipFile(archive) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


@pytest.fixture(scope="module")
def names(texts: dict[str, bytes]) -> set[str]:
    return set(texts)


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All of them, at every depth; no expression has one in it."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from statements(child)


def modules(texts: dict[str, bytes]) -> Iterator[tuple[PurePosixPath, ast.stmt]]:
    """Every statement of every Python file, with the file's path."""
    for name in sorted(texts):
        if name.endswith(".py"):
            yield from ((PurePosixPath(name), each) for each in statements(ast.parse(texts[name])))


# What lies in it --------------------------------------------------------------------------------------------------


def test_nothing_that_only_development_needs(names) -> None:
    assert {PurePosixPath(name).parts[0] for name in names} <= TOP


def test_nothing_is_missing(names) -> None:
    """On disk, not only in git: a module that nobody added to git would be missing for users."""
    needed = set(FILES)
    for folder in WHOLE:
        found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        needed |= {path.relative_to(ROOT).as_posix() for path in found if not path.match("*/__pycache__/*")}
    assert needed <= names


def test_links_lead_to_files_of_the_archive(texts, names) -> None:
    broken = []
    for page in (name for name in names if name.endswith(".md")):
        for target in LINK.findall(texts[page].decode()):
            if "://" not in target and os.path.normpath(base_of(page) / target) not in names:
                broken.append((page, target))
    assert broken == []


def base_of(page: str) -> PurePosixPath:
    """Where a page's links begin: its folder. ComfyUI takes those of a node's help page, of any language, from docs."""
    return HELP if PurePosixPath(page).is_relative_to(HELP) else PurePosixPath(page).parent


def test_it_is_small(archive) -> None:
    assert archive.stat().st_size < 3e6  # bytes


def test_no_import_leads_out_of_the_archive(texts, names) -> None:
    ours = {"tools", "bench", "demo", "tests", "anyshape", "anyshape_demo"}
    strays = []
    for path, node in modules(texts):
        if isinstance(node, ast.Import):
            strays += [(str(path), alias.name) for alias in node.names if alias.name.split(".")[0] in ours]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            strays += [(str(path), node.module)] if node.module.split(".")[0] in ours else []
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] / (node.module or "").replace(".", "/")
            found = {f"{base}.py", f"{base}/__init__.py", "__init__.py" if str(base) == "." else ""} & names
            strays += [] if found else [(str(path), "." * node.level + (node.module or ""))]
    assert strays == []


# Installed --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ComfyUI of its own with the archive and the demo's nodes in custom_nodes, and nothing of the user's."""
    source, home = comfyui_path(), tmp_path_factory.mktemp("installed") / "ComfyUI"
    theirs = {*embed.BASE_FOLDERS, ".git", ".venv", "venv", "extra_model_paths.yaml"}
    shutil.copytree(source, home, ignore=lambda folder, inside: theirs if Path(folder) == source else ())
    embed.make_base(home)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(home / "custom_nodes" / "anyshape")
    with zipfile.ZipFile(demo_pack.pack()) as packed:
        packed.extractall(home / "custom_nodes")
    yield home
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def started(installed: Path) -> Iterator[ComfyServer]:
    with ComfyServer(home=installed) as server:
        yield server


def comfy_run(server: ComfyServer, compiled: bool) -> list[Image.Image]:
    """The pictures that ``comfy run`` makes of the demo's workflow, in API format, as they lie in the output folder."""
    flow = workflows.picture(CASE, SEED, compiled)
    flow["save"]["inputs"]["filename_prefix"] = prefix = f"comfy_run_{compiled}"
    file = server.home / f"{prefix}.json"
    file.write_text(json.dumps(flow))
    said = comfy_cli.comfy(
        "--workspace", str(server.home), "run", "--workflow", str(file), "--wait", "--timeout", "240",
        "--host", "127.0.0.1", "--port", str(server.port), timeout=280,
    )  # fmt: skip
    pictures = sorted((server.home / "output").glob(f"{prefix}*.png"))
    assert pictures, said
    return [Image.open(path) for path in pictures]


def calls(stats: dict[str, Any]) -> dict[str, int]:
    """The calls of each kind of model; a VAE's decoder and encoder are one kind."""
    counted = Counter()
    for model in stats["models"]:
        counted[model["kind"]] += sum(shape["calls"] for shape in model["shapes"])
    return dict(counted)


def test_the_pack_is_the_archive(started, installed) -> None:
    """The nodes that the server has are those of the unpacked archive, and the browser gets its part."""
    found = started.get("/object_info/AnyShapeCompileModel").json()["AnyShapeCompileModel"]
    assert found["python_module"] == "custom_nodes.anyshape"
    assert "registerExtension" in started.get("/extensions/anyshape/anyshape.js").text
    assert not (installed / "custom_nodes" / "anyshape" / "tools").exists()


def test_the_demos_template_comes_with_its_archive(started) -> None:
    (name,) = started.get("/workflow_templates").json()["anyshape_demo"]
    assert started.get(f"/api/workflow_templates/anyshape_demo/{name}.jpg").status_code == 200


def test_comfy_run_makes_the_pictures(started) -> None:
    eager = comfy_run(started, compiled=False)
    assert calls(started.get("/anyshape/stats").json()) == {}
    compiled = comfy_run(started, compiled=True)
    counted = calls(started.get("/anyshape/stats").json())
    assert counted["model"] >= workflows.SAMPLER["steps"] and counted["vae"] >= 1
    assert [image.size for image in compiled] == [(CASE.width, CASE.height)] * CASE.batch
    allowed = run.ALLOWED_CUDA if embed.has_cuda() else run.ALLOWED_CPU
    difference = report.difference(compiled, eager)
    assert not difference.exceeds(allowed), difference
