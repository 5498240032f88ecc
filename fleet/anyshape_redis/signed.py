"""Values as they are stored: with a checksum, signed if there is a key, and a kernel's files in one piece.

Whatever Redis holds, it is checked here before Triton sees it. What is wrong is ``Rejected``; nothing else is raised.
"""

import base64
import hashlib
import hmac
import json
import re
from collections import namedtuple
from typing import Any

MAGIC = b"anyshp1\n"
UNSIGNED = bytes(32)
NAME = re.compile(r"\w[\w.+-]{0,199}")  # a kernel's files; no separators, no leading dot
MAX_FILES = 64
WRONG = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # what comes of JSON that is not ours
BINARY = {"cuda": ".cubin", "hip": ".hsaco"}  # the machine code, by Triton's backend
MODULES = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # Linux, Windows, macOS


class Rejected(Exception):
    """A value that must not be used; the text says why and what to do."""


def seal(name: str, data: bytes, key: bytes) -> bytes:
    """``data`` as it is stored under ``name``: with a checksum of both and, with a ``key``, a signature."""
    body = name.encode() + b"\0" + data
    signature = hmac.digest(key, body, "sha256") if key else UNSIGNED
    return MAGIC + hashlib.sha256(body).digest() + signature + data


def unseal(name: str, value: bytes, key: bytes) -> bytes:
    """What ``seal`` was given. Raises ``Rejected``."""
    start = len(MAGIC) + 64
    if len(value) < start or not value.startswith(MAGIC):
        raise Rejected("a value was not written by this cache, or is cut off")
    checksum, signature, data = value[len(MAGIC) : start - 32], value[start - 32 : start], value[start:]
    body = name.encode() + b"\0" + data
    if not hmac.compare_digest(hashlib.sha256(body).digest(), checksum):
        raise Rejected("a value is damaged (its checksum is wrong)")
    if key and not hmac.compare_digest(hmac.digest(key, body, "sha256"), signature):
        raise Rejected("a value is not signed with this worker's ANYSHAPE_FLEET_KEY: find out who wrote it")
    return data


def pack(files: dict[str, bytes]) -> bytes:
    """Several files as one value, so that parts of two compilations never meet."""
    return json.dumps({name: len(data) for name, data in files.items()}).encode() + b"\n" + b"".join(files.values())


def unpack(value: bytes) -> dict[str, bytes]:
    """What ``pack`` was given. Raises ``Rejected``."""
    head, _, rest = value.partition(b"\n")
    try:
        sizes = json.loads(head)
        if not _are_sizes(sizes) or sum(sizes.values()) != len(rest):
            raise ValueError
    except WRONG:
        raise Rejected("a value is not a kernel") from None
    files = {}
    for name, size in sizes.items():
        files[name], rest = rest[:size], rest[size:]
    return files


def _are_sizes(sizes: Any) -> bool:
    return len(sizes) <= MAX_FILES and all(
        NAME.fullmatch(name) and type(size) is int and size >= 0 for name, size in sizes.items()
    )


def check_kernel(files: dict[str, bytes], metadata: str, key: str) -> dict[str, bytes]:
    """Returns ``files`` if Triton can read them as the kernel with that key of its cache. Raises ``Rejected``."""
    try:
        said = json.loads(files[metadata])
        namedtuple("Metadata", sorted(said))  # as Triton does
        binary = BINARY[said["target"]["backend"]]
        for name, content in files.items():
            if not name.endswith(binary):
                content.decode()
        sound = (
            [name for name in files if name.endswith(".json")] == [metadata]
            and any(name.endswith(binary) for name in files)
            and said["hash"] == base64.b32decode(key + "=" * (-len(key) % 8)).hex()
            and {"arch", "warp_size"} <= said["target"].keys()
            and {"name", "num_warps", "num_ctas", "shared"} <= said.keys()
        )
    except WRONG:
        sound = False
    if not sound:
        raise Rejected("a value is not the kernel that it should be")
    return files


def check_module(data: bytes) -> bytes:
    """Returns ``data`` if it is a C extension, of whatever system; Triton checks the rest. Raises ``Rejected``."""
    if not data.startswith(MODULES):
        raise Rejected("a value is not a launcher")
    return data
