"""Collects what a bug report needs besides the figures: versions, the card, start options, nodes, the last errors.

It leaves this machine, so its paths do not contain the user's name, and it contains no secret.
"""

import importlib.util
import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import torch
from comfyui_version import __version__ as comfyui
from server import PromptServer

from ..accel.artifacts.compiled_for import pack_version
from ..accel.attempt import without_folders
from ..accel.stats import STATS, NodeStats, bounded

DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
SECONDS = 10  # for the driver's tool
OPEN = (  # variables whose values say how things run; of our others only that they are set
    "ANYSHAPE_ARTIFACTS_MB", "ANYSHAPE_FLEET_UNSIGNED", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
MAX_FAILED = 3  # prompts


def particulars() -> str:
    """The head of a report."""
    environment = [f"{name}={value}" for name, value in _environment().items()]
    lines = [
        f"AnyShape {pack_version()}, ComfyUI {comfyui}, front end {_installed('comfyui-frontend-package')}",
        f"torch {torch.__version__}, Triton {_installed('triton', 'triton-windows')}, Python "
        f"{platform.python_version()}, {platform.platform()}",
        _card(),
        f"DynamicVRAM {_dynamic_vram()}, comfy-kitchen {_installed('comfy-kitchen')}",
        f"Started with: {private_options(sys.argv[1:]) or 'no options'}",
        *([f"Environment: {' '.join(environment)}"] if environment else []),
        *_section("Nodes", [_node(node) for node in STATS.nodes()]),
        *_section("Prompts that failed, the latest last", _failed_prompts()),
    ]
    return private("\n".join(lines))


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"{title}:", *(f"- {line}" for line in lines)] if lines else []


def _installed(*names: str) -> str:
    """The version of the first of these that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _card() -> str:
    device = mm.get_torch_device()
    memory = f"{mm.get_total_memory(device) / (1 << 30):.1f} GB"
    if device.type != "cuda":
        return f"Device: {mm.get_torch_device_name(device)}, {memory}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"Device: {torch.cuda.get_device_name(device)} ({major}.{minor}), {memory}, driver {_driver()}"


def _dynamic_vram() -> str:
    """Whether ComfyUI maps weights in while models run."""
    memory = importlib.util.find_spec("comfy.memory_management") and importlib.import_module("comfy.memory_management")
    on = getattr(memory, "aimdo_enabled", False)
    return f"on (comfy-aimdo {_installed('comfy-aimdo')})" if on else "off"


@cache
def _driver() -> str:
    """Of the NVIDIA card; torch does not know it."""
    try:
        asked = subprocess.run(DRIVER, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (asked.stdout.split() or ["unknown"])[0]


def _environment() -> dict[str, str]:
    """What is set of ours and of what decides how torch runs. Keys and addresses are secrets."""
    ours = {name: "(set)" for name in sorted(os.environ) if name.startswith("ANYSHAPE_")}
    return ours | {name: os.environ[name] for name in OPEN if name in os.environ}


def _node(node: NodeStats) -> str:
    settings = ", ".join(f"{name} {' '.join(str(value).split())}" for name, value in node.settings.items())
    said = f": {node.message.splitlines()[0]}" if node.message else ""
    return f"{node.type.removeprefix('AnyShape')} {node.id} ({settings}), {node.state}{said}"


def _failed_prompts() -> list[str]:
    """Which node failed, and how, of the latest prompts in ComfyUI's history that did."""
    server = getattr(PromptServer, "instance", None)
    history = server.prompt_queue.get_history() if server else {}
    ends = [message for entry in history.values() for message in (entry.get("status") or {}).get("messages", [])]
    errors = [data for kind, data in ends if kind == "execution_error"]
    return [_error(data) for data in errors[-MAX_FAILED:]]


def _error(data: dict[str, Any]) -> str:
    text = " ".join(str(data.get("exception_message", "")).split())
    return bounded(without_folders(f"{data.get('node_type')}: {data.get('exception_type')}: {text}"))


def private_options(options: list[str]) -> str:
    """Command line options; of a path below the home folder what follows it, of another one the last part."""
    return " ".join(one if "~" in one else without_folders(one) for one in map(private, options))


def private(text: str) -> str:
    """``text`` with ~ for the home folder, and for the user's name wherever it is a part of a path."""
    home = os.path.expanduser("~")
    names = {Path(home).name, os.environ.get("USER", ""), os.environ.get("USERNAME", "")} - {""}
    text = re.sub(rf"{re.escape(home)}(?!\w)", "~", text) if len(home) > 1 else text
    parts = "|".join(map(re.escape, sorted(names)))
    return re.sub(rf"(?<=[\\/])(?:{parts})(?![\w.-])", "~", text) if parts else text
