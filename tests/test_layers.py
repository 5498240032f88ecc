"""Who may import whom, as docs/architecture.md draws it: read without running anything."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tools.paths import ROOT

# From the bottom up. A name stands for a module of accel, or for a folder of it.
LAYERS = (
    ("allocator", "attempt", "bounded", "devices", "errors", "fleet", "frames", "gain", "key", "minimum", "outputs",
     "pools", "preparing", "prompt_calls", "reasons", "skip_stats", "stats", "times", "totals", "wording"),
    ("artifacts",),
    ("kernels",),
    ("tape", "fingerprint", "foreign", "functions_read", "origin", "parts_seen"),
    ("block_call", "block_calls", "block_copies", "block_forwards", "capture", "clock", "graphs", "last_sizes",
     "recorded", "skip", "size_list", "take", "tapes", "verify", "weights"),
    ("block_take", "block_tier", "call", "first_call", "halves", "maker", "own_result", "sensitivity", "take_graphs",
     "tape_tier"),
    ("engine",),
    ("comfy",),
)  # fmt: skip
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
COMFYUI = frozenset(
    "aiohttp app comfy comfy_aimdo comfy_api comfy_execution comfy_extras comfyui_version execution folder_paths nodes "
    "server".split()
)
FOLDERS = ("accel", "nodes", "fleet", "bench", "demo", "tests", "tools")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
LONGEST = 350  # lines of a file
JS_IMPORT = re.compile(r'^import .* from "(\./.*)";$', re.MULTILINE)


def dotted(path: Path) -> str:
    """``accel.tape`` for accel/tape/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in FILES}


@functools.cache
def imported(name: str, path: Path) -> frozenset[str]:
    """What the module imports, anywhere in it: ours by their full names, others by their packages.

    ``nodes`` is ComfyUI's; ours is named from within the pack alone.
    """
    return frozenset(imports(name, path))


def imports(name: str, path: Path) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            yield from (ours_or_package(alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            start = package[: len(package) - statement.level + 1] if statement.level else []
            source = ".".join([*start, *(statement.module or "").split(".")]).strip(".").removeprefix("anyshape.")
            for alias in statement.names:
                within = f"{source}.{alias.name}"
                yield within if within in MODULES else ours_or_package(source)


def ours_or_package(name: str) -> str:
    return name if name in MODULES else name.split(".")[0]


def ours(name: str, path: Path) -> set[str]:
    return {other for other in imported(name, path) if other in MODULES and other != "nodes"}


def modules() -> dict[str, set[str]]:
    """Each module, and those of ours that it imports."""
    return {name: ours(name, path) for name, path in MODULES.items()}


def scripts() -> dict[Path, set[Path]]:
    """Each file of the browser's part, and those of ours that it imports."""
    files = [ROOT / "web" / "anyshape.js", *(ROOT / "web" / "anyshape").glob("*.js")]
    return {path: {(path.parent / name).resolve() for name in JS_IMPORT.findall(path.read_text())} for path in files}


def test_every_module_has_a_layer() -> None:
    assert {name.split(".")[1] for name in MODULES if name.startswith("accel.")} == RANK.keys()


def test_nobody_imports_what_stands_above() -> None:
    upwards = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        if name.startswith("accel.")
        for other in ours(name, path)
        if not other.startswith("accel") or (other != "accel" and RANK[other.split(".")[1]] > RANK[name.split(".")[1]])
    ]
    assert upwards == []


@pytest.mark.parametrize("drawn", [modules, scripts])
def test_no_modules_form_a_cycle(drawn: Callable[[], dict]) -> None:
    graph = drawn()
    assert any(graph.values())
    assert set(TopologicalSorter(graph).static_order()) == graph.keys()  # raises CycleError, which names them


def test_comfyui_is_imported_by_nodes_and_the_adapter_alone() -> None:
    outside = [
        f"{name}: {other}"
        for name, path in MODULES.items()
        if name.startswith("accel.") and not name.startswith(("accel.comfy", "accel.minimum"))  # asks its version
        for other in imported(name, path)
        if other in COMFYUI
    ]
    assert outside == []


def test_no_two_files_of_the_pack_have_one_name() -> None:
    names = Counter(p.name for p in FILES if p.relative_to(ROOT).parts[0] in ("accel", "nodes", "fleet"))
    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}


def test_no_file_is_longer_than_one_can_read_at_once() -> None:
    written = [*FILES, *sorted((ROOT / "web").rglob("*.js"))]
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in written}
    assert {path: length for path, length in lengths.items() if length > LONGEST} == {}
