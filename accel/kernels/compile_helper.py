"""The process that ``helpers`` starts: compiles kernels into Triton's cache, one after another.

It is started by its path, so that nothing of the pack is imported, nor torch: it is ready after a quarter of a second.
It reads requests from its standard input and answers each; the end of the input ends it.
"""

import ast
import functools
import os
import pickle
import sys
from typing import Any, BinaryIO

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an embedded Python does not look there
from from_text import module_of  # noqa: E402


def main() -> None:
    """Serves until the input ends. First come ``sys.path`` of the process that asks and what it knows of Triton."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints no answer
    sys.path[:], known = pickle.load(requests)
    _take_hash(known)
    while (request := _next(requests)) is not None:
        answers.write(b"1" if _compiled(*request) else b"0")
        answers.flush()


def _next(requests: BinaryIO) -> tuple | None:
    try:
        return pickle.load(requests)
    except EOFError:
        return None


def _take_hash(known: str) -> None:
    """Triton hashes its own files, half a gigabyte, once per process; the one that asks has done so."""
    from triton.compiler import compiler
    from triton.runtime import cache

    for module in (cache, compiler):
        if hasattr(module, "triton_key"):
            module.triton_key = lambda: known


def _compiled(
    text: str, name: str, imported: dict[str, tuple[str, str]], types: tuple, target: Any, options: dict[str, Any]
) -> bool:
    """imported: text and name of functions of other modules, by their names in this one.

    types: signature, constants and attributes as ``ASTSource`` has them.
    """
    import triton
    from triton.compiler import ASTSource

    try:
        module = _module(text, name)
        vars(module).update({here: getattr(_module(*there), there[1]) for here, there in imported.items()})
        triton.compile(ASTSource(getattr(module, name), *types), target=target, options=options)
    except Exception:  # noqa: BLE001  the process that asks compiles it then, and says what is wrong
        return False
    return True


@functools.cache
def _module(text: str, name: str) -> Any:
    return module_of(_kernels_alone(text), name)


def _kernels_alone(text: str) -> str:
    """The kernels of ``text``, and what it imports of Triton. All else is empty lines, so each keeps its number."""
    lines, kept = text.splitlines(keepends=True), set()
    for node in ast.parse(text).body:
        if _is_kernel(node) or _imports_triton(node):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            kept.update(range(first, node.end_lineno + 1))
    return "".join(line if number in kept else "\n" for number, line in enumerate(lines, 1))


def _is_kernel(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)


def _imports_triton(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(each.name.split(".")[0] == "triton" for each in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "triton"


if __name__ == "__main__":
    main()
