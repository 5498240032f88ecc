"""The oldest versions that the pack runs on. Asked before anything else is imported; standard library only."""

import platform
import re

PYTHON = (3, 10)
TORCH = (2, 6)
COMFYUI = (0, 3, 64)


def unmet() -> str:
    """Says what is too old here, and what to do; "" if nothing is."""
    wants = (("Python", _python(), PYTHON), ("torch", _torch(), TORCH), ("ComfyUI", _comfyui(), COMFYUI))
    old = [
        f"{name} {'.'.join(map(str, least))} or newer (this is {have})"
        for name, have, least in wants if _parts(have) < least
    ]  # fmt: skip
    if not old:
        return ""
    return f"AnyShape needs {' and '.join(old)}. Its nodes are not available until then; everything else works"


def _python() -> str:
    return platform.python_version()


def _torch() -> str:
    import torch

    return str(torch.__version__)


def _comfyui() -> str:
    try:
        from comfyui_version import __version__
    except ImportError:  # before 0.3.10
        return "0.3"
    return __version__


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))
