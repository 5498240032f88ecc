"""What an artefact was compiled for, and whether that is this machine."""

import functools
import hashlib
import re
from pathlib import Path

import torch

PACK = Path(__file__).resolve().parents[2]
KINDS = {  # the fields that must be the same, by kind of artefact
    "kernel": ("pack", "sources", "torch", "triton", "cuda", "arch"),
    "times": ("torch", "cuda", "arch"),  # what was measured: its name holds the card
}
WORDS = {
    "pack": "AnyShape", "sources": "AnyShape's source", "torch": "torch", "triton": "Triton", "cuda": "CUDA",
    "arch": "the architecture",
}  # fmt: skip


def describe(device: torch.device) -> dict[str, str]:
    """All fields, for ``device`` of this machine."""
    return {
        "pack": pack_version(),
        "sources": _sources(),
        "torch": str(torch.__version__),
        "triton": _triton_version(),
        "cuda": torch.version.cuda or "none",
        "arch": architecture(device),
    }


def architecture(device: torch.device) -> str:
    """sm_90 for compute capability 9.0."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "none"


def key_of(kind: str, machine: dict[str, str]) -> dict[str, str]:
    """The fields that an artefact of this kind depends on."""
    return {name: machine[name] for name in KINDS[kind]}


def mismatch(kind: str, key: dict[str, str], machine: dict[str, str]) -> str:
    """Says why an artefact with this key does not fit the machine; "" if it fits."""
    for name in KINDS[kind]:
        if key[name] != machine[name]:
            return f"compiled for {WORDS[name]} {key[name]}, here it is {machine[name]}: it is compiled again"
    return ""


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


@functools.cache
def pack_version() -> str:
    """By the pack's own file, which the registry's archive has too."""
    project = PACK / "pyproject.toml"
    found = re.search(r'^version = "([^"]+)"', project.read_text("utf-8"), re.M) if project.is_file() else None
    return found[1] if found else "unknown"


@functools.cache
def _sources() -> str:
    """A hash of everything that says what kernels compute: those by hand, and what generates the others."""
    accel = PACK / "accel"
    digest = hashlib.sha256()
    for path in sorted(path for part in ("kernels", "tape") for path in (accel / part).rglob("*.py")):
        name = path.relative_to(accel).as_posix()
        digest.update(name.encode() + b"\0" + path.read_text("utf-8").encode() + b"\0")
    return digest.hexdigest()[:16]
