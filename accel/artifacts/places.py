"""Where the store is, and the secret that signs its entries: by the system's rules, and not in any model folder.

Nodes and routes of ComfyUI write what a browser names into every folder that ``folder_paths`` knows. A store there
would be code that anybody could write. So it lies in the user's cache, and each entry is signed with a secret that lies
elsewhere: who can write into the one folder cannot sign.
"""

import os
import secrets
import sys
import uuid
from pathlib import Path

from ..errors import ArtifactError
from . import folder

STORE = "ANYSHAPE_ARTIFACTS_DIR"  # environment variable: the store, elsewhere
KEY = "ANYSHAPE_ARTIFACTS_KEY"  # environment variable: the secret, for machines that share a store


def store() -> Path:
    """The store's folder."""
    named = os.environ.get(STORE)
    return Path(named) if named else _base("XDG_CACHE_HOME", ".cache", "Caches", "LOCALAPPDATA") / "kernels"


def _secret_file() -> Path:
    return _base("XDG_CONFIG_HOME", ".config", "Application Support", "APPDATA") / "secret"


def _base(variable: str, linux: str, mac: str, windows: str) -> Path:
    """Our folder among those of one purpose."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / mac / "anyshape"
    named = os.environ.get(windows if os.name == "nt" else variable, "")
    default = home / "AppData" / "Local" if os.name == "nt" else home / linux
    return (Path(named) if os.path.isabs(named) else default) / "anyshape"


def secret() -> bytes:
    """Returns what this install signs with: a random file that nobody else may read, made when first needed.

    Raises ``ArtifactError``.
    """
    if key := os.environ.get(KEY):
        return key.encode()
    path = _secret_file()
    try:
        return _read(path) if path.exists() else _made(path)
    except OSError as error:
        raise ArtifactError(f"the secret that signs compiled kernels cannot be made ({error.strerror})") from error


def _made(path: Path) -> bytes:
    """Whole from the start: another process may make one at the same time, and the first one counts."""
    folder.secure(path.parent)
    temporary = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    folder.write(temporary, secrets.token_hex(32).encode())
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links: the last one counts, and costs the other process a compilation
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> bytes:
    found = folder.read(path, private=True)
    if len(found) < 32:
        raise ArtifactError(
            f"{path.name}, which signs compiled kernels, is cut short: delete it, and a new one is made"
        )
    return found
