"""Where things lie, and the environment that keeps every cache inside the project folder. Standard library only."""

import os
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
VENV = ROOT / ".venv"
VENV_COMFYUI = VENV / "comfyui-0.30.0"
OLDER_COMFYUI = VENV / "comfyui-0.3.75"  # the second test bed: tests/test_older_comfyui.py
FRONT_END = "front_end"  # in each of the two: the web page of its version


class ProjectError(RuntimeError):
    """Something outside the code is not as it must be; the message says what to do about it."""


# Folder names are short on purpose: inductor and Triton add long names of their own, and some systems limit a path.
CACHE_FOLDERS = {
    "PIP_CACHE_DIR": "pip",
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "xdg",
    "XDG_CONFIG_HOME": "xdg",
    "MPLCONFIGDIR": "mpl",
    "HF_HOME": "hf",
    "TORCH_HOME": "torch",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton",
    "TORCH_EXTENSIONS_DIR": "ext",
    "CUDA_CACHE_PATH": "nv",
}

# A person may already have pointed these somewhere on purpose (a shared pip cache, a compile cache that is warm).
KEEP_IF_SET = {"PIP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


# OpenMP's threads wait for each other in a busy loop. Where other programs want the same few cores, that made the demo
# ten times slower; with a short loop it costs nothing on a quiet machine.
SPIN = {"GOMP_SPINCOUNT": "1000"}

# Python keeps the bytecode of what it imports. Some machines switch this off, and every process compiles ComfyUI again.
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}


def project_env() -> dict[str, str]:
    """The variables that send every cache and temporary file into `.cache/`, and more; makes the folders."""
    env = {name: value for name, value in SPIN.items() if name not in os.environ}
    if "COMFYUI_PATH" not in os.environ:  # beside the sources, and a ComfyUI of someone else is left alone
        env |= BYTECODE
    for name, folder in CACHE_FOLDERS.items():
        if name in KEEP_IF_SET and os.environ.get(name):
            continue
        path = CACHE / folder
        path.mkdir(parents=True, exist_ok=True)
        env[name] = str(path)
    return env


def comfyui_path() -> Path:
    """The folder of the ComfyUI to use: COMFYUI_PATH if it is set, else the one that the set-up unpacked."""
    named = os.environ.get("COMFYUI_PATH")
    path = Path(named).expanduser().resolve() if named else VENV_COMFYUI
    if all((path / part).exists() for part in ("main.py", "nodes.py", "comfy")):
        return path
    if named:
        raise ProjectError(
            f"COMFYUI_PATH is {named!r}, but there is no ComfyUI in that folder (main.py, nodes.py and comfy/ are "
            "expected). Set it to the folder that holds ComfyUI's main.py, or unset it to use the registry's copy."
        )
    raise ProjectError(
        f"There is no ComfyUI in .venv/{VENV_COMFYUI.name} yet. Run `make setup` in the project folder, "
        "or set COMFYUI_PATH to the folder of a ComfyUI that you have."
    )


if __name__ == "__main__":
    # For the Makefile: `eval "$(python3 -m tools.paths)"`.
    for _name, _value in project_env().items():
        print(f"export {_name}={shlex.quote(_value)}")
