"""Our kernels in Triton's cache: which entries are theirs, and how they are put there. Imported with Triton only.

All through Triton's own cache manager, so they go to wherever a user's cache lies, or to whatever manager is set. An
entry there is a folder named after a hash of all that decides what is compiled; a list of its files, with the places
where they lie, makes it valid. That list is not copied: it is written for the place where an entry is put.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from triton.runtime.cache import get_cache_manager

from ..errors import Damaged


class Found(NamedTuple):
    """One entry of Triton's cache."""

    hash: str  # hex
    arch: str
    files: dict[str, Path]


def variants(kernels: Iterable[Any]) -> Iterator[Any]:
    """What this process has compiled of these kernels, or found in Triton's cache; a variant is one already."""
    for kernel in kernels:
        if hasattr(kernel, "metadata_group"):
            yield kernel
        for cache in list(getattr(kernel, "device_caches", {}).values()):
            yield from list((cache[0] if isinstance(cache, tuple) else cache).values())


def found(kernel: Any) -> Found | None:
    """The entry that a compiled variant needs."""
    if not hasattr(kernel, "metadata_group"):  # a variant that is still being compiled
        return None
    files = {name: Path(path) for name, path in without_steps(kernel.metadata_group).items()}
    return Found(kernel.hash, f"sm_{kernel.metadata.target.arch}", files)


def without_steps(files: dict[str, str]) -> dict[str, str]:
    """A kernel's files without the steps between source and machine code, which are for people: 0.4 MB of text."""
    needed = {name: path for name, path in files.items() if name.endswith((".cubin", ".json"))}
    return needed if any(name.endswith(".cubin") for name in needed) else files


def has(key: str, names: Iterable[str]) -> bool:
    """Whether Triton would find this entry."""
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise Damaged("its name is not a hash of Triton's")
    manager = get_cache_manager(key)
    metadata = _metadata(names)
    return metadata in (manager.get_group(metadata) or {})


def place(key: str, contents: dict[str, bytes]) -> None:
    """Puts an entry into Triton's cache; the list of its files comes last, which makes it valid."""
    manager = get_cache_manager(key)
    paths = {name: manager.put(content, name) for name, content in contents.items()}
    manager.put_group(_metadata(paths), paths)


def _metadata(names: Iterable[str]) -> str:
    found = [name for name in names if name.endswith(".json")]
    if len(found) != 1:
        raise Damaged("its metadata are missing")
    return found[0]
