"""Who may import whom, as docs/architecture.md draws it: imports at a module's top, read without running anything."""

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tools.paths import ROOT

# From the bottom up. A name stands for a module of accel, or for a folder of it.
LAYERS = (
    ("allocator", "attempt", "bounded", "devices", "errors", "fleet", "gain", "key", "minimum", "outputs", "preparing",
     "prompts", "reasons", "skip_stats", "stats", "times"),
    ("artifacts",),
    ("kernels",),
    ("tape", "fingerprint", "parts_seen"),
    ("block_call", "block_calls", "block_copies", "block_forwards", "capture", "clock", "graphs", "last_sizes", "skip",
     "tapes", "verify", "warm_up", "weights"),
    ("block_take", "block_tier", "halves", "maker", "tape_tier"),
    ("engine",),
    ("families",),
)  # fmt: skip
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
COMFYUI = frozenset(
    "aiohttp app comfy comfy_aimdo comfy_api comfy_execution comfy_extras comfyui_version execution folder_paths nodes "
    "server".split()
)
FILES = [path for folder in ("accel", "nodes") for path in sorted((ROOT / folder).rglob("*.py"))]


def dotted(path: Path) -> str:
    """``accel.tape`` for accel/tape/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in FILES}


def at_the_top(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is imported; those for annotations alone do not."""
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield statement
        elif isinstance(statement, ast.Try):
            yield from at_the_top(statement.body)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.dump(statement.test):
            yield from at_the_top([*statement.body, *statement.orelse])


def imported(name: str, path: Path) -> Iterator[str]:
    """What the module imports: ours by their full names, others by their packages."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for statement in at_the_top(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            yield from (alias.name.split(".")[0] for alias in statement.names)
        elif not statement.level:
            yield statement.module.split(".")[0]
        else:
            start = package[: len(package) - statement.level + 1]
            source = ".".join([*start, *(statement.module or "").split(".")]).rstrip(".")
            for alias in statement.names:
                within = f"{source}.{alias.name}"
                yield within if within in MODULES else source


def ours(name: str, path: Path) -> list[str]:
    return [other for other in imported(name, path) if other in MODULES and other.split(".")[0] in ("accel", "nodes")]


def test_every_module_has_a_layer() -> None:
    assert {name.split(".")[1] for name in MODULES if name.startswith("accel.")} == RANK.keys()


def test_nobody_imports_what_stands_above() -> None:
    upwards = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        if name.startswith("accel.")
        for other in ours(name, path)
        if other.startswith("nodes") or (other != "accel" and RANK[other.split(".")[1]] > RANK[name.split(".")[1]])
    ]
    assert upwards == []


def test_no_modules_form_a_cycle() -> None:
    graph = {name: {other for other in ours(name, path) if other != "nodes"} for name, path in MODULES.items()}
    assert set(TopologicalSorter(graph).static_order()) == graph.keys()  # raises CycleError, which names them


def test_comfyui_is_imported_by_nodes_and_families_alone() -> None:
    outside = [
        f"{name}: {other}"
        for name, path in MODULES.items()
        if not name.startswith(("nodes", "accel.families"))
        for other in imported(name, path)
        if other in COMFYUI
    ]
    assert outside == []
