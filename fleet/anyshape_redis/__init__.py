"""Compiled Triton kernels shared by many ComfyUI workers: Triton's file cache with a Redis behind it.

The operator switches it on; ``docs/fleet.md`` has examples and says who may write:

    PYTHONPATH=<the pack>/fleet
    TRITON_CACHE_MANAGER=anyshape_redis:Manager
    TRITON_REDIS_HOST, TRITON_REDIS_PORT     or ANYSHAPE_REDIS_URL=rediss://user:password@host:port/0
    ANYSHAPE_FLEET_KEY                       a secret of all workers: only values that were signed with it are used.
                                             Without it nothing is asked for (but see ANYSHAPE_FLEET_UNSIGNED)

A worker reads its own disk first, and asks Redis only for what is missing. What it compiles is stored in the
background. If Redis is down, slow, full or holds garbage, that costs less than a second in all. It is counted with its
reason, and the kernel is compiled here, as without this cache.

Imports only triton, redis and the standard library: this folder is on sys.path, the pack's never is.
"""

import atexit
import os
import threading
from typing import Any

from triton.runtime.cache import FileCacheManager

from .client import Remote
from .signed import check_kernel, check_module, pack, unpack

__all__ = ["Manager", "forget", "remote", "renew", "snapshot"]

MODULES = (".so", ".pyd")

# One for the process; a fork starts from scratch, because threads and their locks do not survive it.
_remote: Remote | None = None
_making = threading.Lock()


def remote() -> Remote:
    """The process's connection, made when first needed."""
    global _remote
    with _making:
        _remote = _remote or Remote()
        return _remote


def renew() -> None:
    """Starts from scratch, with the current environment."""
    global _remote, _making
    _remote, _making = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew)
atexit.register(lambda: _remote and _remote.flush())


def snapshot() -> dict[str, Any]:
    """The counters of this process; {} before the first kernel."""
    return _remote.snapshot() if _remote else {}


def forget() -> None:
    """Drops the rejections and outages that were counted."""
    if _remote:
        _remote.forget()


class Manager(FileCacheManager):
    """Triton's own file cache; what it lacks comes from Redis, and what is compiled goes there.

    Triton knows groups (a kernel's files: one value here) and single files that it asks for by name (its launchers).
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._shared = not (override or dump)
        self._missing: set[str] = set()  # single files that were asked for in vain

    def _name(self, filename: str) -> str:
        return f"{self.key}:{filename}"

    def get_file(self, filename: str) -> str | None:
        """The path of a single file; shared are the C extensions among them."""
        path = super().get_file(filename)
        if path is not None or not self._shared or not filename.endswith(MODULES):
            return path
        data = remote().get(self._name(filename), check_module)
        if data is not None:
            return super().put(data, filename)
        self._missing.add(filename)
        return None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Writes a file; shares it if it was asked for on its own."""
        path = super().put(data, filename, binary)
        if filename in self._missing:
            remote().put(self._name(filename), data if isinstance(data, bytes) else str(data).encode())
        return path

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a kernel's files by name, all of them or None."""
        group = super().get_group(filename)
        if group or not self._shared:
            return group
        files = remote().get(self._name(filename), lambda data: check_kernel(unpack(data), filename, self.key))
        if files is None:
            return None
        group = {name: super(Manager, self).put(content, name) for name, content in files.items()}
        super().put_group(filename, group)
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Notes which files make a kernel, and shares them."""
        path = super().put_group(filename, group)
        if self._shared:
            remote().put(self._name(filename), pack({name: _read(where) for name, where in group.items()}))
        return path


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
