"""Values as they are stored: with a checksum, signed if there is a key, and a kernel's files in one piece."""

import hashlib
import hmac
import json
import os

MAGIC = b"anyshp1\n"
UNSIGNED = bytes(32)


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
        sizes = dict(json.loads(head))
        if any(os.path.basename(name) != name or not name for name in sizes) or sum(sizes.values()) != len(rest):
            raise ValueError
    except (ValueError, TypeError):
        raise Rejected("a value is not a kernel") from None
    files = {}
    for name, size in sizes.items():
        files[name], rest = rest[:size], rest[size:]
    return files
