"""Our kernels in Triton's cache: which entries are theirs, and how they are put there. Imported with Triton only.

All through Triton's own cache manager, so they go to wherever a user's cache lies, or to whatever manager is set. An
entry there is a folder named after a hash of all that decides what is compiled; a list of its files, with the places
where they lie, makes it valid. That list is not copied: it is written for the place where an entry is put.
"""

import base64
import binascii
import ctypes
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from triton.runtime.cache import get_cache_manager

from ..errors import Damaged


class Found(NamedTuple):
    """One entry of Triton's cache."""

    kind: str  # "kernel" | "launcher"
    hash: str  # hex
    arch: str  # "" for a launcher
    files: dict[str, Path]


def variants(kernels: Iterable[Any]) -> Iterator[Any]:
    """What this process has compiled of these kernels, or found in Triton's cache; a variant is one already."""
    for kernel in kernels:
        if hasattr(kernel, "metadata_group"):
            yield kernel
        for cache in list(getattr(kernel, "device_caches", {}).values()):
            yield from list((cache[0] if isinstance(cache, tuple) else cache).values())


def found(kernel: Any) -> Iterator[Found]:
    """The entries that a compiled variant needs: its own, the code that starts it, and Triton's link to the driver."""
    if not hasattr(kernel, "metadata_group"):  # a variant that is still being compiled
        return
    files = {name: Path(path) for name, path in kernel.metadata_group.items()}
    if any(name.endswith(".cubin") for name in files):  # the steps between source and machine code are for people
        files = {name: path for name, path in files.items() if name.endswith((".cubin", ".json"))}
    yield Found("kernel", kernel.hash, f"sm_{kernel.metadata.target.arch}", files)
    own = vars(kernel)  # to ask for ``run`` would load the kernel; before Triton 3.5 it is no property
    launch = getattr(own.get("_run") or own.get("run"), "launch", None)
    for module in (_module_of(launch), _driver_module() if launch is not None else ""):
        if module and (key := _key_of(Path(module))):
            yield Found("launcher", key, "", {Path(module).name: Path(module)})


def _driver_module() -> str:
    from triton.runtime import driver

    return _module_of(getattr(driver.active.utils, "load_binary", None))


def _module_of(function: Any) -> str:
    """The file of the C module that a function comes from; "" if it comes from none."""
    if inspect.isfunction(function):  # around one: a kernel that takes descriptors of tensors
        function = inspect.getclosurevars(function).nonlocals.get("launcher")
    return _file_of(function) if inspect.isbuiltin(function) else ""


class _Place(ctypes.Structure):
    """``Dl_info`` of the C library's dladdr."""

    _fields_ = [("file", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in ("base", "name", "address"))]


def _file_of(function: Any) -> str:
    """The file that holds the code of a C function.

    The module's ``__file__`` does not tell: all launchers have one name, so Python loads them into one module.
    """
    if os.name != "posix":
        return str(getattr(function.__self__, "__file__", None) or "")
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)
    code, place = prototype(("PyCFunction_GetFunction", ctypes.pythonapi)), _Place()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(code(function)), ctypes.byref(place))
    return os.fsdecode(place.file) if found and place.file else ""


def _key_of(module: Path) -> str:
    """The hash, in hex, of the entry that a module was loaded from; "" if that is not in Triton's cache."""
    folder = module.parent.name
    try:
        key = base64.b32decode(folder + "=" * (-len(folder) % 8)).hex()
    except binascii.Error:
        return ""
    return key if get_cache_manager(key).get_file(module.name) == str(module) else ""


def has(kind: str, key: str, names: Iterable[str]) -> bool:
    """Whether Triton would find this entry."""
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise Damaged("its name is not a hash of Triton's")
    manager = get_cache_manager(key)
    if kind == "launcher":
        return all(manager.get_file(name) for name in names)
    metadata = _metadata(names)
    return metadata in (manager.get_group(metadata) or {})


def place(kind: str, key: str, contents: dict[str, bytes]) -> None:
    """Puts an entry into Triton's cache; the list of a kernel's files comes last, which makes it valid."""
    manager = get_cache_manager(key)
    paths = {name: manager.put(content, name) for name, content in contents.items()}
    if kind == "kernel":
        manager.put_group(_metadata(paths), paths)


def _metadata(names: Iterable[str]) -> str:
    found = [name for name in names if name.endswith(".json")]
    if len(found) != 1:
        raise Damaged("its metadata are missing")
    return found[0]
