"""Modules made from their text, for kernels. Imports nothing but Python, for the process that helps to compile."""

import hashlib
import importlib.util
import linecache
from importlib.abc import ExecutionLoader
from types import ModuleType


class _Lines(ExecutionLoader):
    """Imports a module from its text. A file for each kernel took up to 8 ms, on a host with a slow disk."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_filename(self, fullname: str) -> str:
        return f"<{fullname}>"


def module_of(text: str, name: str) -> ModuleType:
    """A module made of ``text``, whose lines are where Triton looks for them; ``name`` is a part of its name."""
    title = f"anyshape_{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_loader(title, _Lines(text))
    file, lines = spec.loader.get_filename(title), text.splitlines(keepends=True)
    linecache.cache[file] = len(text), None, lines, file  # no time: it is never out of date
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
