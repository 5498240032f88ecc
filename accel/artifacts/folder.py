"""Files that only this user could have written: what lies in the store is code that will run."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import ArtifactError, Damaged

MAX_FILE = 1 << 30  # bytes; more is no artefact of ours
WRITERS = stat.S_IWGRP | stat.S_IWOTH
READERS = stat.S_IRGRP | stat.S_IROTH


def secure(folder: Path) -> Path:
    """Returns the folder, which is made if needed and which nobody else may write into. Raises ``ArtifactError``."""
    folder = folder.expanduser().resolve()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"the folder cannot be made ({error.strerror})") from error
    _check(folder, os.lstat(folder), stat.S_ISDIR)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ArtifactError("the folder cannot be written to: give this user write access, or name another folder")
    return folder


def read(path: Path, private: bool = False) -> bytes:
    """Returns the contents of a plain file of this user, never through a link. Raises ``ArtifactError``.

    private: nobody else may read it.
    """
    try:
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise Damaged(f"{path.name} is missing") from error
    except OSError as error:
        what = "is a link" if path.is_symlink() else f"cannot be read ({error.strerror})"
        raise ArtifactError(f"{path.name} {what}") from error
    with os.fdopen(opened, "rb") as file:
        found = os.fstat(file.fileno())
        _check(path, found, stat.S_ISREG, private)
        if path.is_symlink():  # where there is no O_NOFOLLOW
            raise ArtifactError(f"{path.name} is a link")
        if found.st_size > MAX_FILE:
            raise ArtifactError(f"{path.name} is larger than any artefact")
        return file.read()


def write(path: Path, content: bytes) -> None:
    """A new file that only this user may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)


def _check(path: Path, found: os.stat_result, is_kind: Callable[[int], bool], private: bool = False) -> None:
    if not is_kind(found.st_mode):
        raise ArtifactError(f"{path.name} is not of the kind that AnyShape writes")
    if os.name != "posix":  # who may write is not in the mode there
        return
    if found.st_uid != os.geteuid():
        raise ArtifactError(
            f"{path.name} belongs to another user, who could have put code there: use a folder of your own"
        )
    if found.st_mode & WRITERS:
        raise ArtifactError(
            f"{path.name} may be written by others, who could put code there: take that right away (chmod -R go-w)"
        )
    if private and found.st_mode & READERS:
        raise ArtifactError(
            f"{path.name} may be read by others, who could sign with it: delete it, and a new one is made"
        )
